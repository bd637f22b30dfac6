"""``finetune --online``: rounds of running the app, training and swapping, by the command line."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from marft_agents.log import LogReader
from marft_agents.registry import CanaryPlan, Change, Registry
from tests.cli import played_app
from tests.cli.played_app import Played
from tests.cli.shop import FakeGateway, Shop, served
from tests.training.synthetic import snapshot

URL = "http://127.0.0.1:1"
APP = "tests.cli.played_app:run"


def ready(shop: Shop, *, fails: frozenset[int] = frozenset()) -> FakeGateway:
    """Tasks, the app, and a server."""
    lines = [json.dumps({"task": f"ticket {n}"}) for n in range(8)]
    (shop.root / "tasks.jsonl").write_text("\n".join(lines))
    played = Played(shop.tiny, shop.root / "adapters", shop.root / "logs", fails)
    shop.monkeypatch.setattr(played_app, "PLAYED", [played])
    return served(shop)


def republished(registry: Registry, agent: str) -> int:
    """Its first version once more, as a version of its own."""
    first = registry.manifest(agent, 1)
    folder = registry.path(agent, 1)
    return registry.publish(agent, folder, base=first.base, parent=None, untrained=True).version


def online(*options: str) -> tuple[str, ...]:
    return (
        *("--online", APP, "--tasks", "tasks.jsonl", "--server", URL, "--iterations", "2"),
        *("--set", "episodes_per_iteration=6", "--set", "online_learning_rate=1e-3"),
        *("--set", "target_kl=10", "--epochs", "1"),
        *options,
    )


def test_offline_to_online_in_one_command(shop: Shop) -> None:
    shop.team.write(10)
    gateway = ready(shop, fails=frozenset({1}))
    code, out = shop.run(*online())
    assert code == 0
    assert gateway.swaps == [(a, v) for v in (2, 3, 4) for a in ("router", "writer")]
    assert gateway.prepared == [(2 * v - 4, {"router": v, "writer": v}) for v in (2, 3, 4)]
    assert f"{URL} serves the new versions already" in out
    assert "v1 -> v4  yes" in out and "marft-agents swap" not in out
    rounds = [line.split() for line in out.splitlines() if line.startswith(("1   ", "2   "))]
    assert [row[:3] for row in rounds] == [["1", "6", "1"], ["2", "6", "0"]]
    assert [row[4] for row in rounds] == ["v3", "v4"]
    assert "runs failed: 1 ConnectionError" in out
    folders = sorted((shop.root / "logs" / "online").glob("*/iteration-*"))
    assert [folder.name for folder in folders] == ["iteration-0001", "iteration-0002"]
    ended = [sorted(e.episode_id for e in LogReader(folder).episodes()) for folder in folders]
    assert gateway.released == [(2, ended[0]), (4, ended[1])], "told before each round's swaps"
    turns = [t for e in LogReader(folders[1]).episodes() for t in e.turns]
    assert {t.adapter_start for t in turns} == {"router@v3", "writer@v3"}
    training = Registry(shop.root / "adapters").manifest("router", 4).training
    assert (training["objective"], training["iteration"], training["episodes"]) == ("ppo", 2, 6)


def test_online_alone_begins_without_logs(shop: Shop) -> None:
    gateway = ready(shop)
    code, out = shop.run(*online("--offline", "none", "--level", "token"))
    assert code == 0
    assert gateway.swaps == [(a, v) for v in (2, 3) for a in ("router", "writer")]
    assert "weight" not in out, "there is none in a policy gradient"


def test_a_swap_that_fails_stops_the_run_and_says_how_to_go_on(shop: Shop) -> None:
    gateway = ready(shop)
    gateway.refuse = "writer"
    code, out = shop.run(*online("--offline", "none", "--set", "save_steps=1"))
    assert code == 2 and "writer: the engine refused" in shop.error
    assert gateway.swaps == [("router", 2)]
    assert "the same command with --resume goes on from there" in out
    gateway.refuse = None
    shop.team.write(4)
    assert "is of a run that was interrupted" in shop.run("--dry-run")[1]
    code, out = shop.run(*online("--offline", "none", "--set", "save_steps=1", "--resume"))
    assert code == 0 and "resumed from checkpoint-" in out
    assert gateway.swaps[-1] == ("writer", Registry(shop.root / "adapters").current("writer"))


def test_with_one_that_cannot_be_prepared_none_moves(shop: Shop) -> None:
    gateway = ready(shop)
    gateway.unready = "writer"
    code, out = shop.run(*online("--offline", "none", "--set", "save_steps=1"))
    assert code == 2 and "writer: its probe failed" in shop.error
    assert gateway.swaps == [] and "the same command with --resume goes on" in out


def test_versions_that_cannot_all_be_prepared_are_swapped_one_by_one(shop: Shop) -> None:
    gateway = ready(shop)
    gateway.one_by_one = "not all fit"
    code, out = shop.run(*online("--offline", "none"))
    assert code == 0 and out.count("not all fit; they are swapped one after the other") == 2
    assert gateway.swaps == [(a, v) for v in (2, 3) for a in ("router", "writer")]


def test_a_pinned_agent_is_refused_before_training(shop: Shop) -> None:
    gateway = ready(shop)
    registry = Registry(shop.root / "adapters")
    registry.pin("writer")
    code, _ = shop.run(*online("--offline", "none"))
    assert code == 2 and gateway.swaps == []
    assert "'writer' is pinned to version 1" in shop.error
    assert "agents: {writer: frozen}" in shop.error
    assert registry.versions("router") == registry.versions("writer") == [1]
    (shop.root / "frozen.yaml").write_text("agents: {Writer: frozen, writer: frozen}")
    assert "pinned" not in shop.run(*online("--config", "frozen.yaml", "--dry-run"))[1]


def test_an_agent_with_a_canary_is_refused_before_training(shop: Shop) -> None:
    gateway = ready(shop)
    registry = Registry(shop.root / "adapters")
    registry.promote("writer", republished(registry, "writer"), by="me", evidence={})
    plan = CanaryPlan(version=1, share=0.1, key="k", since=datetime.now(UTC), by="me")
    registry.set_canary("writer", plan, Change("me"))
    code, _ = shop.run(*online("--offline", "none"))
    assert code == 2 and gateway.swaps == []
    assert "version 1 of 'writer' is a canary" in shop.error
    assert "adapters canary writer --stop" in shop.error


def test_an_agent_that_its_adapter_never_answers_ends_the_run(shop: Shop) -> None:
    gateway = ready(shop)
    played_app.PLAYED[-1].calls["writer"] = "router"
    code, _ = shop.run(*online("--offline", "none"))
    assert code == 2 and gateway.swaps == []
    assert "none of 6 turns trained for adapter 'writer' was answered by it" in shop.error
    assert "agent 'writer' was answered by router@v1" in shop.error
    assert "give the agent model='writer' in the app" in shop.error
    assert Registry(shop.root / "adapters").versions("writer") == [1]


def test_agents_that_share_an_adapter_are_answered_by_it(shop: Shop) -> None:
    gateway = ready(shop)
    played_app.PLAYED[-1].calls["writer"] = "router"
    (shop.root / "shared.yaml").write_text("agents: {writer: router}")
    code, out = shop.run(*online("--offline", "none", "--config", "shared.yaml"))
    assert code == 0, out
    assert gateway.swaps == [("router", 2), ("router", 3)]


def test_a_dry_run_runs_no_app(shop: Shop) -> None:
    shop.team.write(8)
    ready(shop)
    before = snapshot(shop.root)
    code, out = shop.run(*online("--dry-run"))
    assert code == 0 and "dry run: nothing was trained" in out
    assert "online: 8 tasks; 2 iterations of 6 tasks x 1 episodes" in out
    for said in ("  memory: about ", "  time: about ", "of training an iteration", "  engine: 2 a"):
        assert said in out, said
    assert snapshot(shop.root) == before and played_app.PLAYED[-1].plays == 0


ONLINE = ("--online", APP)
TASKS, SERVER = ("--tasks", "tasks.jsonl"), ("--server", URL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*ONLINE, *SERVER), "--online needs --tasks FILE"),
        ((*ONLINE, *TASKS), "--online needs --server URL"),
        (TASKS, "--tasks needs --online MODULE:FUNCTION"),
        (("--iterations", "3"), "--iterations is of the online stage"),
        (("--offline", "none"), "--offline none leaves nothing to do without --online"),
        (("--fresh-optimizer",), "--fresh-optimizer needs --resume"),
        (("--operator-key-env", "HOME"), "--operator-key-env needs --server"),
        (("--resume",), "--resume: no checkpoint in"),
        (("--offline", "awk"), "offline is 'awk'; it must be one of awr, ppo, sft"),
        (("--level", "word"), "level is 'word'; it must be one of action, token"),
        (("--online", "nowhere:run", *TASKS, *SERVER), "no module 'nowhere'"),
        (("--online", "json:dump", "--tasks", "none.jsonl", *SERVER), "none.jsonl"),
        ((*ONLINE, "--tasks", "empty.jsonl", *SERVER), "empty.jsonl holds no task"),
        (
            (*ONLINE, *TASKS, *SERVER, "--estimator=group", "--set", "episodes_per_iteration=8"),
            "set group_size to 2 or more",
        ),
        ((*ONLINE, *TASKS, *SERVER, "--set", "group_size=65"), "group_size is 65"),
        (("--offline", "ppo", "--schedule", "alternate"), "would train one agent only"),
        (("--schedule", "simultaneous"), "--schedule orders policy-gradient updates"),
    ],
)
def test_what_makes_no_sense_is_one_line_before_anything_runs(
    options: tuple[str, ...], message: str, shop: Shop
) -> None:
    shop.team.write(8)
    ready(shop)
    (shop.root / "empty.jsonl").write_text("\n")
    assert message in shop.refuses(*options)


def test_online_records_into_a_folder(shop: Shop) -> None:
    shop.team.write(8)
    ready(shop)
    (file,) = (shop.root / "logs").glob("*.jsonl")
    assert "--online records into a folder" in shop.refuses(*online(), logs=str(file))


def test_the_server_must_serve_the_folder_that_is_trained(shop: Shop) -> None:
    shop.team.write(8)
    ready(shop).adapters = Path(shop.root / "elsewhere")
    message = shop.refuses(*online())
    assert "serves nothing for 'router', and version 1 is in use in adapters" in message
