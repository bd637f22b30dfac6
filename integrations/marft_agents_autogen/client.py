"""A model client that knows whose it is.

Invariant: to the app and to AutoGen it is the client it stands for: same class, same attributes,
same results. Clients are mostly shared, so the identity is put in front of the client, per agent,
and never into it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any, cast

from autogen_core.models import CreateResult

from marft_agents.recording import Call, TurnKind, Unseen
from marft_agents_autogen.seats import Seat, close_stream


class RecordingClient:
    """Stands for ``inner`` in one seat."""

    _marft_inner: Any
    _marft_seat: Seat
    _marft_kind: TurnKind

    def __init__(self, inner: Any, seat: Seat, kind: TurnKind) -> None:
        self.__dict__.update(_marft_inner=inner, _marft_seat=seat, _marft_kind=kind)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] read-only
        return type(self._marft_inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_marft_"):
            raise AttributeError(name)
        return getattr(self._marft_inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._marft_inner, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the client itself."""
        return self._marft_inner.__reduce_ex__(protocol)

    def _begin(self) -> Call | None:
        seat = self._marft_seat
        if seat.recorder.core.closed:
            return None
        return seat.recorder.core.safety.attempt(
            "begin a model call", lambda: seat.begin_call(self._marft_kind)
        )

    def _finish(
        self, call: Call, messages: Any, result: Any = None, error: BaseException | None = None
    ) -> None:
        seat = self._marft_seat
        with seat.recorder.core.safety.guard("record a model call"):
            unseen = None if call.exchanges else _unseen(messages, result)
            call.finish(error, unseen)
            seat.end_call(call)
            if unseen is not None and error is None:
                self._say_cached(call) if unseen.cached else self._say_uncaptured(call)

    def _say_cached(self, call: Call) -> None:
        call.episode.core.safety.warn_once(
            ("cached", call.agent),
            f"marft-agents: agent {call.agent!r} was answered from a cache; cached replies are"
            " logged and never trained on, and after a swap the cache still answers with what the"
            " old adapter said; record without a cache, or give each adapter version its own",
        )

    def _say_uncaptured(self, call: Call) -> None:
        kind = type(self._marft_inner)
        call.episode.core.safety.warn_once(
            ("uncaptured", kind),
            f"marft-agents: agent {call.agent!r} uses {kind.__module__}.{kind.__qualname__}, whose"
            " calls do not go through an openai SDK client; its turns are logged without tokens and"
            " cannot be trained on; use autogen_ext.models.openai.OpenAIChatCompletionClient",
        )

    async def create(self, *args: Any, **kwargs: Any) -> Any:
        call = self._begin()
        if call is None:
            return await self._marft_inner.create(*args, **kwargs)
        messages = _messages(args, kwargs)
        try:
            with call.current():
                result = await self._marft_inner.create(*args, **kwargs)
        except BaseException as error:
            self._finish(call, messages, error=error)
            raise
        self._finish(call, messages, result)
        return result

    async def create_stream(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        call, messages = self._begin(), _messages(args, kwargs)
        stream = self._marft_inner.create_stream(*args, **kwargs)
        item, problem = None, None
        try:
            while True:
                try:
                    if call is None:
                        item = await anext(stream)
                    else:
                        with call.current():  # never across a yield
                            item = await anext(stream)
                except StopAsyncIteration:
                    break
                if call is not None and isinstance(item, CreateResult):
                    self._finish(call, messages, item)
                yield item
        except GeneratorExit:
            raise
        except BaseException as error:
            problem = error
            raise
        finally:
            await close_stream(stream)
            if call is not None and not call.finished:
                self._finish(call, messages, item, problem)


def _messages(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return kwargs["messages"] if "messages" in kwargs else args[0] if args else ()


def _unseen(messages: Any, result: Any) -> Unseen:
    """A call without HTTP request, as far as AutoGen's objects tell."""
    text: str | None = None
    calls: list[dict[str, Any]] | None = None
    content = getattr(result, "content", None)
    if isinstance(content, str):
        text = content
    elif isinstance(content, list):
        calls = [_wire_call(c) for c in cast("list[Any]", content)]
    wire = [m for message in messages for m in _wire_messages(message)]
    return Unseen(wire, text, calls, cached=bool(getattr(result, "cached", False)))


def _wire_call(call: Any) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _wire_messages(message: Any) -> Iterator[dict[str, Any]]:
    """An AutoGen message in the form it has on the wire, nearly."""
    kind, content = type(message).__name__, message.content
    if kind == "SystemMessage":
        yield {"role": "system", "content": content}
    elif kind == "AssistantMessage" and isinstance(content, list):
        calls = [_wire_call(c) for c in cast("list[Any]", content)]
        yield {"role": "assistant", "content": None, "tool_calls": calls}
    elif kind == "AssistantMessage":
        yield {"role": "assistant", "name": message.source, "content": content}
    elif kind == "FunctionExecutionResultMessage":
        for result in content:
            yield {"role": "tool", "tool_call_id": result.call_id, "content": result.content}
    elif isinstance(content, list):
        parts = cast("list[Any]", content)
        texts = [{"type": "text", "text": p if isinstance(p, str) else str(p)} for p in parts]
        yield {"role": "user", "name": message.source, "content": texts}
    else:
        yield {"role": "user", "name": message.source, "content": content}


def not_recorded(client: Any) -> Any | None:
    """``client`` without the stand-ins of closed recorders; ``None`` when it is recorded."""
    while type(client) is RecordingClient:
        stand_in: Any = client
        if not stand_in._marft_seat.recorder.core.closed:
            return None
        client = stand_in._marft_inner
    return client


def sdk_clients(client: Any, depth: int = 0) -> Iterator[Any]:
    """The openai SDK objects under a model client, through caches and other wrappers."""
    for name in ("_client", "client"):
        inner = getattr(client, name, None)
        if inner is None or depth > 4:
            continue
        if hasattr(inner, "chat") and hasattr(inner, "_client"):
            yield inner
        elif hasattr(inner, "create"):
            yield from sdk_clients(inner, depth + 1)
