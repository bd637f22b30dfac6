"""Chats of two, in sequence, inside one another, at once; and what is said outside of any chat."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from marft_agents.schema import EpisodeStarted, RewardEvent
from tests.runtimes.classic.kit import assistant, endings, recording, told, user


def test_a_summary_is_its_writers_and_no_sample() -> None:
    script = {"coder": ["Here is the code.", "It was about code."]}
    with recording(script) as (server, recorder, log):
        coder = recorder.wrap(assistant("coder", server.url))
        result = user().initiate_chat(
            coder,
            message="Write it.",
            max_turns=1,
            summary_method="reflection_with_llm",
            silent=True,
        )
    assert result.summary == "It was about code."
    assert told(log) == [("act", "coder"), ("summary", "coder")]
    act, summary = log.turns
    assert act.trainable and not summary.trainable
    assert summary.depends_on == [act.turn_id] and summary.parent_agent is None


def _queue(agents: list[Any], **more: Any) -> list[dict[str, Any]]:
    return [
        {"recipient": a, "message": f"Ask {a.name}.", "max_turns": 1, "silent": True, **more}
        for a in agents
    ]


def test_chats_in_sequence_are_one_episode_and_the_last_one_ends_it() -> None:
    script = {"planner": "A long plan.", "coder": "Good code. TERMINATE"}
    with recording(script) as (server, recorder, log):
        agents = [assistant(n, server.url) for n in ("planner", "coder")]
        starter = user()
        recorder.wrap([starter, *agents])
        results = starter.initiate_chats(_queue(agents))
    assert len(results) == 2 and told(log) == [("act", "planner"), ("act", "coder")]
    (started,) = log.of(EpisodeStarted)
    assert started.task == ["Ask planner.", "Ask coder."]
    assert endings(log) == [("terminated", "TERMINATE")]
    assert log.turns[1].depends_on == [log.turns[0].turn_id]  # through the carried over summary


def test_the_function_of_that_name_makes_each_chat_an_episode() -> None:
    from autogen import initiate_chats

    with recording({"planner": "A plan.", "coder": "Code."}) as (server, recorder, log):
        agents = [assistant(n, server.url) for n in ("planner", "coder")]
        recorder.wrap(agents)
        initiate_chats([{**chat, "sender": user()} for chat in _queue(agents)])
        with recorder.episode(id="mine"):
            initiate_chats([{**chat, "sender": user()} for chat in _queue(agents)])
    assert len(log.of(EpisodeStarted)) == 3
    assert [t.agent for t in log.turns if t.episode_id == "mine"] == ["planner", "coder"]


async def test_asynchronous_chats_of_one_queue_are_one_episode() -> None:
    with recording({"planner": "A plan.", "coder": "Code."}) as (server, recorder, log):
        agents = [assistant(n, server.url) for n in ("planner", "coder")]
        starter = user()
        recorder.wrap([starter, *agents])
        queue = _queue(agents)
        queue[0]["chat_id"], queue[1]["chat_id"] = 1, 2
        await starter.a_initiate_chats(queue)
    assert sorted(told(log)) == [("act", "coder"), ("act", "planner")]
    assert len({e.episode_id for e in log.events}) == 1


def praise(episode: Any, _result: Any) -> None:
    episode.reward(1.0)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_nested_chat_is_in_the_episode_and_names_its_parent(mode: str) -> None:
    script = {
        "planner": ["Ask the writer.", "More detail, please.", "Thanks."],
        "writer": ["A first draft.", "A second draft."],
        "critic": "The second draft is good.",
    }
    with recording(script) as (server, recorder, log):
        planner, writer, critic = (
            assistant(n, server.url) for n in ("planner", "writer", "critic")
        )
        queue: list[dict[str, Any]] = [
            {"recipient": writer, "sender": planner, "max_turns": 2, "silent": True},
        ]
        critic.register_nested_chats(queue, trigger=planner)
        recorder.wrap([planner, critic], on_end=praise)
        options: dict[str, Any] = {"message": "Start.", "max_turns": 2, "silent": True}
        if mode == "sync":
            critic.initiate_chat(planner, **options)
        else:
            asyncio.run(critic.a_initiate_chat(planner, **options))
    turns = {(t.agent, t.text): t for t in log.turns}
    first, draft = turns["planner", "Ask the writer."], turns["writer", "A first draft."]
    assert first.parent_agent is None and first.parent_turn is None
    assert (draft.parent_agent, draft.parent_turn) == ("critic", first.turn_id)
    assert turns["planner", "More detail, please."].parent_agent == "critic"
    assert len({t.episode_id for t in log.turns}) == 1
    assert [r.value for r in log.of(RewardEvent)] == [1.0]
    assert endings(log)[0][0] == "truncated"  # the outer limit; the inner one says nothing


def test_the_summary_of_a_nested_chat_belongs_to_it() -> None:
    script = {"planner": "Ask.", "writer": ["A draft.", "It is a draft."]}
    with recording(script) as (server, recorder, log):
        planner, writer = assistant("planner", server.url), assistant("writer", server.url)
        boss = user("boss")
        queue = [
            {
                "recipient": writer,
                "message": "Write.",
                "max_turns": 1,
                "summary_method": "reflection_with_llm",
                "silent": True,
            }
        ]
        boss.register_nested_chats(queue, trigger=planner)
        recorder.wrap(boss)
        boss.initiate_chat(planner, message="Start.", max_turns=2, silent=True)
    assert told(log)[:3] == [("act", "planner"), ("act", "writer"), ("summary", "writer")]
    plan, act, summary = log.turns[:3]
    assert act.parent_agent == summary.parent_agent == "boss"
    assert act.parent_turn == summary.parent_turn == plan.turn_id
    outer = log.turns[3]
    assert outer.agent == "planner" and summary.turn_id in outer.depends_on


def test_the_limit_of_a_nested_chat_says_nothing_of_the_episode() -> None:
    script = {"planner": ["Ask.", "Thanks. TERMINATE"], "writer": "A draft."}
    with recording(script) as (server, recorder, log):
        planner, writer = assistant("planner", server.url), assistant("writer", server.url)
        boss = user("boss")
        queue = [{"recipient": writer, "message": "Write.", "max_turns": 1, "silent": True}]
        boss.register_nested_chats(queue, trigger=planner)
        recorder.wrap(boss)
        with recorder.episode():
            boss.initiate_chat(planner, message="Start.", max_turns=2, silent=True)
    assert len(log.turns) == 3 and endings(log) == [("terminated", "TERMINATE")]


def test_a_text_changed_on_its_way_out_is_still_its_turns() -> None:
    def censor(sender: Any, message: Any, recipient: Any, silent: Any) -> Any:
        return "Something else entirely."

    with recording({"planner": "A plan.", "coder": "Code."}) as (server, recorder, log):
        planner, coder = (assistant(n, server.url) for n in ("planner", "coder"))
        planner.register_hook("process_message_before_send", censor)
        recorder.wrap([planner, coder])
        coder.initiate_chat(planner, message="Plan it.", max_turns=2, silent=True)
    plan, code = log.turns[:2]
    assert code.messages[-1]["content"] == "Something else entirely."
    assert code.depends_on == [plan.turn_id]


def test_agents_in_one_chat_after_the_other_are_never_filed_under_the_first() -> None:
    with recording() as (server, recorder, log):
        coder, starter = assistant("coder", server.url), user()
        recorder.wrap(coder)
        for task in ("one", "two", "three"):
            starter.initiate_chat(coder, message=task, max_turns=1, silent=True)
        with recorder.episode(id="mine"):
            starter.initiate_chat(coder, message="four", max_turns=1, silent=True)
        starter.initiate_chat(coder, message="five", max_turns=1, silent=True)
    tasks = {e.episode_id: e.task for e in log.of(EpisodeStarted)}
    assert list(tasks.values()) == ["one", "two", "three", None, "five"]
    for turn in log.turns:
        asked = turn.messages[-1]["content"]
        assert tasks[turn.episode_id] == asked or (turn.episode_id, asked) == ("mine", "four")


@pytest.mark.parametrize("mode", ["tasks", "threads"])
async def test_one_agent_with_several_partners_at_once_is_in_each_ones_episode(mode: str) -> None:
    with recording() as (server, recorder, log):
        coder = recorder.wrap(assistant("coder", server.url))
        users = [user(f"user{i}") for i in range(4)]
        if mode == "threads":

            def play(one: Any) -> None:
                one.initiate_chat(coder, message=f"I am {one.name}.", max_turns=2, silent=True)

            threads = [threading.Thread(target=play, args=(u,)) for u in users]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            users = []
        await asyncio.gather(
            *(
                u.a_initiate_chat(coder, message=f"I am {u.name}.", max_turns=2, silent=True)
                for u in users
            )
        )
    tasks = {e.episode_id: str(e.task) for e in log.of(EpisodeStarted)}
    assert len(tasks) == 4 and len(log.turns) == 8
    for turn in log.turns:
        texts = [str(m["content"]) for m in turn.messages]
        assert tasks[turn.episode_id] in texts
        assert turn.depends_on == [
            t.turn_id for t in log.turns if t.episode_id == turn.episode_id and t.index < turn.index
        ]


def test_threads_of_the_app_have_an_episode_each_or_the_one_they_are_given() -> None:
    def play(coder: Any, task: str) -> None:
        user().initiate_chat(coder, message=task, max_turns=1, silent=True)

    with recording() as (server, recorder, log):
        coders = [recorder.wrap(assistant(f"coder{i}", server.url)) for i in range(3)]
        threads = [threading.Thread(target=play, args=(c, c.name)) for c in coders]
        with recorder.episode(id="mine") as episode:

            def inside() -> None:
                with episode.active():
                    play(coders[0], "inside")

            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            last = threading.Thread(target=inside)
            last.start()
            last.join()
    assert len(log.of(EpisodeStarted)) == 4
    assert [t.agent for t in log.turns if t.episode_id == "mine"] == ["coder0"]


@pytest.mark.parametrize("limit", [1, 3])
def test_turns_that_run_out_truncate(limit: int) -> None:
    with recording({"coder": "More."}) as (server, recorder, log):
        coder = recorder.wrap(assistant("coder", server.url))
        user().initiate_chat(coder, message="Write.", max_turns=limit, silent=True)
        user().initiate_chat(
            coder, message="Write.", max_turns=limit, silent=True, clear_history=False
        )
    assert endings(log) == [("truncated", f"max_turns ({limit}) reached")] * 2


def test_automatic_replies_that_run_out_truncate() -> None:
    with recording({"coder": "More."}) as (server, recorder, log):
        coder = recorder.wrap(assistant("coder", server.url))
        user(max_consecutive_auto_reply=2).initiate_chat(coder, message="Write.", silent=True)
    assert len(log.turns) == 3
    assert endings(log) == [("truncated", "max_consecutive_auto_reply reached")]


def test_the_last_word_ends_a_chat_of_two() -> None:
    def over(message: dict[str, Any]) -> bool:
        return str(message.get("content")).endswith("TERMINATE")

    with recording({"coder": ["More.", "Done. TERMINATE"]}) as (server, recorder, log):
        coder = recorder.wrap(assistant("coder", server.url))
        user(is_termination_msg=over).initiate_chat(coder, message="Write.", silent=True)
    assert len(log.turns) == 2 and endings(log) == [("terminated", "TERMINATE")]


def test_what_is_said_outside_of_a_chat_is_recorded_too() -> None:
    with recording({"coder": "Yes."}) as (server, recorder, log):
        coder, starter = assistant("coder", server.url), user(max_consecutive_auto_reply=0)
        recorder.wrap([coder, starter])
        assert coder.generate_reply(messages=[{"role": "user", "content": "Hm?"}]) == "Yes."
        starter.send("Well?", coder, request_reply=True, silent=True)
        starter.send("Never mind.", coder, request_reply=False, silent=True)
        asked = [{"role": "user", "content": "So?"}]
        assert coder.generate_oai_reply(messages=asked) == (True, "Yes.")
    assert [e.task for e in log.of(EpisodeStarted)] == ["Hm?", "Well?", "So?"]
    assert told(log) == [("act", "coder")] * 3
    assert {reason for reason, _ in endings(log)} == {"terminated"}


def test_on_end_sees_the_result_and_may_reward() -> None:
    seen: list[str] = []

    def on_end(episode: Any, result: Any) -> None:
        seen.append(result.chat_history[-1]["content"])
        episode.reward(0.5)

    with recording({"coder": "Yes."}) as (server, recorder, log):
        coder = recorder.wrap(assistant("coder", server.url), on_end=on_end)
        user().initiate_chat(coder, message="Hm?", max_turns=1, silent=True)
    assert seen == ["Yes."] and [r.value for r in log.of(RewardEvent)] == [0.5]


async def test_a_cancelled_chat_leaves_a_failed_turn_and_episode() -> None:
    gate = threading.Event()

    def late(_body: Any) -> str:
        gate.wait(20)
        return "Too late."

    with recording(late) as (server, recorder, log):
        coder = recorder.wrap(assistant("coder", server.url))
        chat = user().a_initiate_chat(coder, message="Hm?", max_turns=1, silent=True)
        task = asyncio.ensure_future(chat)
        while not server.requests:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
    assert endings(log)[0][0] == "failed" and "Cancelled" in str(endings(log)[0][1])
    assert [t.error is not None for t in log.turns] == [True]
