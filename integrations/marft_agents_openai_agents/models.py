"""Models and providers: each model call made in a recorded run becomes a ``Call``.

Invariant: a model is the app's own object and may be shared by any number of agents, recorded or
not; the current run says whose call it is, and outside a run nothing is done. The contextvars are
set only while the SDK waits for the next event of a stream, never across a ``yield``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from agents import Model, ModelProvider, OpenAIChatCompletionsModel, OpenAIResponsesModel

from marft_agents.recording import Call
from marft_agents_openai_agents.doors import DOORS
from marft_agents_openai_agents.runs import RUN, Run
from marft_agents_openai_agents.wire import function_calls, unseen

_CALLING: ContextVar[Run | None] = ContextVar("marft_oai_calling", default=None)
"""The run inside whose model call the context is: a model may ask another one."""


def adopt_provider(provider: Any) -> None:
    """Adopt every model that ``provider`` gives out from now on."""
    if isinstance(provider, ModelProvider):
        DOORS.replace(provider, "get_model", _adopting)


def _adopting(original: Any) -> Any:
    @functools.wraps(original)
    def get_model(*args: Any, **kwargs: Any) -> Any:
        model = original(*args, **kwargs)
        run = RUN.get()
        if run is not None:
            with run.safety.guard("see a model"):
                adopt_model(model)
        return model

    return get_model


def adopt_model(model: Any) -> None:
    """See the calls of ``model`` from now on."""
    if isinstance(model, Model):
        reference = weakref.ref(model)
        DOORS.replace(model, "get_response", lambda original: _response(reference, original))
        DOORS.replace(model, "stream_response", lambda original: _stream(reference, original))


def _response(reference: weakref.ref[Model], original: Any) -> Any:
    @functools.wraps(original)
    async def get_response(*args: Any, **kwargs: Any) -> Any:
        seen = _Seen.begin(reference(), args, kwargs)
        if seen is None:
            return await original(*args, **kwargs)
        try:
            with seen.current():
                response = await original(*args, **kwargs)
        except BaseException as error:
            seen.finish(error=error)
            raise
        seen.finish(response)
        return response

    return get_response


def _stream(reference: weakref.ref[Model], original: Any) -> Any:
    @functools.wraps(original)
    async def stream_response(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        seen = _Seen.begin(reference(), args, kwargs)
        stream, problem = original(*args, **kwargs), None
        try:
            while True:
                try:
                    if seen is None:
                        event = await anext(stream)
                    else:
                        with seen.current():
                            event = await anext(stream)
                except StopAsyncIteration:
                    break
                if seen is not None and getattr(event, "type", None) == "response.completed":
                    seen.finish(event.response)
                yield event
        except GeneratorExit:
            raise
        except BaseException as error:
            problem = error
            raise
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
            if seen is not None:
                seen.finish(error=problem)

    return stream_response


class _Seen:
    """A model call of a recorded run."""

    def __init__(self, run: Run, call: Call, model: Any, sent: tuple[Any, Any]) -> None:
        self._run, self._call, self._model = run, call, model
        self._captured = _asks_by_chat(model)
        self._system, self._items = sent

    @staticmethod
    def begin(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Seen | None:
        run = RUN.get()
        if run is None or not run.open or _CALLING.get() is run:
            return None

        def begin() -> _Seen:
            for client in sdk_clients(model):
                run.binding.recorder.capture(client)
            names = ("system_instructions", "input")
            given = dict(zip(names, args, strict=False)) | kwargs
            system, items = (given.get(name) for name in names)
            return _Seen(run, run.begin_call(), model, (system, items))

        return run.safety.attempt("begin a model call", begin)

    @contextmanager
    def current(self) -> Generator[None]:
        token = _CALLING.set(self._run)
        try:
            with self._call.current():
                yield
        finally:
            _CALLING.reset(token)

    def finish(self, response: Any = None, error: BaseException | None = None) -> None:
        call, run = self._call, self._run
        if call.finished:
            return
        with run.safety.guard("record a model call"):
            output = getattr(response, "output", None) or ()
            cached = self._captured and error is None
            made, last = None, call.exchanges[-1] if call.exchanges else None
            if not call.sent:
                made = unseen(self._system, self._items, output, cached=cached)
            call.finish(error, made)
            run.turns += call.turn_ids
            run.calls = function_calls(output)
            if made is not None and response is not None:
                self._say_cached() if made.cached else self._say_uncaptured()
            elif run.calls and last is not None:
                self._say_strict(last.request_body.get("tools") or ())

    def _say_cached(self) -> None:
        self._run.safety.warn_once(
            ("cached", self._run.agent),
            f"marft-agents: agent {self._run.agent!r} was answered without a request to its server;"
            " such turns are logged as cached and never trained on; record without the cache to"
            " have every turn",
        )

    def _say_uncaptured(self) -> None:
        kind = type(self._model)
        if isinstance(self._model, OpenAIResponsesModel):
            why = "calls the Responses API, in which vLLM gives no token ids"
            cure = (
                "use agents.OpenAIChatCompletionsModel, OpenAIProvider(use_responses=False) or"
                ' agents.set_default_openai_api("chat_completions")'
            )
        else:
            why = "makes no calls through an openai SDK client"
            cure = "use agents.OpenAIChatCompletionsModel with the server's base_url"
        self._run.safety.warn_once(
            ("uncaptured", kind),
            f"marft-agents: agent {self._run.agent!r} uses {kind.__module__}.{kind.__qualname__},"
            f" which {why}; its turns are logged without tokens and cannot be trained on; {cure}",
        )

    def _say_strict(self, tools: Sequence[Any]) -> None:
        """Newer versions make tools and handoffs strict unless they are told otherwise."""
        if any(tool.get("function", {}).get("strict") is True for tool in tools):
            self._run.safety.warn_once(
                ("strict", self._run.agent),
                f"marft-agents: agent {self._run.agent!r} has strict tools; a server may hold their"
                " calls to a grammar while it samples, so the turns that call one are logged and"
                " not trained on; use function_tool(strict_mode=False), and set"
                " strict_json_schema = False on a handoff(...) or an agent.as_tool(...)",
            )


def _asks_by_chat(model: Any, depth: int = 0) -> bool:
    """Whether a model of chat completions is behind it: then no request means a kept reply."""
    inner = [v for v in list(getattr(model, "__dict__", {}).values()) if isinstance(v, Model)]
    return isinstance(model, OpenAIChatCompletionsModel) or (
        depth < 3 and any(_asks_by_chat(value, depth + 1) for value in inner)
    )


def sdk_clients(model: Any, depth: int = 0) -> Iterator[Any]:
    """The openai SDK objects under a model, through models that stand for others."""
    if isinstance(model, OpenAIChatCompletionsModel):
        lazy: Any = model
        client = getattr(lazy, "_client", None)
        yield client if client is not None else lazy._get_client()
        return
    for value in list(getattr(model, "__dict__", {}).values()):
        if isinstance(value, Model) and depth < 3:
            yield from sdk_clients(value, depth + 1)
        elif hasattr(value, "chat") and callable(getattr(_http(value), "send", None)):
            yield value


def _http(client: Any) -> Any:
    return getattr(client, "_client", None)
