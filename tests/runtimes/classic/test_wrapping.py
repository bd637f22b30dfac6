"""What may be wrapped, how often, by whom; and that everything comes off again."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import autogen
import pytest
from autogen import ConversableAgent, OpenAIWrapper

from marft_agents import MarftRecorder
from marft_agents.errors import IntegrationError
from marft_agents.schema import EpisodeStarted
from marft_agents.testing import InMemoryLog, ScriptedServer
from marft_agents_classic import matches, runtime
from tests.runtimes.classic.kit import VERSION, assistant, group, recording, told, user

PATCHED = ("initiate_chat", "a_initiate_chat", "initiate_chats", "a_initiate_chats")


def lent() -> list[Any]:
    """What the classes hold in the places that are patched."""
    return [vars(ConversableAgent)[n] for n in PATCHED] + [vars(OpenAIWrapper)["create"]]


def ask(agent: Any, message: str = "Hm?") -> Any:
    return user().initiate_chat(agent, message=message, max_turns=1, silent=True)


def test_everything_comes_off_in_any_order_of_closing() -> None:
    before = lent()
    with ScriptedServer() as server:
        agents = [assistant(n, server.url) for n in ("planner", "coder")]
        for agent in agents:
            ask(agent)
        own = [set(vars(a)) for a in agents]
        clients = [set(vars(a.client)) for a in agents]
        recorders = [MarftRecorder(log=InMemoryLog()) for _ in agents]
        for recorder, agent in zip(recorders, agents, strict=True):
            recorder.wrap(agent)
            ask(agent)
        assert lent() != before
        recorders[0].close()
        assert lent() != before
        ask(agents[1])
        recorders[1].close()
        assert lent() == before
        assert [set(vars(a)) for a in agents] == own
        assert [set(vars(a.client)) for a in agents] == clients
        count = len(server.requests)
        ask(agents[0])
        assert "return_token_ids" not in server.requests[count].body


def test_recorders_at_once_record_their_own_agents_each() -> None:
    logs = InMemoryLog(), InMemoryLog()
    with ScriptedServer() as server:
        planner, coder = (assistant(n, server.url) for n in ("planner", "coder"))
        with MarftRecorder(log=logs[0]) as one, MarftRecorder(log=logs[1]) as two:
            one.wrap(planner)
            two.wrap(coder)
            ask(planner)
            ask(coder)
            planner.initiate_chat(coder, message="Hm?", max_turns=2, silent=True)
    assert told(logs[0]) == [("act", "planner")] * 2
    assert told(logs[1]) == [("act", "coder")] * 3
    assert all(t.trainable for log in logs for t in log.turns)


def test_a_second_recorder_is_refused_until_the_first_is_closed() -> None:
    with recording() as (server, recorder, _log):
        coder = recorder.wrap(assistant("coder", server.url))
        later = InMemoryLog()
        with MarftRecorder(log=later) as second:
            with pytest.raises(IntegrationError, match="another MarftRecorder"):
                second.wrap([assistant("planner", server.url), coder])
            recorder.close()
            second.wrap(coder)
            ask(coder)
    assert told(later) == [("act", "coder")]


def test_wrapping_again_and_wrapping_more_is_one_recording() -> None:
    with recording() as (server, recorder, log):
        members = [user(), assistant("planner", server.url), assistant("coder", server.url)]
        manager = group(members, server.url, rounds=3)
        recorder.wrap(members[1])
        ask(recorder.wrap(members[1]))
        recorder.wrap(manager)
        recorder.wrap(manager)
        members[0].initiate_chat(manager, message="Hm?", silent=True)
        assert len(server.requests) == len(log.turns) or recorder.flush()
        assert len(server.requests) == len(log.turns)
    assert len(log.of(EpisodeStarted)) == 2


def test_agents_met_in_a_chat_start_no_episodes_of_their_own() -> None:
    with recording() as (server, recorder, log):
        planner, coder = (assistant(n, server.url) for n in ("planner", "coder"))
        recorder.wrap(planner)
        planner.initiate_chat(coder, message="Hm?", max_turns=1, silent=True)
        ask(coder)
    assert told(log) == [("act", "coder")]


def test_an_agent_met_first_and_wrapped_later_comes_off_too() -> None:
    with recording() as (server, recorder, _log):
        planner, coder = (assistant(n, server.url) for n in ("planner", "coder"))
        recorder.wrap(planner)
        planner.initiate_chat(coder, message="Hm?", max_turns=1, silent=True)
        recorder.wrap(coder)
        coder.reset()
        getattr(coder, "_max_consecutive_auto_reply_dict").clear()  # noqa: B009 keeps partners
        gone = weakref.ref(planner)
        del planner
        gc.collect()
        assert gone() is None
        recorder.close()
        assert "_marft_seat" not in vars(coder) and "send" not in vars(coder)


def test_a_copy_of_a_wrapped_agent_is_an_agent_of_its_own() -> None:
    with recording() as (server, recorder, log):
        coder = recorder.wrap(user("coder", default_auto_reply="Mine."))
        twin = copy.copy(coder)
        setattr(twin, "_name", "twin")  # noqa: B010 it has no setter
        assert "_marft_seat" not in vars(twin)
        assert ask(twin).chat_history[-1]["content"] == "Mine."
        assert len(server.requests) == 0
    assert not log.turns


def test_recording_keeps_no_agent_alive() -> None:
    with recording() as (server, recorder, log):
        coder = recorder.wrap(assistant("coder", server.url))
        ask(coder)
        reference = weakref.ref(coder)
        del coder
        gc.collect()
        assert reference() is None
        recorder.flush()
    assert len(log.turns) == 1
    gc.collect()


def test_an_agent_that_is_gone_takes_the_patched_classes_with_it() -> None:
    gc.collect()
    before = lent()
    with ScriptedServer() as server:
        recorder = MarftRecorder(log=InMemoryLog())
        coder = recorder.wrap(assistant("coder", server.url))
        assert lent() != before
        del coder
        gc.collect()
        assert lent() == before
        recorder.close()


def test_many_selections_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    made = ConversableAgent.__init__

    def counted(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        alive.add(self)

    monkeypatch.setattr(ConversableAgent, "__init__", counted)
    with recording({"selector": "coder", "coder": "More."}) as (server, recorder, _log):
        starter = user()
        manager = group([starter, assistant("coder", server.url)], server.url, rounds=2)
        manager.groupchat.agents.append(assistant("critic", server.url))
        recorder.wrap(manager)
        sizes: list[int] = []
        for _ in range(3):
            starter.initiate_chat(manager, message="Hm?", silent=True)
            gc.collect()
            sizes.append(len(alive))
    assert sizes == [4, 4, 4]  # the manager and its members


@pytest.mark.parametrize("thing", ["group", "list", "tuple", "wrapper", "empty"])
def test_what_may_be_wrapped(thing: str) -> None:
    with recording() as (server, recorder, _log):
        planner, coder = (assistant(n, server.url) for n in ("planner", "coder"))
        chat = autogen.GroupChat([planner, coder], messages=[])
        things: dict[str, Any] = {
            "group": chat,
            "list": [planner, coder],
            "tuple": (planner, coder),
            "wrapper": coder.client,
            "empty": autogen.GroupChat([], messages=[]),
        }
        if thing in ("wrapper", "empty"):
            with pytest.raises(IntegrationError, match="agent"):
                recorder.wrap(things[thing])
        else:
            assert recorder.wrap(things[thing]) is things[thing]


def test_only_objects_of_this_runtime_match() -> None:
    assert matches(user()) and matches([user(), user("two")])
    assert not matches(3) and not matches([]) and not matches([user(), 3])


def test_the_installed_distribution_is_named() -> None:
    assert runtime().endswith(f" {VERSION}") or VERSION in runtime()
