"""Tools, code and humans: what happens besides model calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from autogen import register_function

from marft_agents.schema import HumanEvent, ToolEvent
from marft_agents.testing import Reply
from tests.runtimes.classic.kit import (
    STREAMS,
    VERSION,
    assistant,
    config,
    endings,
    recording,
    told,
    user,
)

CODE = "Run this:\n```python\nprint(6 * 7)\n```"


def add(a: int, b: int) -> str:
    return str(a + b)


async def slow_add(a: int, b: int) -> str:
    return str(a + b)


def failing(a: int, b: int) -> str:
    raise ValueError("no such number")


def calling(*names: str) -> Reply:
    return Reply(tool_calls=[(name, {"a": 2, "b": 3}) for name in names])


@pytest.mark.parametrize("tool", [add, slow_add])
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_tool_call_is_an_event_of_the_agent_that_made_it(mode: str, tool: Any) -> None:
    if mode == "sync" and tool is slow_add and VERSION.startswith(("0.2", "0.9")):
        pytest.skip(f"autogen {VERSION} cannot run a coroutine where a loop runs")
    with recording({"coder": [calling("add", "add"), "It is 5."]}) as (server, recorder, log):
        coder, starter = assistant("coder", server.url), user()
        register_function(tool, caller=coder, executor=starter, name="add", description="Adds.")
        recorder.wrap([coder, starter])
        options: dict[str, Any] = {"message": "2 + 3?", "max_turns": 2, "silent": True}
        if mode == "sync":
            starter.initiate_chat(coder, **options)
        else:
            await starter.a_initiate_chat(coder, **options)
    first, second = log.turns
    events = log.of(ToolEvent)
    assert [(e.name, e.agent, e.result, e.ok) for e in events] == [("add", "coder", "5", True)] * 2
    assert [e.call_id for e in events] == [c["id"] for c in first.tool_calls or ()]
    assert json.loads(events[0].arguments) == {"a": 2, "b": 3}
    assert second.depends_on == [first.turn_id] and (first.step, second.step) == (0, 1)


def test_tools_may_be_registered_after_wrapping_and_may_fail() -> None:
    with recording({"coder": [calling("bad", "absent"), "Sorry."]}) as (server, recorder, log):
        coder, starter = recorder.wrap([assistant("coder", server.url), user()])
        register_function(failing, caller=coder, executor=starter, name="bad", description="Bad.")
        starter.initiate_chat(coder, message="2 + 3?", max_turns=2, silent=True)
        assert "bad" in json.dumps(server.requests[0].body["tools"])
    assert told(log) == [("act", "coder")] * 2 and all(t.token_ids for t in log.turns)
    assert [(e.name, e.ok) for e in log.of(ToolEvent)] == [("bad", False), ("absent", False)]
    assert "no such number" in str(log.of(ToolEvent)[0].result)


def test_a_chat_inside_a_tool_names_the_turn_that_called_it() -> None:
    script = {"coder": [calling("add"), "It is 5."], "helper": "Five."}
    with recording(script) as (server, recorder, log):
        coder, starter = assistant("coder", server.url), user()
        helper = assistant("helper", server.url)

        def ask(a: int, b: int) -> str:
            inner = user("inner")
            return str(
                inner.initiate_chat(helper, message=f"{a} + {b}?", max_turns=1, silent=True).summary
            )

        register_function(ask, caller=coder, executor=starter, name="add", description="Asks.")
        recorder.wrap([coder, starter])
        starter.initiate_chat(coder, message="2 + 3?", max_turns=2, silent=True)
    assert told(log) == [("act", "coder"), ("act", "helper"), ("act", "coder")]
    first, inner, last = log.turns
    assert (inner.parent_agent, inner.parent_turn) == ("coder", first.turn_id)
    assert first.parent_agent is None and last.parent_agent is None
    assert endings(log) == [("truncated", "max_turns (2) reached")]


@pytest.mark.skipif(not STREAMS, reason=f"autogen {VERSION} cannot be asked to stream")
def test_a_streamed_tool_call_keeps_its_tokens() -> None:
    with recording({"coder": [calling("add"), "It is 5."]}) as (server, recorder, log):
        coder, starter = assistant("coder", server.url, stream=True), user()
        register_function(add, caller=coder, executor=starter, name="add", description="Adds.")
        recorder.wrap([coder, starter])
        starter.initiate_chat(coder, message="2 + 3?", max_turns=2, silent=True)
        assert all(r.body["stream"] for r in server.requests)
    assert all(t.trainable for t in log.turns) and len(log.turns) == 2
    assert [e.agent for e in log.of(ToolEvent)] == ["coder"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # looks for docker
@pytest.mark.parametrize("kind", ["legacy", "executor"])
def test_code_that_is_run_is_an_event(kind: str) -> None:
    from autogen.coding import LocalCommandLineCodeExecutor

    settings: dict[str, Any] = {"work_dir": ".", "use_docker": False}
    if kind == "executor":
        settings = {"executor": LocalCommandLineCodeExecutor(work_dir=".")}
    with recording({"coder": [CODE, "It is 42."]}) as (server, recorder, log):
        coder = assistant("coder", server.url)
        runner = recorder.wrap(user(code_execution_config=settings))
        runner.initiate_chat(coder, message="6 * 7?", max_turns=2, silent=True)
    (event,) = log.of(ToolEvent)
    assert (event.name, event.agent, event.ok) == ("code_execution", "coder", True)
    assert "42" in str(event.result) and "print(6 * 7)" in json.dumps(event.arguments)
    assert [t.step for t in log.turns] == [0, 1]


def test_an_executor_that_takes_no_attribute_is_read_off_the_reply() -> None:
    from autogen.coding import LocalCommandLineCodeExecutor

    inner = LocalCommandLineCodeExecutor(work_dir=".")

    class Slotted:
        __slots__ = ("code_extractor",)

        def __init__(self) -> None:
            self.code_extractor = inner.code_extractor

        def execute_code_blocks(self, code_blocks: Any) -> Any:
            return inner.execute_code_blocks(code_blocks)

        def restart(self) -> None: ...

    with recording({"coder": [CODE, "It is 42."]}) as (server, recorder, log):
        runner = recorder.wrap(user(code_execution_config={"executor": Slotted()}))
        runner.initiate_chat(
            assistant("coder", server.url), message="6 * 7?", max_turns=2, silent=True
        )
    (event,) = log.of(ToolEvent)
    assert event.name == "code_execution" and event.ok and "42" in str(event.result)


class Scripted:
    """A human whose words are known, put in place of ``get_human_input``."""

    def __init__(self, *words: str) -> None:
        self.words = iter(words)

    def __call__(self, *_args: Any, **_options: Any) -> str:
        return next(self.words)

    async def later(self, *_args: Any, **_options: Any) -> str:
        return next(self.words)


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_humans_words_are_events_and_an_empty_line_is_none(mode: str) -> None:
    human = Scripted("Make it shorter.", "", "exit")
    with recording({"coder": ["Long.", "Short.", "Shorter."]}) as (server, recorder, log):
        boss: Any = user("boss", human_input_mode="ALWAYS")
        boss.get_human_input, boss.a_get_human_input = human, human.later
        coder = assistant("coder", server.url)
        recorder.wrap([boss, coder])
        if mode == "sync":
            boss.initiate_chat(coder, message="Write.", silent=True)
        else:
            await boss.a_initiate_chat(coder, message="Write.", silent=True)
    assert [(e.name, e.text) for e in log.of(HumanEvent)] == [
        ("boss", "Make it shorter."),
        ("boss", "exit"),
    ]
    # 0.2 asks twice in asynchronous chats, once by each of its two methods.
    assert [t.step for t in log.turns] in ([0, 1, 1], [0, 1])
    assert endings(log)[0][0] == "terminated"


def test_a_human_may_speak_in_the_place_of_a_model() -> None:
    human = Scripted("I say so myself.", "")
    with recording({"coder": "As the model has it.", "critic": "Hm."}) as (server, recorder, log):
        coder: Any = assistant("coder", server.url, human_input_mode="ALWAYS")
        coder.get_human_input = human
        critic = assistant("critic", server.url)
        recorder.wrap([coder, critic])
        critic.initiate_chat(coder, message="Write.", max_turns=2, silent=True)
    assert [e.text for e in log.of(HumanEvent)] == ["I say so myself."]
    assert told(log) == [("act", "critic"), ("act", "coder")]
    assert "I say so myself." in json.dumps(log.turns[0].messages)


def test_a_human_put_in_after_wrapping_is_heard_all_the_same() -> None:
    with recording({"coder": ["Long.", "Short."]}) as (server, recorder, log):
        boss: Any = user("boss", human_input_mode="ALWAYS")
        coder = assistant("coder", server.url)
        recorder.wrap([boss, coder])
        boss.get_human_input = Scripted("Shorter.", "exit")
        boss.initiate_chat(coder, message="Write.", silent=True)
    assert [e.text for e in log.of(HumanEvent)] == ["Shorter."]


def test_a_human_who_is_asked_at_the_end() -> None:
    human = Scripted("One more thing.", "exit")
    with recording({"coder": ["TERMINATE", "TERMINATE"]}) as (server, recorder, log):
        boss: Any = user("boss", human_input_mode="TERMINATE")
        boss.get_human_input = human
        coder = assistant("coder", server.url, llm_config=config("coder", server.url))
        recorder.wrap([boss, coder])
        boss.initiate_chat(coder, message="Write.", silent=True)
    assert [e.text for e in log.of(HumanEvent)] == ["One more thing.", "exit"]
    assert len(log.turns) == 2 and endings(log) == [("terminated", "TERMINATE")]
