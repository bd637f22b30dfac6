"""Group chats: who speaks is chosen by a model, a rule, a function or a human."""

from __future__ import annotations

from typing import Any

import pytest

from marft_agents.schema import EpisodeStarted, HumanEvent
from marft_agents.testing import Reply
from tests.runtimes.classic.kit import (
    GroupChat,
    assistant,
    endings,
    group,
    recording,
    told,
    user,
)

NAMES = ("planner", "coder")


def team(url: str, **options: Any) -> tuple[Any, Any]:
    """The starter and the manager of a group."""
    starter = options.pop("starter", None) or user()
    return starter, group([starter, *(assistant(n, url) for n in NAMES)], url, **options)


def test_a_selection_is_asked_until_it_names_one_and_then_named_by_the_speaker() -> None:
    script = {"selector": ["planner and coder", "nobody", "coder"], "coder": "Done."}
    with recording(script) as (server, recorder, log):
        starter, manager = team(server.url, rounds=2, max_retries_for_selecting_speaker=2)
        recorder.wrap(manager)
        starter.initiate_chat(manager, message="Write it.", silent=True)
    assert told(log) == [("select", "chat_manager")] * 3 + [("act", "coder")]
    *_, chosen, act = log.turns
    assert act.selected_by == chosen.turn_id and chosen.text == "coder"
    assert not any(t.trainable for t in log.turns if t.kind == "select") and act.trainable


def test_a_selection_that_names_nobody_selects_nobody() -> None:
    script = {"selector": ["x", "y"], "planner": "One.", "coder": "Two."}
    with recording(script) as (server, recorder, log):
        starter, manager = team(server.url, rounds=2, max_retries_for_selecting_speaker=1)
        recorder.wrap(manager)
        starter.initiate_chat(manager, message="Write it.", silent=True)
    assert told(log)[:2] == [("select", "chat_manager")] * 2
    (act,) = [t for t in log.turns if t.kind == "act"]
    assert act.selected_by is None


async def test_an_asynchronous_selection_is_attributed_in_its_worker_thread() -> None:
    script = {"selector": ["nobody", "coder"], "coder": "Done."}
    with recording(script) as (server, recorder, log):
        starter, manager = team(server.url, rounds=2, max_retries_for_selecting_speaker=1)
        recorder.wrap(manager)
        await starter.a_initiate_chat(manager, message="Write it.", silent=True)
    assert told(log) == [("select", "chat_manager")] * 2 + [("act", "coder")]
    assert log.turns[2].selected_by == log.turns[1].turn_id


def test_the_selector_may_speak_in_the_users_role() -> None:
    script = {"selector": "coder", "coder": "Done."}
    with recording(script) as (server, recorder, log):
        starter, manager = team(server.url, rounds=2, role_for_select_speaker_messages="user")
        recorder.wrap(manager)
        starter.initiate_chat(manager, message="Write it.", silent=True)
    assert log.turns[0].kind == "select" and log.turns[0].messages[-1]["role"] == "user"


@pytest.mark.parametrize("method", ["round_robin", "random", "callable"])
def test_without_a_model_there_is_no_selection(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def second(_last: Any, groupchat: Any) -> Any:
        return groupchat.agents[1]

    def last(agents: Any) -> Any:  # left to chance, it may be the one without a model every time
        return agents[-1]

    monkeypatch.setattr("random.choice", last)
    chosen: Any = second if method == "callable" else method
    with recording() as (server, recorder, log):
        starter, manager = team(server.url, rounds=3, speaker_selection_method=chosen)
        recorder.wrap(manager)
        starter.initiate_chat(manager, message="Write it.", silent=True)
    assert log.turns and {t.kind for t in log.turns} == {"act"}
    assert all(t.selected_by is None for t in log.turns)


def test_a_human_may_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    def two(*_args: Any, **_options: Any) -> str:
        return "2"

    monkeypatch.setattr("builtins.input", two)
    with recording() as (server, recorder, log):
        starter, manager = team(server.url, rounds=2, speaker_selection_method="manual")
        recorder.wrap(manager)
        starter.initiate_chat(manager, message="Write it.", silent=True)
    assert told(log) == [("act", "planner")]


def test_a_group_that_selects_by_itself_is_a_group_all_the_same() -> None:
    class OneAfterTheOther(GroupChat):
        def select_speaker(self, last_speaker: Any, selector: Any) -> Any:
            place = self.agents.index(last_speaker) + 1
            return self.agents[place % len(self.agents)]

    from autogen import GroupChatManager

    with recording() as (server, recorder, log):
        members: list[Any] = [user(), *(assistant(n, server.url) for n in NAMES)]
        chat = OneAfterTheOther(members, messages=[], max_round=3)
        manager = GroupChatManager(chat, llm_config=False, silent=True)
        recorder.wrap(manager)
        members[0].initiate_chat(manager, message="Write it.", silent=True)
    assert told(log) == [("act", "planner"), ("act", "coder")]


@pytest.mark.parametrize("wrapped", ["manager", "group", "member"])
def test_somebody_from_outside_may_start_a_wrapped_group(wrapped: str) -> None:
    with recording({"selector": "coder", "coder": "Done."}) as (server, recorder, log):
        _, manager = team(server.url, rounds=2)
        chat = manager.groupchat
        recorder.wrap({"manager": manager, "group": chat, "member": chat.agents[1]}[wrapped])
        user("stranger").initiate_chat(manager, message="Write it.", silent=True)
    assert told(log) == [("select", "chat_manager"), ("act", "coder")]
    (started,) = log.of(EpisodeStarted)
    assert started.task == "Write it."


def test_a_group_without_wrapped_agents_is_none_of_ours() -> None:
    with recording({"selector": "coder", "coder": "Done."}) as (server, recorder, log):
        recorder.wrap(assistant("critic", server.url))
        starter, manager = team(server.url, rounds=2)
        starter.initiate_chat(manager, message="Write it.", silent=True)
        assert not any("return_token_ids" in r.body for r in server.requests)
    assert not log.events


@pytest.mark.parametrize("end", ["auto", "terminated"])
def test_rounds_that_run_out_truncate_unless_they_are_the_design(end: str) -> None:
    with recording({"selector": "coder", "coder": "More."}) as (server, recorder, log):
        starter, manager = team(server.url, rounds=3)
        recorder.wrap(manager, end=end)
        starter.initiate_chat(manager, message="Write it.", silent=True)
    expected = "truncated" if end == "auto" else "terminated"
    assert endings(log) == [(expected, "max_round (3) reached")]


def test_the_word_that_ends_the_chat_ends_the_episode() -> None:
    script = {"selector": "coder", "coder": ["TERMINATE"]}
    with recording(script) as (server, recorder, log):
        starter, manager = team(server.url, rounds=9)
        recorder.wrap(manager)
        starter.initiate_chat(manager, message="Write it.", silent=True)
    assert endings(log) == [("terminated", "TERMINATE")]


def test_a_cleared_history_and_an_introduction_cost_no_turn() -> None:
    script = {"selector": ["user", "coder"], "coder": "Done."}
    with recording(script) as (server, recorder, log):
        starter = user(default_auto_reply={"content": "CLEAR HISTORY", "role": "user"})
        _, manager = team(
            server.url,
            rounds=3,
            starter=starter,
            send_introductions=True,
            enable_clear_history=True,
        )
        recorder.wrap(manager)
        starter.initiate_chat(manager, message="Write it.", silent=True)
    assert told(log) == [("select", "chat_manager")] * 2 + [("act", "coder")]
    assert not log.of(HumanEvent)  # a fixed reply in the user's role is nobody's word


def test_a_failed_selection_is_a_failed_turn_and_a_failed_episode() -> None:
    def script(body: Any) -> Reply:
        return Reply(status=400, error="no such model")

    with recording(script) as (server, recorder, log):
        starter, manager = team(server.url)
        recorder.wrap(manager)
        with pytest.raises(Exception, match="no such model"):
            starter.initiate_chat(manager, message="Write it.", silent=True)
    assert told(log) == [("select", "chat_manager")] and "no such model" in str(log.turns[0].error)
    assert endings(log)[0][0] == "failed"


async def test_a_resumed_group_is_an_episode_of_its_own() -> None:
    script = {"selector": "coder", "coder": ["One.", "Two."]}
    with recording(script) as (server, recorder, log):
        starter, manager = team(server.url, rounds=2)
        recorder.wrap(manager)
        starter.initiate_chat(manager, message="Write it.", silent=True)
        history = list(manager.groupchat.messages)
        last, message = manager.resume(messages=history, silent=True)
        last.initiate_chat(manager, message=message, clear_history=False, silent=True)
    first, second = [t for t in log.turns if t.kind == "act"]
    assert len(log.of(EpisodeStarted)) == 2 and first.episode_id != second.episode_id
    assert not second.depends_on  # what was said in another episode is part of the task here
    assert not log.of(HumanEvent)
