"""Probes tell the truth, ask no engine anything, and say more only to those who may know."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from marft_agents.serving.keys import Client, Key, Keyring, digest_of
from tests.serving.stage import OPERATOR_KEY, House, Stage, running_stage

MONITOR = "monitor-key-of-the-tests-0123456789"
APP = "app-key-of-the-tests-0123456789"
KEYS = Keyring(
    [
        Key(Client("grafana", "monitor"), digest_of(MONITOR)),
        Key(Client("app", "application"), digest_of(APP)),
    ]
)


async def _from(stage: Stage, peer: str, path: str, **headers: str) -> httpx.Response:
    """What somebody at ``peer`` is answered."""
    app: Any = stage.gateway.app()
    transport = httpx.ASGITransport(app, client=(peer, 4321))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        return await http.get(path, headers=headers)


def test_liveness_is_of_this_server_and_readiness_of_what_it_can_answer(stage: Stage) -> None:
    def get(path: str) -> tuple[int, str]:
        answer = stage.http.get(f"{stage.url}{path}")
        return answer.status_code, answer.json()["status"]

    assert (get("/health"), get("/ready")) == ((200, "ok"), (200, "ok"))
    stage.gateway.fleet.replicas[0].become("down", "the engine fell over")
    assert (get("/health"), get("/ready")) == ((200, "ok"), (503, "unavailable"))
    stage.gateway.fleet.replicas[0].become("ready")
    assert get("/ready") == (200, "ok")


def test_one_replica_that_is_ready_is_enough(house: House) -> None:
    with running_stage(house, replicas=2) as stage:
        stage.gateway.fleet.replicas[0].become("restoring", "its adapters are loaded")
        told = stage.http.get(f"{stage.url}/ready").json()
        assert told["status"] == "ok"
        assert told["replicas"]["engine-0"]["state"] == "restoring"
        assert told["current"] == {"router": 1, "writer": 1}
        stage.gateway.fleet.replicas[1].become("down", "gone")
        answer = stage.http.get(f"{stage.url}/ready")
        assert answer.status_code == 503 and answer.headers["Retry-After"] == "2"
        assert answer.json()["reason"] == (
            "engine-0 is restoring: its adapters are loaded; engine-1 is down: gone"
        )


def test_a_server_that_is_being_stopped_is_alive_and_not_ready(stage: Stage) -> None:
    stage.gateway.fleet.stopping = True
    assert stage.http.get(f"{stage.url}/health").status_code == 200
    answer = stage.http.get(f"{stage.url}/ready")
    assert (answer.status_code, answer.json()["reason"]) == (503, "this server is being stopped")


def test_probes_ask_no_engine_anything(stage: Stage) -> None:
    before = len(stage.engine.seen)
    for path in ("/health", "/ready", "/metrics") * 20:
        assert stage.http.get(f"{stage.url}{path}").status_code == 200
    assert len(stage.engine.seen) == before


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_strangers_are_told_the_status_alone(stage: Stage, path: str) -> None:
    stage.gateway.access._keyring = KEYS  # pyright: ignore[reportPrivateUsage]
    assert (await _from(stage, "10.1.2.3", path)).json() == {"status": "ok"}
    proxied = {"X-Forwarded-For": "10.1.2.3"}
    assert (await _from(stage, "127.0.0.1", path, **proxied)).json() == {"status": "ok"}
    app = {"Authorization": f"Bearer {APP}"}
    assert (await _from(stage, "10.1.2.3", path, **app)).json() == {"status": "ok"}
    monitor = {"Authorization": f"Bearer {MONITOR}"}
    assert len((await _from(stage, "10.1.2.3", path, **monitor)).json()) > 1
    assert len((await _from(stage, "127.0.0.1", path)).json()) > 1


@pytest.mark.parametrize(
    ("peer", "headers", "status"),
    [
        ("127.0.0.1", {}, 200),
        ("::1", {}, 200),
        ("10.1.2.3", {}, 401),
        ("127.0.0.1", {"X-Forwarded-For": "10.1.2.3"}, 401),
        ("127.0.0.1", {"Forwarded": "for=10.1.2.3"}, 401),
        ("10.1.2.3", {"Authorization": "Bearer wrong"}, 401),
        ("10.1.2.3", {"Authorization": f"Bearer {APP}"}, 403),
        ("10.1.2.3", {"Authorization": f"Bearer {MONITOR}"}, 200),
        ("10.1.2.3", {"X-Marft-Operator-Key": OPERATOR_KEY}, 200),
    ],
)
async def test_metrics_are_for_this_machine_and_for_keys_of_monitors(
    stage: Stage, peer: str, headers: dict[str, str], status: int
) -> None:
    stage.gateway.access._keyring = KEYS  # pyright: ignore[reportPrivateUsage]
    answer = await _from(stage, peer, "/metrics", **headers)
    assert answer.status_code == status
    assert ("marft_requests" in answer.text) == (status == 200)


async def test_behind_a_proxy_metrics_need_a_key_though_applications_need_none(
    stage: Stage,
) -> None:
    assert stage.chat().status_code == 200
    proxied = await _from(stage, "127.0.0.1", "/metrics", **{"X-Forwarded-For": "10.1.2.3"})
    assert proxied.status_code == 403
