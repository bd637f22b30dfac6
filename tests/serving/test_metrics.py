"""Numbers are exact, bounded, and cost no request anything but time."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import prometheus_client
import pytest

from marft_agents.errors import ConfigError, MarftError
from marft_agents.registry import Bounds
from marft_agents.serving.admission import Admission
from marft_agents.serving.aliases import Aliases, Route
from marft_agents.serving.fleet import Fleet
from marft_agents.serving.loader import StepError, step
from marft_agents.serving.metrics import (
    KEEP_S,
    MOST_CLIENTS,
    MOST_GONE,
    OTHER,
    Metrics,
    error_kind,
)
from marft_agents.serving.metrics_state import State
from marft_agents.serving.passage import Outcome
from marft_agents.serving.swap_events import SwapEvent, observed
from marft_agents.serving.threads import in_thread
from tests.serving.logged import told
from tests.serving.recording_kit import CHAT, Clock, recording_stage
from tests.serving.scraping import Page, scrape, scrape_until
from tests.serving.stage import House, Stage, running_stage

OUTCOME = Outcome(
    route=Route("router", 1),
    replica="engine-0",
    client="app",
    episode=None,
    request_id=None,
    streamed=True,
    status=200,
    seconds=1.5,
    first_s=0.5,
    prompt_tokens=10,
    completion_tokens=11,
    problem=None,
)


def _metrics(aliases: Aliases, now: Any = time.monotonic) -> Metrics:
    return Metrics(State(Fleet(()), aliases, Admission()), now=now)


async def _page(metrics: Metrics) -> Page:
    return Page((await metrics.page()).decode())


# -- exact -------------------------------------------------------------------------------------


def test_counts_are_exact_under_64_parallel_requests(house: House) -> None:
    with running_stage(house) as stage:

        def ask(i: int) -> int:
            body = {"model": "writer" if i % 4 == 0 else "router", "messages": []}
            with httpx.Client(timeout=30) as http:
                asked = body | {"stream": i % 2 == 1}
                return http.post(f"{stage.url}{CHAT}", json=asked).status_code

        with ThreadPoolExecutor(64) as pool:
            assert set(pool.map(ask, range(128))) == {200}
        page = scrape_until(stage, lambda p: p.sum("marft_requests_total") == 128)
        assert page.sum("marft_requests_total", agent="writer", version=1, code="2xx") == 32
        assert page.sum("marft_request_seconds_count") == 128
        assert page.sum("marft_first_token_seconds_count") == 64
        assert page.sum("marft_output_token_seconds_count") == 64
        assert page.sum("marft_prompt_tokens_total") == 2 * 128
        assert page.sum("marft_completion_tokens_total") == 64 * 3 + 64 * 5
        assert page.sum("marft_in_flight") == page.sum("marft_replica_in_flight") == 0
        assert page.sum("marft_admission_in_flight") == 0
        assert page.sum("marft_client_requests_total", client="anybody", code="2xx") == 128


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, None),
        ({"status": 400}, "rejected"),
        ({"status": 500}, "engine"),
        ({"status": 503, "problem": "gone", "streamed": False}, "unreachable"),
        ({"status": 504, "problem": "late", "streamed": False}, "timeout"),
        ({"problem": "broke off"}, "cut_off"),
        ({"left": True}, "client_left"),
        ({"status": None}, "client_left"),
    ],
)
def test_errors_have_kinds(change: dict[str, Any], kind: str | None) -> None:
    assert error_kind(replace(OUTCOME, **change)) == kind


def test_what_engines_get_wrong_is_counted(stage: Stage) -> None:
    stage.engine.faults.break_stream_after = 2
    stage.chat(stream=True)
    stage.engine.faults.break_stream_after = None
    stage.engine.faults.generate_status = 400
    stage.chat()
    page = scrape_until(stage, lambda p: p.sum("marft_request_errors_total") == 2)
    assert page.sum("marft_request_errors_total", agent="router", kind="cut_off") == 1
    assert page.sum("marft_request_errors_total", agent="router", kind="rejected") == 1
    assert page.sum("marft_request_seconds_count") == 0  # of good replies only
    assert page.sum("marft_uncounted_replies_total") == 0


def test_refusals_are_counted_by_status_and_by_nothing_that_a_client_says(house: House) -> None:
    with running_stage(house, api_key="sk-app-0123456789") as stage:
        stage.http.headers["Authorization"] = "Bearer sk-app-0123456789"
        stage.chat("nobody")
        stage.http.get(f"{stage.url}/no/such/route")
        stage.http.post(f"{stage.url}{CHAT}", content=b"x" * 5000)
        stage.http.headers["Authorization"] = "Bearer wrong"
        stage.chat("router")
        page = scrape_until(stage, lambda p: p.sum("marft_refusals_total") == 4)
        assert page.sum("marft_refusals_total", status=404) == 2
        assert page.sum("marft_refusals_total", status=413) == 1
        assert page.sum("marft_refusals_total", status=401) == 1
        said = str(page.samples)
        assert "nobody" not in said and "no/such" not in said


def test_a_stream_that_says_no_usage_is_counted_as_such(stage: Stage) -> None:
    stage.chat(stream=True, stream_options={"include_usage": False, "continuous_usage_stats": True})
    page = scrape_until(stage, lambda p: p.sum("marft_requests_total") == 1)
    assert page.sum("marft_uncounted_replies_total", agent="router") == 1


def test_state_is_read_at_every_scrape(stage: Stage) -> None:
    stage.engine.gate = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as pool:
        headers = {"X-Marft-Episode": "e1"}
        asked = pool.submit(
            stage.http.post,
            f"{stage.url}{CHAT}",
            json={"model": "router", "messages": []},
            headers=headers,
        )
        page = scrape_until(
            stage, lambda p: p.sum("marft_in_flight", agent="router", version=1) == 1
        )
        assert page.sum("marft_replica_in_flight", replica="engine-0") == 1
        assert page.sum("marft_leases", agent="router", version=1) == 1
        assert page.sum("marft_current_version", agent="router") == 1
        assert page.sum("marft_versions_loaded") == 2
        assert page.sum("marft_replica_up", replica="engine-0") == 1
        assert page.sum("marft_replica_state", replica="engine-0", state="ready") == 1
        assert page.sum("marft_build") == 1
        stage.engine.gate.release()
        assert asked.result(10).status_code == 200


def test_what_the_recorder_loses_is_counted(house: House) -> None:
    class Full:
        def write(self, event: Any) -> None:
            raise OSError("no space left on device")

        def close(self) -> None: ...

    with recording_stage(house, log=Full(), recorder={"raise_errors": False}) as recorder:
        assert recorder.ask().status_code == 200
        assert recorder.recording.recorder.flush()
        page = scrape(recorder.stage)
        assert page.sum("marft_recorder_dropped_events_total") >= 1
        assert page.sum("marft_recorder_waiting_events") >= 1  # kept until the disk works again


# -- swaps -------------------------------------------------------------------------------------


def test_swaps_are_counted_and_timed_by_step(stage: Stage) -> None:
    stage.operator.swap("router", 2)
    stage.engine.faults.load_status = 500
    with pytest.raises(MarftError):
        stage.operator.swap("writer", 1)  # is served already, and so only probed
        stage.house.publish("writer")
        stage.operator.swap("writer", 2)
    page = scrape(stage)
    assert page.sum("marft_swaps_total", result="ok", step="") == 2
    assert page.sum("marft_swaps_total", result="failed", step="load") == 1
    assert page.values("marft_swap_step_seconds_count", "step") == {
        "check",
        "compare",
        "list",
        "load",
        "prepare",
        "probe",
        "record",
    }
    assert page.sum("marft_swap_step_seconds_count", step="load") == 2


async def test_steps_in_threads_are_timed() -> None:
    events: list[SwapEvent] = []

    def check() -> None:
        with step("router@v1", "check", "engine-0"):
            raise ConfigError("it is damaged")

    with pytest.raises(StepError):
        await observed(in_thread(check), "router", 1, [events.append])
    told = [(e.whole, e.step, e.replica, e.result) for e in events]
    assert told == [(False, "check", "engine-0", "refused"), (True, "check", None, "refused")]


def test_a_canarys_share_and_verdict(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "marft_agents")
    bounds = Bounds(min_requests=20, for_s=60.0)
    stage.operator.canary("router", 2, 0.5, bounds=bounds)
    assert scrape(stage).sum("marft_canary_share", agent="router", version=2) == 0.5
    stage.engine.faults.broken = "router@v2"
    canaries = stage.gateway.canaries
    for n in range(400):
        headers = {"X-Marft-Episode": f"e{n}"}
        body = {"model": "router", "messages": []}
        stage.http.post(f"{stage.url}{CHAT}", json=body, headers=headers)
        if canaries.verdicts["worse"]:
            break
    page = scrape_until(stage, lambda p: p.sum("marft_canary_verdicts_total", verdict="worse") == 1)
    assert page.sum("marft_canary_share") == 0
    lines = told(caplog, "canary")
    assert [line["verdict"] for line in lines] == ["begun", "worse"]
    assert (lines[1]["agent"], lines[1]["version"]) == ("router", 2)


def test_scrapes_while_versions_are_swapped(stage: Stage) -> None:
    stop = threading.Event()
    failures: list[str] = []

    def swap() -> None:
        for i in range(12):
            stage.operator.swap("router", 1 + (i + 1) % 2)
            stage.http.post(f"{stage.url}{CHAT}", json={"model": "router", "messages": []})
        stop.set()

    def look() -> None:
        with httpx.Client(timeout=10) as http:
            while not stop.is_set():
                answer = http.get(f"{stage.url}/metrics")
                if answer.status_code != 200:
                    failures.append(answer.text)
                Page(answer.text)

    with ThreadPoolExecutor(3) as pool:
        done = [pool.submit(swap), pool.submit(look), pool.submit(look)]
        for future in done:
            future.result(60)
    assert not failures
    assert scrape(stage).sum("marft_swaps_total", result="ok") == 12


# -- bounded -----------------------------------------------------------------------------------


async def test_series_stay_bounded_over_200_versions() -> None:
    aliases, clock = Aliases(), Clock()
    metrics = _metrics(aliases, clock)
    most = 0
    for version in range(1, 201):
        route = Route("router", version)
        aliases.point(route)
        if version > 1:
            aliases.remove(Route("router", version - 1))
        metrics.outcome(replace(OUTCOME, route=route))
        if version % 20 == 0:
            page = await _page(metrics)
            most = max(most, len(page.values("marft_requests_total", "version")))
        clock.now += 1.0
    assert most == 1 + MOST_GONE
    clock.now += KEEP_S
    page = await _page(metrics)
    everywhere = {
        labels["version"]
        for name, samples in page.samples.items()
        for labels, _ in samples
        if "agent" in labels and "version" in labels and name.startswith("marft_")
    }
    assert everywhere == {"200"}


async def test_an_unloaded_versions_last_numbers_are_still_scraped() -> None:
    aliases, clock = Aliases(), Clock()
    metrics, route = _metrics(aliases, clock), Route("router", 1)
    aliases.point(route)
    metrics.outcome(OUTCOME)
    aliases.point(Route("router", 2))
    aliases.remove(route)
    assert (await _page(metrics)).sum("marft_requests_total", version=1) == 1
    clock.now += KEEP_S - 1
    assert (await _page(metrics)).sum("marft_requests_total", version=1) == 1
    clock.now += 1
    assert (await _page(metrics)).sum("marft_requests_total", version=1) == 0


async def test_a_version_that_comes_back_goes_on_counting() -> None:
    aliases, clock = Aliases(), Clock()
    metrics, route = _metrics(aliases, clock), Route("router", 1)
    aliases.point(route)
    metrics.outcome(OUTCOME)
    aliases.remove(route)
    await _page(metrics)
    aliases.point(route)
    clock.now += KEEP_S - 1
    await _page(metrics)
    clock.now += KEEP_S
    metrics.outcome(OUTCOME)
    assert (await _page(metrics)).sum("marft_requests_total", version=1) == 2


async def test_names_of_keys_are_bounded() -> None:
    aliases = Aliases()
    aliases.point(OUTCOME.route)
    metrics = _metrics(aliases)
    for n in range(MOST_CLIENTS + 50):
        metrics.outcome(replace(OUTCOME, client=f"key{n}"))
    page = await _page(metrics)
    assert len(page.values("marft_client_requests_total", "client")) == MOST_CLIENTS + 1
    assert page.sum("marft_client_requests_total", client=OTHER) == 50


async def test_gateways_do_not_share_numbers() -> None:
    aliases = Aliases()
    aliases.point(Route("router", 1))
    one, other = _metrics(aliases), _metrics(aliases)
    one.outcome(OUTCOME)
    assert (await _page(one)).sum("marft_requests_total") == 1
    assert (await _page(other)).sum("marft_requests_total") == 0
    assert b"marft_" not in prometheus_client.generate_latest()


# -- harmless ----------------------------------------------------------------------------------


def test_observers_that_fail_break_nothing(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("an observer's bug")

    stage.gateway.observers.insert(0, fail)
    stage.gateway.visits.observers.insert(0, fail)
    stage.gateway.swapper.observers.insert(0, fail)
    assert stage.chat().status_code == 200
    assert stage.chat(stream=True).text.endswith("data: [DONE]\n\n")
    assert stage.operator.swap("router", 2)["to"] == 2
    page = scrape_until(stage, lambda p: p.sum("marft_requests_total") == 2)
    assert page.sum("marft_swaps_total", result="ok") == 1
    assert "an observer's bug" in caplog.text


def test_a_request_is_counted_in_less_than_50_microseconds() -> None:
    aliases = Aliases()
    aliases.point(OUTCOME.route)
    metrics = _metrics(aliases)
    metrics.outcome(OUTCOME)
    best = 1.0
    for _ in range(5):  # the thread's own time, so that a busy machine does not count
        began = time.thread_time()
        for _ in range(500):
            metrics.outcome(OUTCOME)
        best = min(best, (time.thread_time() - began) / 500)
    assert best < 50e-6
