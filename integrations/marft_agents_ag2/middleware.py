"""AG2 middleware: turns, model calls, tools and human input of one agent.

Invariant: it stands before all other middleware of the agent, so a model call is what the agent
asks for and a tool's result is what the agent is told. What it is given it hands on unchanged.
"""

from __future__ import annotations

from typing import Any

from ag2.middleware import BaseMiddleware

from marft_agents.recording import LiveEpisode
from marft_agents_ag2.binding import Binding
from marft_agents_ag2.clients import client_below, recorded
from marft_agents_ag2.turns import TOOL, Tool, Turn, begin_turn
from marft_agents_ag2.wire import result_text

_ROUTING = "ag2.network.handoff"


class RecordingMiddleware:
    """The factory that an agent holds; makes one ``_Recording`` a turn."""

    def __init__(self, binding: Binding, agent: str, delegations: frozenset[str]) -> None:
        self.binding = binding
        self.agent = agent
        self.delegations = delegations
        """Names of tools that are no environment: agents behind them."""

    def __call__(self, event: Any, context: Any) -> BaseMiddleware:
        return _Recording(event, context, self)

    def __reduce__(self) -> Any:
        """A copy of a recorded agent is not recorded."""
        return _nothing, ()


def _nothing() -> type[BaseMiddleware]:
    """A factory whose middleware hands everything on."""
    return BaseMiddleware


class _Recording(BaseMiddleware):
    def __init__(self, event: Any, context: Any, owner: RecordingMiddleware) -> None:
        super().__init__(event, context)
        self._binding = owner.binding
        self._agent = owner.agent
        self._delegations = owner.delegations
        self._turn: Turn | None = None

    @property
    def _safety(self) -> Any:
        return self._binding.recorder.core.safety

    def _going(self) -> Turn | None:
        return self._turn if self._turn is not None and self._turn.open else None

    async def on_turn(self, call_next: Any, event: Any, context: Any) -> Any:
        given: Any = context.dependencies or {}
        if self._binding.open:
            self._turn = self._safety.attempt(
                "begin a turn", lambda: begin_turn(self._binding, self._agent, event, given)
            )
        turn = self._turn
        if turn is None:
            return await call_next(event, context)
        response, problem = None, None
        try:
            with turn.entered():
                response = await call_next(event, context)
            return response
        except BaseException as error:
            problem = error
            raise
        finally:
            turn.close(given, response, problem)

    async def on_llm_call(self, call_next: Any, events: Any, context: Any) -> Any:
        turn = self._going()
        if turn is None:
            return await call_next(events, context)
        return await recorded(
            turn,
            turn.call,
            client_below(call_next),
            lambda: call_next(events, context),
            (events, context),
        )

    async def on_tool_execution(self, call_next: Any, event: Any, context: Any) -> Any:
        turn = self._going()
        if turn is None:
            return await call_next(event, context)
        tool, result, problem = Tool(turn, event.name in self._delegations), None, None
        token = TOOL.set(tool)
        try:
            result = await call_next(event, context)
            return result
        except BaseException as error:
            problem = error
            raise
        finally:
            TOOL.reset(token)
            with self._safety.guard("record a tool"):
                _note_tool(turn, tool, event, result, problem)

    async def on_human_input(self, call_next: Any, event: Any, context: Any) -> Any:
        message = await call_next(event, context)
        turn = self._going()
        if turn is not None:
            with self._safety.guard("record human input"):
                _note_human(turn.episode, message)
        return message


def _note_tool(
    turn: Turn, tool: Tool, event: Any, result: Any, problem: BaseException | None
) -> None:
    failed = problem is not None or getattr(result, "error", None) is not None
    client_side = type(result).__name__ == "ClientToolCallEvent"
    turn.episode.tool(
        str(event.name),
        agent=turn.agent,
        call_id=event.id,
        arguments=event.arguments,
        result=repr(problem) if problem else None if client_side else result_text(result),
        ok=not failed,
        environment=not (tool.ran_agent or _is_routing(result)),
    )


def _is_routing(result: Any) -> bool:
    """Whether the tool only said who goes on."""
    parts = getattr(getattr(result, "result", None), "parts", None) or ()
    return any(type(getattr(p, "data", None)).__module__ == _ROUTING for p in parts)


def _note_human(episode: LiveEpisode, message: Any) -> None:
    text = getattr(message, "content", None)
    episode.human(None, text if isinstance(text, str) else None)
