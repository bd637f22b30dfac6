"""What every integration keeps, as a test class to inherit.

Invariant: the application is compared with itself, once plain and once recorded, on servers that
answer by the request alone; so whatever differs comes from the recorder.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from marft_agents.recording import EventLog, MarftRecorder
from marft_agents.schema import EpisodeEnded, EpisodeStarted, JsonDict
from marft_agents.testing.fakes import BrokenLog, InMemoryLog
from marft_agents.testing.server import (
    Reply,
    Script,
    ScriptedServer,
    default_reply,
    token_ids_of,
)

ADDED_FIELDS = frozenset({"return_token_ids", "logprobs"})
"""What recording adds to a request's body."""


def without_model(body: JsonDict) -> Reply | str:
    """A reply that depends on what the agent reads, and not on the model's name."""
    return default_reply({**body, "model": "agent"})


def refused(body: JsonDict) -> Reply:
    """A server that takes no request."""
    return Reply(status=400, error="scripted refusal")


class IntegrationContract:
    """A test class inherits it and gives ``make_team`` and ``run``.

    The team has at least two agents; each calls the model that has its own name, and each sees what
    the others said. ``run`` may be async and returns what the app sees, comparable with ``==``.
    ``script`` answers by the request alone; teams that need tool calls or handoffs give their own.
    """

    script: Script = staticmethod(default_reply)

    def make_team(self, server_url: str, *, stream: bool) -> Any:
        raise NotImplementedError

    def run(self, team: Any, task: str) -> Any:
        raise NotImplementedError

    def _recorded(
        self, *, stream: bool = False, script: Script = None, **options: Any
    ) -> tuple[Any, InMemoryLog, ScriptedServer]:
        log: EventLog = options.pop("log", None) or InMemoryLog()
        with (
            ScriptedServer(script or self.script) as server,
            MarftRecorder(log=log, **options) as recorder,
        ):
            team = recorder.wrap(self.make_team(server.url, stream=stream))
            seen = self._outcome(team)
            assert recorder.flush()
        return seen, log if isinstance(log, InMemoryLog) else InMemoryLog(), server

    def _plain(self, *, stream: bool = False, script: Script = None) -> tuple[Any, ScriptedServer]:
        with ScriptedServer(script or self.script) as server:
            return self._outcome(self.make_team(server.url, stream=stream)), server

    def _seen(self, team: Any, task: str = "Solve it together.") -> Any:
        result = self.run(team, task)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result

    def _outcome(self, team: Any) -> Any:
        """What the app sees: a result, or the type of the exception that it catches."""
        try:
            return self._seen(team)
        except AssertionError:
            raise
        except Exception as error:
            return type(error), "scripted refusal" in str(error)

    # -- nothing changes ----------------------------------------------------------------------

    def test_wrap_returns_the_same_object(self) -> None:
        with ScriptedServer() as server, MarftRecorder(log=InMemoryLog()) as recorder:
            team = self.make_team(server.url, stream=False)
            assert recorder.wrap(team) is team
            assert recorder.wrap(team) is team

    def test_the_app_sees_the_same(self) -> None:
        for stream in (False, True):
            plain, server = self._plain(stream=stream)
            recorded, _, recorded_server = self._recorded(stream=stream)
            assert recorded == plain
            assert _bodies(recorded_server, ADDED_FIELDS) == _bodies(server)

    def test_a_refusal_of_the_server_reaches_the_app(self) -> None:
        for stream in (False, True):
            plain, server = self._plain(stream=stream, script=refused)
            recorded, log, recorded_server = self._recorded(stream=stream, script=refused)
            assert recorded == plain
            assert _first_tries(recorded_server) == _first_tries(server)
            assert log.turns
            for turn in log.turns:
                assert turn.error and "scripted refusal" in turn.error and not turn.trainable

    def test_a_closed_recorder_leaves_no_trace(self) -> None:
        plain, server = self._plain()
        log = InMemoryLog()
        with ScriptedServer(self.script) as later:
            team = self.make_team(later.url, stream=False)
            with MarftRecorder(log=log) as recorder:
                recorder.wrap(team)
            assert self._outcome(team) == plain
        assert _sent(later) == _sent(server) and not log.events

    def test_a_recorder_that_is_off_leaves_no_trace(self) -> None:
        plain, server = self._plain()
        recorded, log, later = self._recorded(enabled=False)
        assert recorded == plain and _sent(later) == _sent(server) and not log.events

    def test_a_failure_of_the_recorder_stays_inside(self) -> None:
        def no_ids() -> str:
            raise RuntimeError("a bug in the recorder")

        plain, _ = self._plain()
        assert self._recorded(log=BrokenLog(), raise_errors=False)[0] == plain
        assert self._recorded(ids=no_ids, raise_errors=False)[0] == plain

    # -- everything is there ------------------------------------------------------------------

    def test_every_call_is_a_turn_of_its_agent(self) -> None:
        for stream in (False, True):
            _, log, server = self._recorded(stream=stream)
            acts = [t for t in log.turns if t.kind == "act"]
            assert acts and len(log.turns) == len(server.requests)
            assert _as_text(t.messages for t in log.turns) == _as_text(
                request.body["messages"] for request in server.requests
            )
            assert all(t.agent == t.model for t in acts)
            assert {r.headers["x-marft-agent"] for r in server.requests} == {
                t.agent for t in log.turns
            }

    def test_turns_hold_the_tokens(self) -> None:
        for stream in (False, True):
            _, log, _ = self._recorded(stream=stream)
            for turn in log.turns:
                assert turn.token_ids and turn.prompt_token_ids and turn.logprobs
                assert len(turn.token_ids) == len(turn.logprobs)
                if turn.text and not turn.tool_calls:
                    assert turn.token_ids == token_ids_of(turn.text)

    def test_prompts_are_linked_to_earlier_turns(self) -> None:
        _, log, _ = self._recorded()
        acts = [t for t in log.turns if t.kind == "act"]
        earlier: set[str] = set()
        for turn in log.turns:
            assert set(turn.depends_on) <= earlier
            earlier.add(turn.turn_id)
        assert acts[0].turn_id in acts[-1].depends_on

    def test_an_agent_is_sent_to_the_model_it_is_mapped_to(self) -> None:
        plain, _ = self._plain(script=without_model) if self._fixed_script() else (None, None)
        script: Script = without_model if self._fixed_script() else self.script
        names = {t.agent for t in self._recorded(script=script)[1].turns if t.kind == "act"}
        models = {name: f"{name}-tuned" for name in names}
        seen, log, server = self._recorded(script=script, models=models)
        for request in server.requests:
            agent = request.headers["x-marft-agent"]
            assert agent not in models or request.body["model"] == models[agent]
        assert {t.model for t in log.turns if t.kind == "act"} == names
        if self._fixed_script():
            assert seen == plain

    def _fixed_script(self) -> bool:
        return self.script is default_reply

    # -- episodes -----------------------------------------------------------------------------

    def test_a_run_is_an_episode(self) -> None:
        _, log, _ = self._recorded()
        assert len({e.episode_id for e in log.events}) == 1
        started, ended = log.events[0], log.events[-1]
        assert isinstance(started, EpisodeStarted) and isinstance(ended, EpisodeEnded)
        assert re.fullmatch(r"\S+ \d+\.\d+\S*", started.runtime or "")

    def test_a_second_run_is_a_second_episode(self) -> None:
        log = InMemoryLog()
        with ScriptedServer(self.script) as server, MarftRecorder(log=log) as recorder:
            for _ in range(2):
                self._seen(recorder.wrap(self.make_team(server.url, stream=False)))
        ids = [e.episode_id for e in log.of(EpisodeStarted)]
        assert len(set(ids)) == 2 and ids == [e.episode_id for e in log.of(EpisodeEnded)]
        turns = [[t.agent for t in log.turns if t.episode_id == name] for name in ids]
        assert turns[0] == turns[1] != []

    def test_an_explicit_episode_beats_the_automatic_one(self) -> None:
        log = InMemoryLog()
        with ScriptedServer(self.script) as server, MarftRecorder(log=log) as recorder:
            team = recorder.wrap(self.make_team(server.url, stream=False))
            with recorder.episode(id="mine") as episode:
                self._seen(team)
                episode.reward(1.0)
        assert {e.episode_id for e in log.events} == {"mine"}
        assert log.turns

    def test_two_runs_at_once_stay_apart(self) -> None:
        log, tasks = InMemoryLog(), ("Paint the boat green.", "Count the seven geese.")
        with ScriptedServer(self.script) as server, MarftRecorder(log=log) as recorder:

            def play(task: str) -> None:
                team = recorder.wrap(self.make_team(server.url, stream=False))
                self._seen(team, task)

            _at_once([lambda task=task: play(task) for task in tasks])
        alone = {task: self._agents(task) for task in tasks}
        ids = [e.episode_id for e in log.of(EpisodeStarted)]
        assert len(set(ids)) == 2
        for name in ids:
            read = [json.dumps(t.messages) for t in log.turns if t.episode_id == name]
            mine = next(task for task in tasks if any(task in text for text in read))
            other = next(task for task in tasks if task != mine)
            assert not any(other in text for text in read)
            agents = [t.agent for t in log.turns if t.episode_id == name]
            assert sorted(agents) == alone.pop(mine)

    def _agents(self, task: str) -> list[str]:
        """Who speaks when the team works on ``task`` with nobody beside it."""
        log = InMemoryLog()
        with ScriptedServer(self.script) as server, MarftRecorder(log=log) as recorder:
            self._seen(recorder.wrap(self.make_team(server.url, stream=False)), task)
        return sorted(t.agent for t in log.turns)


def _as_text(messages: Iterable[Any]) -> list[str]:
    """In an order of their own: agents may ask at the same time."""
    return sorted(json.dumps(each, sort_keys=True) for each in messages)


def _bodies(server: ScriptedServer, without: frozenset[str] = frozenset()) -> list[JsonDict]:
    return [{k: v for k, v in r.body.items() if k not in without} for r in server.requests]


def _first_tries(server: ScriptedServer) -> list[Any]:
    """The model of every request that the app made; a client sends again when the network fails."""
    number = "x-stainless-retry-count"
    return [r.body.get("model") for r in server.requests if r.headers.get(number, "0") == "0"]


def _sent(server: ScriptedServer) -> list[tuple[bytes, Mapping[str, str]]]:
    """Requests byte for byte; only the server's own address may differ."""
    return [(r.raw, {k: v for k, v in r.headers.items() if k != "host"}) for r in server.requests]


def _at_once(plays: list[Callable[[], None]]) -> None:
    """Run each in a thread of its own, and hand on the first exception."""
    problems: list[BaseException] = []

    def guarded(play: Callable[[], None]) -> None:
        try:
            play()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=guarded, args=(play,)) for play in plays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


async def _awaited(result: Any) -> Any:
    return await result
