"""A model client that knows whose it is.

Invariant: to the app and to AutoGen it is the client it stands for: same class, same attributes,
same results. Clients are mostly shared, so the identity is put in front of the client, per agent,
and never into it.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Mapping
from contextlib import nullcontext
from typing import Any

from autogen_core.models import CreateResult

from marft_agents.recording import StandIn
from marft_agents_autogen.asking import Ask, begin
from marft_agents_autogen.compat import optional
from marft_agents_autogen.seats import Seat, close_stream

CACHE = optional("autogen_ext.models.cache", "ChatCompletionCache")
OPENAI = optional("autogen_ext.models.openai", "BaseOpenAIChatCompletionClient")
_NO_CODE = object()


class RecordingClient(StandIn):
    """Stands for ``inner`` in one seat; ``shared``: in a place that several seats may hold."""

    _marft_seat: Seat
    _marft_shared: bool

    def __init__(self, inner: Any, seat: Seat, *, shared: bool = False) -> None:
        super().__init__(inner, _marft_seat=seat, _marft_shared=shared)

    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Ask | None]:
        """The client to ask, and the record of asking it."""
        seat, inner = self._marft_seat, self._marft_inner
        if seat.closed:
            return inner, None
        safety, target = seat.recorder.core.safety, inner
        if _is_cache(inner.__class__):
            target = safety.attempt("pass by a cache", lambda: _without_cache(inner, seat)) or inner
        try:
            return target, begin(seat, target, args, kwargs, shared=self._marft_shared)
        except Exception as error:
            safety.failed("begin a model call", error)
        return target, None

    async def create(self, *args: Any, **kwargs: Any) -> Any:
        target, ask = self._begin(args, kwargs)
        if ask is None:
            return await target.create(*args, **kwargs)
        try:
            with ask.call.current():
                result = await target.create(*args, **kwargs)
        except BaseException as error:
            ask.finish(error=error)
            raise
        ask.finish(result)
        return result

    async def create_stream(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        target, ask = self._begin(args, kwargs)
        stream = target.create_stream(*args, **kwargs)
        current = ask.call.current() if ask is not None else nullcontext()
        asks_once = _asks_once(getattr(stream, "ag_code", None))
        item, problem = None, None
        try:
            while True:
                try:
                    with current:  # never across a yield
                        item = await anext(stream)
                except StopAsyncIteration:
                    return
                if type(item) is not str and ask is not None and isinstance(item, CreateResult):
                    ask.finish(item)
                yield item
                if asks_once:
                    break
            async for item in stream:
                if type(item) is not str and ask is not None and isinstance(item, CreateResult):
                    ask.finish(item)
                yield item
        except GeneratorExit:
            raise
        except BaseException as error:
            problem = error
            raise
        finally:
            await close_stream(stream)
            if ask is not None and not ask.call.finished:
                ask.finish(item, problem)


def _asks_once(code: Any) -> bool:
    """Whether the one request of a stream is sent before its first piece, as AutoGen's own do."""
    return any(code is getattr(kind.create_stream, "__code__", _NO_CODE) for kind in OPENAI)


@functools.lru_cache(maxsize=256)
def _is_cache(kind: type[Any]) -> bool:
    """Asked per class: model clients are abstract classes, which are slow to ask."""
    return issubclass(kind, CACHE)


def _without_cache(client: Any, seat: Seat) -> Any:
    """The client behind AutoGen's reply caches, which stay as they are for the rest of the app."""
    core = seat.recorder.core
    if core.keep_caches:
        return client
    core.safety.warn_once(
        "caches passed by",
        f"marft-agents: agent {seat.name!r} has a {type(client).__name__}; while recording it is"
        " passed by, since a cached reply is no sample of the policy and after a swap would still"
        " be what the old adapter said; MarftRecorder(keep_caches=True) leaves it on",
    )
    while isinstance(client, CACHE):
        inner: Any = client.client
        client = not_recorded(inner) or inner
    return client


def not_recorded(client: Any) -> Any | None:
    """``client`` without the stand-ins of closed recorders; ``None`` when it is recorded."""
    while type(client) is RecordingClient:
        stand_in: Any = client
        if not stand_in._marft_seat.closed:
            return None
        client = stand_in._marft_inner
    return client


def recorder_of(client: Any) -> Any:
    """The recorder of a stand-in; ``None`` for any other object."""
    stand_in: Any = client
    return stand_in._marft_seat.recorder if type(client) is RecordingClient else None


def stood_for(client: Any) -> Any:
    """The app's own client behind a stand-in."""
    while type(client) is RecordingClient:
        stand_in: Any = client
        client = stand_in._marft_inner
    return client
