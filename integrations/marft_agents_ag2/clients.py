"""Model clients of AG2: the SDK object under one, and calls that no middleware sees.

Invariant: to the app and to AG2 a stand-in is what it stands for: same class, same attributes, same
results. AG2 makes a client for each turn, so nothing is put onto one for longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from marft_agents.recording import Call, MarftRecorder, StandIn
from marft_agents_ag2.turns import TURN, Turn
from marft_agents_ag2.wire import unseen


def client_below(call_next: Any) -> Any:
    """The model client at the end of a chain of middleware."""
    while isinstance(call_next, functools.partial):
        inner: Any = call_next.args[0] if call_next.args and callable(call_next.args[0]) else None
        call_next = inner if inner is not None else call_next.func
    return call_next


def capture_client(client: Any, recorder: MarftRecorder) -> bool:
    """Record the HTTP calls of a model client; whether it makes any that can be recorded."""
    sdk = getattr(client, "_client", None)
    http: Any = getattr(sdk, "_client", None)
    if not hasattr(sdk, "chat") or not callable(getattr(http, "send", None)):
        return False
    recorder.capture(sdk)
    return "Responses" not in type(client).__name__


def say_uncaptured(call: Call, client: Any) -> None:
    """A client whose turns cannot be trained on, once a kind."""
    kind = type(client)
    if "Responses" in kind.__name__:
        why = "calls the Responses API, in which vLLM gives no token ids"
    else:
        why = "makes no chat completions through an openai SDK client"
    call.episode.core.safety.warn_once(
        ("uncaptured", kind),
        f"marft-agents: agent {call.agent!r} uses {kind.__module__}.{kind.__qualname__}, which"
        f" {why}; its turns are logged without tokens and cannot be trained on; use"
        " ag2.config.OpenAIConfig(model=..., base_url=...)",
    )


class RecordingConfig(StandIn):
    """A model configuration whose clients' calls belong to the turn that makes them."""

    def __init__(self, inner: Any, begin: Callable[[Turn], Call]) -> None:
        super().__init__(inner, _marft_begin=begin)

    def create(self, *args: Any, **kwargs: Any) -> Any:
        return _RecordingClient(self._marft_inner.create(*args, **kwargs), self._marft_begin)

    def copy(self, *args: Any, **kwargs: Any) -> Any:
        return RecordingConfig(self._marft_inner.copy(*args, **kwargs), self._marft_begin)


class _RecordingClient(StandIn):
    def __init__(self, inner: Any, begin: Callable[[Turn], Call]) -> None:
        super().__init__(inner, _marft_begin=begin)

    async def __call__(self, events: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
        inner, turn, begin = self._marft_inner, TURN.get(), self._marft_begin
        if turn is None or not turn.open:
            return await inner(events, context, *args, **kwargs)
        return await recorded(
            turn,
            functools.partial(begin, turn),
            inner,
            lambda: inner(events, context, *args, **kwargs),
            (events, context),
        )


async def recorded(
    turn: Turn,
    begin: Callable[[], Call],
    client: Any,
    go: Callable[[], Any],
    sent: tuple[Any, Any],
) -> Any:
    """Await ``go()``, a model call through ``client``, as a call of ``turn``."""
    recorder = turn.binding.recorder
    safety = recorder.core.safety
    captured = safety.attempt("capture a client", lambda: capture_client(client, recorder))
    call = safety.attempt("begin a model call", begin)
    if call is None:
        return await go()
    response, problem = None, None
    try:
        with call.current():
            response = await go()
        return response
    except BaseException as error:
        problem = error
        raise
    finally:
        with safety.guard("record a model call"):
            _finish(turn, call, response, problem, client, bool(captured), sent)


def _finish(
    turn: Turn,
    call: Call,
    response: Any,
    problem: BaseException | None,
    client: Any,
    captured: bool,
    sent: tuple[Any, Any],
) -> None:
    foreign = not call.sent
    cached = foreign and captured and problem is None
    call.finish(problem, unseen(*sent, response, cached=cached) if foreign else None)
    if call.agent == turn.agent and call.kind == "act":
        turn.turn_ids += call.turn_ids
        for tool in getattr(getattr(response, "tool_calls", None), "calls", None) or ():
            if call.turn_ids:
                turn.tool_turns[str(tool.name)] = call.turn_ids[-1]
    if not foreign or problem is not None:
        return
    if cached:
        turn.binding.recorder.core.safety.warn_once(
            ("cached", call.agent),
            f"marft-agents: agent {call.agent!r} was answered by a middleware (a cache, a halt) and"
            " not by its model; such turns are logged as cached and never trained on; record"
            " without that middleware to have every turn",
        )
    else:
        say_uncaptured(call, client)
