"""Inside a run: who speaks for whom, tools, handoffs, guardrails, models from anywhere."""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import Any

import pytest
from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrailTripwireTriggered,
    Model,
    ModelResponse,
    ModelSettings,
    OpenAIProvider,
    OpenAIResponsesModel,
    OutputGuardrailTripwireTriggered,
    RunConfig,
    Runner,
    Usage,
    function_tool,
    handoff,
    input_guardrail,
    output_guardrail,
    set_default_openai_api,
    set_default_openai_client,
)
from openai.types.responses import ResponseOutputMessage, ResponseOutputText
from pydantic import BaseModel

from marft_agents import MarftRecorder
from marft_agents.schema import EpisodeEnded, ToolEvent
from marft_agents.testing import InMemoryLog, Reply, ScriptedServer
from tests.runtimes.kit import calls_once, noting
from tests.runtimes.openai_agents.kit import add, agent, client, model, play

pytestmark = pytest.mark.usefixtures("closing")


async def test_a_tool_is_an_event_and_its_answer_a_step(
    recorder: MarftRecorder, log: InMemoryLog, stream: bool
) -> None:
    with ScriptedServer(calls_once({"planner": ("add", {"a": 1, "b": 2})})) as server:
        await play(recorder.wrap(agent("planner", server.url, tools=[add])), "go", stream=stream)
    recorder.flush()
    (tool,) = log.of(ToolEvent)
    assert (tool.name, tool.agent, tool.result, tool.ok) == ("add", "planner", "3", True)
    assert tool.call_id == "call-1-0" and tool.arguments == '{"a": 1, "b": 2}'
    assert [t.step for t in log.turns] == [0, 1]


async def test_a_failing_tool_is_not_ok(recorder: MarftRecorder, log: InMemoryLog) -> None:
    @function_tool
    def fragile() -> str:
        """Break."""
        raise ValueError("broken")

    @function_tool(failure_error_function=None)
    def fatal() -> str:
        """Break the run."""
        raise ValueError("broken for good")

    for tool, wanted in ((fragile, None), (fatal, Exception)):
        with ScriptedServer(calls_once({"planner": (tool.name, {})})) as server:
            made = recorder.wrap(agent("planner", server.url, tools=[tool]))
            if wanted is None:
                await play(made, "go")
            else:
                with pytest.raises(wanted):
                    await play(made, "go")
    recorder.flush()
    soft, hard = log.of(ToolEvent)
    assert not soft.ok and not hard.ok and "broken for good" in hard.result
    assert [e.reason for e in log.of(EpisodeEnded)] == ["terminated", "failed"]


async def test_a_handoff_is_what_chose_the_next_speaker(
    recorder: MarftRecorder, log: InMemoryLog, stream: bool
) -> None:
    with ScriptedServer(calls_once({"planner": ("transfer_to_coder", {})})) as server:
        coder = agent("coder", server.url, tools=[add])
        planner = recorder.wrap(agent("planner", server.url, handoffs=[handoff(coder)]))
        await play(planner, "go", stream=stream)
        await play(coder, "and you alone?", stream=stream)
    recorder.flush()
    chosen, spoken, alone = log.turns
    assert spoken.agent == "coder" and spoken.selected_by == chosen.turn_id
    assert alone.agent == "coder" and alone.selected_by is None
    assert [t.step for t in log.turns[:2]] == [0, 0]
    (event,) = log.of(ToolEvent)
    assert (event.name, event.agent, event.result) == ("transfer_to_coder", "planner", "coder")


async def test_an_agent_behind_a_tool_serves_the_turn_that_called_it(
    recorder: MarftRecorder, log: InMemoryLog, stream: bool
) -> None:
    with ScriptedServer(calls_once({"planner": ("code", {"input": "part"})})) as server:
        tool = agent("coder", server.url).as_tool("code", "writes code")
        planner = recorder.wrap(agent("planner", server.url, tools=[tool]))
        await play(planner, "go", stream=stream)
    recorder.flush()
    asked, inner, outer = log.turns
    assert (inner.agent, inner.kind) == ("coder", "act")
    assert (inner.parent_agent, inner.parent_turn) == ("planner", asked.turn_id)
    assert outer.parent_agent is None and inner.turn_id in outer.depends_on
    assert {t.step for t in log.turns} == {0}  # an agent is no environment
    assert len({e.episode_id for e in log.events}) == 1


async def test_an_app_that_runs_an_agent_inside_its_own_tool(
    recorder: MarftRecorder, log: InMemoryLog
) -> None:
    with ScriptedServer(calls_once({"planner": ("consult", {})})) as server:
        helper = agent("helper", server.url)

        @function_tool
        async def consult() -> str:
            """Ask somebody whom nobody wrapped."""
            return str((await Runner.run(helper, "help")).final_output)

        await play(recorder.wrap(agent("planner", server.url, tools=[consult])), "go")
    recorder.flush()
    assert [(t.agent, t.parent_agent) for t in log.turns] == [
        ("planner", None),
        ("helper", "planner"),
        ("planner", None),
    ]
    assert {t.step for t in log.turns} == {0}


async def test_agents_in_guardrails_are_guards(
    recorder: MarftRecorder, log: InMemoryLog, stream: bool
) -> None:
    with ScriptedServer() as server:
        guard = agent("guard", server.url)

        @input_guardrail
        async def polite(context: Any, agent: Any, given: Any) -> GuardrailFunctionOutput:
            await Runner.run(guard, "is this polite?")
            return GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)

        @output_guardrail
        async def sane(context: Any, agent: Any, output: Any) -> GuardrailFunctionOutput:
            await Runner.run(guard, f"is this sane: {output}")
            return GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)

        planner = agent("planner", server.url, input_guardrails=[polite], output_guardrails=[sane])
        await play(recorder.wrap(planner), "go", stream=stream)
    recorder.flush()
    (act,) = [t for t in log.turns if t.kind == "act"]
    guards = [t for t in log.turns if t.kind == "guard"]
    last, first = sorted(guards, key=lambda t: "polite" in str(t.messages))  # they run at once
    assert act.agent == "planner" and first.agent == last.agent == "guard"
    assert (first.parent_agent, first.parent_turn) == ("planner", None)
    assert (last.parent_agent, last.parent_turn) == ("planner", act.turn_id)


@pytest.mark.parametrize("place", ["input", "output"])
async def test_a_tripped_guardrail_ends_the_episode_and_reaches_the_app(
    recorder: MarftRecorder, log: InMemoryLog, stream: bool, place: str
) -> None:
    ends: list[Any] = []

    async def trip(context: Any, agent: Any, given: Any) -> GuardrailFunctionOutput:
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=True)

    guardrail: Any = (input_guardrail if place == "input" else output_guardrail)(trip)
    wanted = (
        InputGuardrailTripwireTriggered if place == "input" else OutputGuardrailTripwireTriggered
    )
    with ScriptedServer() as server:
        planner = agent("planner", server.url, **{f"{place}_guardrails": [guardrail]})
        recorder.wrap(planner, on_end=noting(ends))
        with pytest.raises(wanted):
            await play(planner, "go", stream=stream)
    recorder.flush()
    (ended,) = log.of(EpisodeEnded)
    assert ended.reason == "terminated" and wanted.__name__ in (ended.detail or "")
    assert [type(e) for e in ends] == [wanted]


@pytest.mark.parametrize("how", ["run's model", "run's name", "provider", "name and provider"])
async def test_models_of_the_run_configuration(
    recorder: MarftRecorder, log: InMemoryLog, stream: bool, how: str
) -> None:
    with ScriptedServer() as server:
        provider = OpenAIProvider(openai_client=client(server.url), use_responses=False)
        config = {
            "run's model": RunConfig(model=model("served", server.url)),
            "run's name": RunConfig(model="served", model_provider=provider),
            "provider": RunConfig(model_provider=provider),
            "name and provider": RunConfig(model_provider=provider),
        }[how]
        named = "served" if how == "name and provider" else None
        planner = recorder.wrap(agent("planner", server.url, model=named))
        await play(planner, "go", stream=stream, run_config=config)
        await play(planner, "go", stream=stream, run_config=config)
    recorder.flush()
    assert len(log.turns) == 2 and all(t.token_ids and t.agent == "planner" for t in log.turns)
    assert how == "provider" or {t.model for t in log.turns} == {"served"}


async def test_a_name_alone_and_the_default_client(
    recorder: MarftRecorder, log: InMemoryLog, stream: bool
) -> None:
    with ScriptedServer() as server:
        set_default_openai_client(client(server.url), use_for_tracing=False)
        set_default_openai_api("chat_completions")
        try:
            planner = recorder.wrap(agent("planner", server.url, model="planner"))
            await play(planner, "go", stream=stream)
        finally:
            set_default_openai_api("responses")
            set_default_openai_client(None, use_for_tracing=False)  # pyright: ignore[reportArgumentType] as at first
    recorder.flush()
    (turn,) = log.turns
    assert turn.token_ids and turn.model == "planner"


class Canned(OpenAIResponsesModel):
    """The Responses API, without a server for it."""

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        text = ResponseOutputText(text="canned", type="output_text", annotations=[])
        message = ResponseOutputMessage(
            id="m", content=[text], role="assistant", status="completed", type="message"
        )
        return ModelResponse(output=[message], usage=Usage(), response_id=None)


async def test_the_responses_api_is_logged_without_tokens_and_said_once(
    recorder: MarftRecorder, log: InMemoryLog, caplog: pytest.LogCaptureFixture
) -> None:
    planner = Agent(name="planner", instructions="Plan.", model=Canned("m", client("http://x")))
    recorder.wrap(planner)
    with caplog.at_level(logging.WARNING, "marft_agents.recording"):
        for _ in range(2):
            assert (await Runner.run(planner, "go")).final_output == "canned"
    recorder.flush()
    assert [(t.text, t.token_ids) for t in log.turns] == [("canned", None)] * 2
    assert [m["role"] for m in log.turns[0].messages] == ["system", "user"]
    (said,) = [r.getMessage() for r in caplog.records]
    assert "Responses API" in said and "use_responses=False" in said


async def test_a_shared_model_belongs_to_whoever_speaks(
    recorder: MarftRecorder, log: InMemoryLog
) -> None:
    with ScriptedServer(calls_once({"base": ("transfer_to_coder", {})})) as server:
        shared = model("base", server.url)
        coder = agent("coder", server.url, model=shared)
        planner = recorder.wrap(agent("planner", server.url, model=shared, handoffs=[coder]))
        await play(planner, "go")
        stranger = agent("stranger", server.url, model=shared)
        await play(stranger, "not recorded")
        assert "x-marft-agent" not in server.requests[-1].headers
    recorder.flush()
    assert [t.agent for t in log.turns] == ["planner", "coder"]


async def test_structured_output_stays_what_it_is(
    recorder: MarftRecorder, log: InMemoryLog, stream: bool
) -> None:
    class Plan(BaseModel):
        steps: int

    with ScriptedServer([Reply('{"steps": 3}'), Reply("no plan")]) as server:
        planner = recorder.wrap(agent("planner", server.url, output_type=Plan))
        assert (await play(planner, "go", stream=stream))[-1] == Plan(steps=3)
        with pytest.raises(Exception, match="Invalid JSON"):
            await play(planner, "go", stream=stream)
    recorder.flush()
    assert [t.text for t in log.turns] == ['{"steps": 3}', "no plan"]
    assert all(t.token_ids and t.sampling.grammar for t in log.turns)
    assert [e.reason for e in log.of(EpisodeEnded)] == ["terminated", "failed"]


async def test_an_app_finds_the_log_probabilities_that_it_asked_for(
    recorder: MarftRecorder,
) -> None:
    with ScriptedServer() as server:
        for settings in (ModelSettings(), ModelSettings(top_logprobs=2)):
            planner = agent("planner", server.url, model_settings=settings)
            plain = _logprobs(await Runner.run(planner, "go"))
            recorded = _logprobs(await Runner.run(recorder.wrap(planner), "go"))
            assert recorded == plain


def _logprobs(result: Any) -> list[Any]:
    return list(getattr(result.new_items[-1].raw_item.content[0], "logprobs", None) or ())


async def test_strict_tools_are_said_once_and_loose_ones_trained_on(
    recorder: MarftRecorder, log: InMemoryLog, caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedServer(calls_once({"planner": ("add", {"a": 1, "b": 2})})) as server:
        strict = agent("planner", server.url, tools=[add])
        loose = agent("planner", server.url, tools=[copy.copy(add)])
        loose.tools[0].strict_json_schema = False  # pyright: ignore[reportAttributeAccessIssue]
        for one in (strict, strict, loose):
            await play(recorder.wrap(one), "go")
        offers = [r.body["tools"][0]["function"] for r in server.requests[::2]]
    recorder.flush()
    calls = log.turns[::2]
    assert [t.trainable for t in calls] == [offer.get("strict") is not True for offer in offers]
    said = [r.getMessage() for r in caplog.records if "strict tools" in r.getMessage()]
    assert len(said) == (1 if offers[0].get("strict") else 0) and calls[-1].trainable


async def test_agents_behind_tools_that_are_called_at_once(
    recorder: MarftRecorder, log: InMemoryLog
) -> None:
    both = [("code", {"input": "it"}), ("judge", {"input": "it"})]

    def script(body: Any) -> Reply | str:
        first = body["model"] == "planner" and not any(
            m["role"] == "tool" for m in body["messages"]
        )
        return Reply(tool_calls=both) if first else f"{body['model']} has spoken"

    with ScriptedServer(script) as server:
        tools: list[Any] = [
            agent(name, server.url).as_tool(tool, tool)
            for name, tool in (("coder", "code"), ("critic", "judge"))
        ]
        await play(recorder.wrap(agent("planner", server.url, tools=tools)), "go")
    recorder.flush()
    asked = log.turns[0]
    inner = [t for t in log.turns if t.agent != "planner"]
    assert sorted(t.agent for t in inner) == ["coder", "critic"]
    assert {(t.parent_agent, t.parent_turn) for t in inner} == {("planner", asked.turn_id)}
    assert {t.step for t in log.turns} == {0}


async def test_a_guard_that_asks_an_agent_while_the_guarded_one_works(
    recorder: MarftRecorder, log: InMemoryLog
) -> None:
    working = asyncio.Event()

    @function_tool
    async def work() -> str:
        """Work while the guard looks."""
        working.set()
        return "worked"

    script = calls_once({"planner": ("work", {}), "guard": ("look_up", {"input": "rules"})})
    with ScriptedServer(script) as server:
        rules: Any = agent("rules", server.url).as_tool("look_up", "knows the rules")
        guard = agent("guard", server.url, tools=[rules])

        @input_guardrail
        async def polite(context: Any, agent: Any, given: Any) -> GuardrailFunctionOutput:
            await working.wait()
            await Runner.run(guard, "is this polite?")
            return GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)

        planner = agent("planner", server.url, tools=[work], input_guardrails=[polite])
        await play(recorder.wrap(planner), "go")
    recorder.flush()
    asked, *_ = guards = [t for t in log.turns if t.kind == "guard"]
    assert [t.agent for t in guards] == ["guard", "rules", "guard"]
    assert (asked.parent_agent, asked.parent_turn) == ("planner", None)
    assert (guards[1].parent_agent, guards[1].parent_turn) == ("guard", asked.turn_id)


async def test_a_model_that_asks_another_one_is_one_turn(
    recorder: MarftRecorder, log: InMemoryLog, stream: bool
) -> None:
    class Outer(Model):
        def __init__(self, inner: Model) -> None:
            self.inner = inner

        async def get_response(self, *args: Any, **kwargs: Any) -> Any:
            return await self.inner.get_response(*args, **kwargs)

        def stream_response(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner.stream_response(*args, **kwargs)

    with ScriptedServer() as server:
        shared = model("base", server.url)
        recorder.wrap(agent("coder", server.url, model=shared))
        planner = recorder.wrap(agent("planner", server.url, model=Outer(shared)))
        await play(planner, "go", stream=stream)
    recorder.flush()
    (turn,) = log.turns
    assert turn.agent == "planner" and turn.token_ids
