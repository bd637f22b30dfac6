"""A chat client that knows whose it is.

Invariant: it is the app's client in all but identity: an instance of a subclass made for one seat
that shares the attributes of the client it stands for, so what either sets, both have. Clients are
mostly shared, so the identity is never put into the client itself. Only the outermost method
(a reply, with its tools) and the innermost one (one request to the model) are extended: middleware,
function invocation and compaction stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from marft_agents.recording import Call, IntegrationError
from marft_agents_agent_framework.following import follow
from marft_agents_agent_framework.observe import approvals, history, tools
from marft_agents_agent_framework.seats import SPEECH, Seat, Speech
from marft_agents_agent_framework.words import unseen


def is_client(obj: Any) -> bool:
    return callable(getattr(type(obj), "get_response", None))


def seat_of(client: Any) -> Seat | None:
    """The seat of a client that is recorded."""
    seat = getattr(type(client), "_marft_seat", None)
    return seat if isinstance(seat, Seat) and not seat.recorder.core.closed else None


def own_client(client: Any) -> Any:
    """The app's client behind the stand-ins of closed recorders."""
    while getattr(type(client), "_marft_seat", None) is not None and seat_of(client) is None:
        client = type(client)._marft_client
    return client


def seated(client: Any, seat: Seat) -> Any:
    """``client`` in one seat.

    Raises:
        IntegrationError: a client whose class cannot be extended.
    """
    kind: Any = type(client)
    body = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__class__": property(lambda self: kind),
        "__reduce_ex__": lambda self, protocol: client.__reduce_ex__(protocol),  # pyright: ignore[reportUnknownLambdaType] copies and pickles are of the app's own client
        "__deepcopy__": lambda self, memo: copy.deepcopy(client, memo),  # pyright: ignore[reportUnknownLambdaType]
        "__copy__": lambda self: copy.copy(client),  # pyright: ignore[reportUnknownLambdaType]
        "_marft_seat": seat,
        "_marft_client": client,
        "get_response": _reply(kind, seat),
    }
    if callable(getattr(kind, "_inner_get_response", None)):
        body["_inner_get_response"] = _request(kind, "_inner_get_response", seat)
    try:
        made: Any = type(kind)(kind.__name__, (kind,), body)
        stand_in = object.__new__(made)
        stand_in.__dict__ = client.__dict__
    except Exception as error:
        raise IntegrationError(
            f"the chat client of agent {seat.name!r}, a {kind.__module__}.{kind.__qualname__},"
            f" cannot be recorded ({error}); use a subclass of agent_framework.BaseChatClient"
        ) from error
    for sdk in sdk_clients(client):
        seat.recorder.capture(sdk)
    return stand_in


def sdk_clients(client: Any) -> Iterator[Any]:
    """The openai SDK objects that a chat client holds."""
    for value in list(vars(client).values()):
        if hasattr(type(value), "chat") and hasattr(value, "_client"):
            yield value


def calls_responses(client: Any) -> bool:
    return any(base.__name__ == "RawOpenAIChatClient" for base in type(client).__mro__)


def _reply(kind: Any, seat: Seat) -> Any:
    """``get_response`` of a seat: the agent begins to speak."""
    whole = _request(kind, "get_response", seat)
    inner = callable(getattr(kind, "_inner_get_response", None))

    def get_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = kind.get_response if inner else whole
        messages = _messages(args, kwargs)
        safety = seat.recorder.core.safety
        speech = safety.attempt("begin a reply", seat.begin_speech)
        if speech is None:
            return kind.get_response(self, *args, **kwargs)
        with safety.guard("see approvals"):
            approvals(speech.episode, messages)
        scope = _Reply(speech, messages)
        try:
            with scope.entered():
                result = original(self, *args, **kwargs)
        except BaseException as error:
            with safety.guard("see a failure"):
                scope.failed(error)
            raise
        return follow(result, scope)

    return get_response


def _request(kind: Any, method: str, seat: Seat) -> Any:
    """One request to the model, by the seat that speaks."""

    def request(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = getattr(kind, method)
        speech, safety = SPEECH.get(), seat.recorder.core.safety
        scope = None
        if speech is not None and speech.seat is seat and not seat.recorder.core.closed:
            messages = _messages(args, kwargs)
            scope = safety.attempt("begin a model call", lambda: _begin(speech, messages, self))
        if scope is None:
            return original(self, *args, **kwargs)
        try:
            with scope.entered():
                result = original(self, *args, **kwargs)
        except BaseException as error:
            with safety.guard("see a failure"):
                scope.failed(error)
            raise
        return follow(result, scope)

    return request


def _messages(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    messages = kwargs["messages"] if "messages" in kwargs else args[0] if args else ()
    return list(messages) if isinstance(messages, Sequence) else [messages]


def _begin(speech: Speech, messages: list[Any], client: Any) -> _Request:
    tools(speech, messages)
    history(speech, messages)
    for sdk in sdk_clients(client):  # clients may make theirs late, or anew
        speech.seat.recorder.capture(sdk)
    return _Request(speech, speech.begin_call(), messages, type(client)._marft_client)


class _Reply:
    """A reply under way."""

    def __init__(self, speech: Speech, messages: list[Any]) -> None:
        self.safety = speech.safety
        self._speech, self._messages, self._over = speech, messages, False

    def entered(self) -> AbstractContextManager[None]:
        return self._speech.entered()

    def done(self, result: Any) -> None:
        if self._over:
            return
        self._over = True
        speech = self._speech
        speech.close()
        if not speech.turns and getattr(result, "messages", None):
            call = speech.begin_call()
            call.finish(unseen=unseen(self._messages, result, cached=True))
            speech.end_call(call)
            self.safety.warn_once(
                ("cached", speech.name),
                f"marft-agents: agent {speech.name!r} was answered by a middleware, without a call"
                " of its model; such replies are logged and never trained on; if it is a cache,"
                " record without it",
            )
        tools(speech, getattr(result, "messages", ()))

    def read(self) -> None:
        """Its result is still to come."""

    def failed(self, error: BaseException | None) -> None:
        if not self._over:
            self._over = True
            self._speech.close(error)


class _Request:
    """A model call under way."""

    def __init__(self, speech: Speech, call: Call, messages: list[Any], client: Any) -> None:
        self.safety = speech.safety
        self._speech, self._call, self._messages, self._client = speech, call, messages, client

    def entered(self) -> AbstractContextManager[None]:
        return self._call.current()

    def done(self, result: Any) -> None:
        call = self._call
        if call.finished:
            return
        call.finish(unseen=None if call.sent else unseen(self._messages, result))
        self._speech.end_call(call)
        if not call.sent:
            say_uncaptured(self._speech.seat, self._client)

    def read(self) -> None:
        if self._call.sent:  # what the app makes of it may still fail
            self.done(None)

    def failed(self, error: BaseException | None) -> None:
        call = self._call
        if call.finished:
            return
        if error is None and not call.sent:  # never sent
            call.finished = True
            call.episode.open_calls.discard(call)
        call.finish(error, None if call.sent else unseen(self._messages, None))
        self._speech.end_call(call)


def say_uncaptured(seat: Seat, client: Any) -> None:
    """Warn once that calls of this kind of client cannot be captured, and what to do."""
    kind = type(client)
    name = f"{kind.__module__}.{kind.__qualname__}"
    why = "calls the Responses API, which returns no token ids"
    if not calls_responses(client):
        why = "does not call chat completions through an openai SDK client"
    seat.recorder.core.safety.warn_once(
        ("uncaptured", kind),
        f"marft-agents: agent {seat.name!r} uses {name}, which {why}; its turns are logged without"
        " tokens and cannot be trained on; use"
        " agent_framework.openai.OpenAIChatCompletionClient(model=..., base_url=...)",
    )
