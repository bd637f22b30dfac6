"""No more than is served gets in; what waits is little, in turns, and never for long."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections import Counter
from typing import Any

import httpx
import pytest

from marft_agents.serving.admission import Admission, Ticket
from marft_agents.serving.keys import Client
from marft_agents.serving.refusals import Refusal
from tests.serving.stage import House, Stage, running_stage

A, B = Client("a", "application"), Client("b", "application")


def inside(admission: Admission, client: Client = A) -> Ticket:
    ticket = admission.arrive(client)
    assert ticket.enter_at_once()
    return ticket


async def waits(admission: Admission, client: Client) -> tuple[Ticket, asyncio.Task[None]]:
    """A ticket in the line."""
    ticket, before = admission.arrive(client), admission.waiting
    assert not ticket.enter_at_once()
    task = asyncio.create_task(ticket.enter())
    await asyncio.sleep(0)
    assert admission.waiting == before + 1
    return ticket, task


async def test_places_are_given_back_once() -> None:
    admission = Admission(2, max_waiting=0)
    first, second = inside(admission), inside(admission)
    third = admission.arrive(A)
    with pytest.raises(Refusal) as caught:
        await third.enter()
    assert caught.value.status == 429
    third.leave()
    for _ in range(3):
        first.leave()
    assert (admission.in_flight, admission.refused) == (1, 1)
    await third.enter()
    second.leave()
    third.leave()
    assert admission.in_flight == 0


async def test_free_places_go_to_the_client_that_has_fewest() -> None:
    admission = Admission(3, max_waiting=8)
    tickets = [inside(admission) for _ in range(3)]
    order: list[str] = []
    lined: list[Ticket] = []
    tasks: list[asyncio.Task[None]] = []
    for client in (A, A, A, B, B):
        ticket, task = await waits(admission, client)
        task.add_done_callback(lambda _, name=client.name: order.append(name))
        lined.append(ticket)
        tasks.append(task)
    for ticket in tickets:
        ticket.leave()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks[:1], *tasks[3:])
    assert Counter(order) == {"b": 2, "a": 1}
    assert (admission.in_flight, admission.waiting) == (3, 2)
    for ticket in (lined[0], lined[3], lined[4]):
        ticket.leave()
    await asyncio.gather(*tasks)
    for ticket in lined:
        ticket.leave()
    assert (admission.in_flight, admission.waiting) == (0, 0)


async def test_one_client_cannot_keep_another_out_of_the_line() -> None:
    admission = Admission(1, max_waiting=2)
    held = inside(admission)
    _, first = await waits(admission, A)
    _, second = await waits(admission, A)
    with pytest.raises(Refusal):
        await admission.arrive(A).enter()
    ticket = admission.arrive(B)
    third = asyncio.create_task(ticket.enter())
    with pytest.raises(Refusal, match="line is full"):
        await second
    with pytest.raises(Refusal):  # a third of either would take more than its share
        await admission.arrive(B).enter()
    held.leave()
    await asyncio.wait({first, third}, return_when=asyncio.FIRST_COMPLETED)
    assert admission.in_flight == 1
    for task in (first, third):
        task.cancel()
    await asyncio.gather(first, third, return_exceptions=True)


async def test_nobody_waits_longer_than_said() -> None:
    admission = Admission(1, max_wait_s=0.02)
    inside(admission)
    with pytest.raises(Refusal) as caught:
        await admission.arrive(A).enter()
    assert caught.value.headers["Retry-After"] == "1"
    assert admission.waiting == 0


async def test_who_leaves_the_line_leaves_nothing_behind() -> None:
    admission = Admission(1, max_waiting=4)
    held = inside(admission)
    ticket, task = await waits(admission, B)
    _, other = await waits(admission, A)
    task.cancel()
    held.leave()  # while the one that leaves is still there
    with pytest.raises(asyncio.CancelledError):
        await task
    ticket.leave()
    await other
    assert (admission.in_flight, admission.waiting) == (1, 0)
    # Given a place and cancelled in the same moment: the place goes to the next.
    _, late = await waits(admission, A)
    _, after = await waits(admission, B)
    admission.give_back(A)
    late.cancel()
    after.cancel()
    await asyncio.gather(late, after, return_exceptions=True)
    assert (admission.in_flight, admission.waiting) == (0, 0)


def test_a_key_has_its_own_limit() -> None:
    few = Client("few", "application", max_in_flight=1)
    admission = Admission(10)
    ticket = inside(admission, few)
    with pytest.raises(Refusal, match="the key 'few' has as many requests under way as it may: 1"):
        admission.arrive(few).enter_at_once()
    inside(admission, A)
    ticket.leave()
    inside(admission, few)


def test_bodies_in_memory_are_counted_together() -> None:
    admission = Admission(10, max_bytes=100)
    first, second = admission.arrive(A), admission.arrive(B)
    first.spend(60)
    with pytest.raises(Refusal, match="memory") as caught:
        second.spend(50)
    assert caught.value.status == 429 and "Retry-After" in caught.value.headers
    second.leave()
    assert admission.kept_bytes == 60
    first.leave()
    first.leave()
    assert admission.kept_bytes == 0
    second.spend(100)


def test_when_to_come_again_follows_how_fast_requests_end() -> None:
    now = [0.0]
    admission = Admission(4, now=lambda: now[0])
    assert admission.retry_after_s() == 1
    for _ in range(10):
        ticket = inside(admission)
        now[0] += 3.0
        ticket.leave()
    assert admission.retry_after_s() == 3
    now[0] += 1000
    assert admission.retry_after_s() == 60


# -- through the gateway -----------------------------------------------------------------------


def test_refusals_are_what_clients_try_again(house: House) -> None:
    openai = pytest.importorskip("openai")
    with running_stage(house, admission=Admission(1, max_waiting=0)) as stage:
        ticket = inside(stage.gateway.settings.admission)
        answer = stage.chat("router")
        assert answer.status_code == 429
        assert answer.headers["Retry-After"] == "1"
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        client = openai.OpenAI(base_url=f"{stage.url}/v1", api_key="x", max_retries=2)
        pause = client._sleep_for_retry

        def comes_again(**options: Any) -> Any:
            ticket.leave()
            return pause(**options)

        client._sleep_for_retry = comes_again
        reply = client.chat.completions.create(model="router", messages=[])
        assert reply.model == "router"
        assert stage.gateway.settings.admission.in_flight == 0
        assert stage.gateway.settings.admission.kept_bytes == 0


def _load(stage: Stage, threads: int, rounds: int) -> tuple[list[float], Counter[int]]:
    """Seconds of every accepted request, and how many ended how."""

    def client(_: int) -> list[tuple[int, float]]:
        seen: list[tuple[int, float]] = []
        with httpx.Client(timeout=30) as http:
            for _ in range(rounds):
                begun = time.monotonic()
                answer = http.post(
                    f"{stage.url}/v1/chat/completions", json={"model": "router", "messages": []}
                )
                seen.append((answer.status_code, time.monotonic() - begun))
        return seen

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        results = [result for seen in pool.map(client, range(threads)) for result in seen]
    return [s for status, s in results if status == 200], Counter(status for status, _ in results)


def test_twice_the_load_that_fits_changes_little_for_what_is_let_in(house: House) -> None:
    reply_s, wait_s = 0.05, 0.3
    admission = Admission(4, max_waiting=2, max_wait_s=wait_s)
    with running_stage(house, admission=admission) as stage:
        stage.engine.delay_s = reply_s
        calm, statuses = _load(stage, 4, 5)
        assert statuses == {200: 20}
        busy, statuses = _load(stage, 8, 10)
        assert statuses[429] > 0 and statuses[200] > 20
        assert statuses.keys() == {200, 429}
        assert max(busy) < max(calm) + wait_s + 1.0
        assert (admission.in_flight, admission.waiting, admission.kept_bytes) == (0, 0, 0)
        assert stage.chat("router").status_code == 200


def test_a_client_that_leaves_the_line_frees_its_place(house: House) -> None:
    with running_stage(house, admission=Admission(1)) as stage:
        admission = stage.gateway.settings.admission
        ticket = inside(admission)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{stage.url}/v1/chat/completions",
                json={"model": "router", "messages": []},
                timeout=0.1,
            )
        stage.wait(lambda: not admission.waiting and not admission.kept_bytes)
        ticket.leave()
        assert stage.chat("router").status_code == 200
