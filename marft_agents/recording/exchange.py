"""One HTTP attempt at a chat completion: the request as sent, the reply as received.

Invariant: the app's request keeps everything the app put in it, byte for byte, and gains at most
two body fields and two headers (and, where the app asked for it, another model name). The app's
response is the one that it would have had, line by line: what was asked for on our account is
taken out again. Reading it also feeds the record. ``httpx`` and ``httpx2`` are the same here.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, cast

from marft_agents.recording.answer import Answer
from marft_agents.recording.call import Call
from marft_agents.recording.clean import stored_messages
from marft_agents.recording.episode import describe_error
from marft_agents.recording.headers import by_name, decoded, keys_of
from marft_agents.recording.jsontext import JsonObject, mapping
from marft_agents.recording.lines import Lines
from marft_agents.recording.linking import NO_LINKS
from marft_agents.recording.outgoing import rebuilt, token_fields
from marft_agents.recording.reply import Choice, Reply
from marft_agents.recording.restoring import NOTHING, Restorer, restored_response, set_length
from marft_agents.recording.routing import routed_model
from marft_agents.recording.server import Verdict
from marft_agents.recording.tee import tee
from marft_agents.schema import JsonDict

CHAT_PATH = "/chat/completions"
_EVENT_END = b"\n\n"
_RETRIED = frozenset({408, 409, 429})
REFUSALS = frozenset({400, 422})
"""Statuses with which servers refuse fields that they do not know."""
_SHORTEST_KEY = 6


class Exchange:
    """Record of one attempt; filled while the app reads the response, read when it is asked.

    ``body`` is the request's JSON; it is edited only where ``outgoing`` is asked for, which needs
    its text. ``tagged``: whether it names its call, which what goes out must not.
    """

    injected = refused_fields = False
    links = NO_LINKS
    """Known once the episode's ledger has caught up."""
    verdict: Verdict | None = None
    status: int | None = None
    streaming = closed = False
    _hidden = NOTHING
    _renamed = False
    _messages: list[JsonDict] | None = None
    _restorer: Restorer | None = None
    _answer: Answer | None = None
    _reply: Reply | None = None
    """Once it is over and read."""
    _error: str | None = None
    _cut: str | None = None
    _unreadable = _looked = False
    _fed: float | None = None

    def __init__(
        self, call: Call, request: Any, body: JsonDict | JsonObject, *, tagged: bool = False
    ) -> None:
        self.call = call
        self._wire = body if isinstance(body, JsonObject) else None
        body = body.fields if isinstance(body, JsonObject) else body
        self.request_body = body
        model = body.get("model")
        self.asked_model: str | None = model if isinstance(model, str) else None
        self.turn_ids: dict[int, str] = {}
        """Turn id of each choice that later prompts may contain."""
        self.base_url = str(request.url).partition("?")[0].removesuffix(CHAT_PATH)
        self.size = len(request.content)
        """Bytes that this holds, roughly."""
        self.started = self.ended = time.perf_counter()
        self._tagged, self._request = tagged, request
        self._headers: dict[bytes, bytes] = {}
        """Of the response; a copy, as the app may change them."""
        self._keys = keys_of(request.headers)
        for key in self._keys:
            call.episode.core.safety.hide(key)

    @property
    def messages(self) -> list[JsonDict]:
        """The messages sent, as the log keeps them."""
        if self._messages is None:
            self._messages = _sent_messages(self.request_body.get("messages"))
        return self._messages

    @property
    def answered(self) -> bool:
        """Whether the server gave this attempt a completion."""
        return self.status is not None and 200 <= self.status < 300

    @property
    def succeeded(self) -> bool:
        return self.answered and self.error is None

    @property
    def may_be_retried(self) -> bool:
        """Whether SDKs send again after an end like this."""
        advice = self.response_header("x-should-retry")
        if advice in ("true", "false"):
            return advice == "true"
        return self.status is None or self.status >= 500 or self.status in _RETRIED

    @property
    def reply(self) -> Reply | None:
        """What was answered so far; one that came in one piece, when it is over."""
        if self._reply is not None:
            return self._reply
        if self._answer is None or self._unreadable or not self.answered:
            return None
        try:
            with self.call.episode.ledger.reading:
                over = self._answer.over  # asked before: it may end meanwhile
                reply = self._answer.read()
                self._reply = reply if over else None
                return reply
        except Exception as error:
            self._unreadable = True
            self.call.episode.core.safety.failed("read a reply", error)
        return None

    @property
    def error(self) -> str | None:
        """Why there is no good reply, as far as it is known."""
        if self._error is None and self.closed and not self._looked:
            self._looked = True
            self._error = self._problem() or self._cut
        return self._error

    @error.setter
    def error(self, text: str | None) -> None:
        self._error = text

    def choice(self, index: int) -> Choice | None:
        """A choice by its index, and the only one by any: few servers number it otherwise."""
        reply = self.reply
        choices = reply.choices if reply else {}
        if index not in choices and len(choices) == 1:
            return next(iter(choices.values()))
        return choices.get(index)

    def response_header(self, name: str) -> str | None:
        value = self._headers.get(name.encode())
        return None if value is None else decoded(value)

    # -- request ------------------------------------------------------------------------------

    def outgoing(self) -> Any:
        """The request to send: the app's own when there is nothing to add."""
        core = self.call.episode.core
        undecided = self.verdict is None or self.verdict.accepts is not False
        self.injected = core.inject == "always" or (core.inject == "auto" and undecided)
        request = self._build(self.injected)
        core.sink.app_waits()
        self.started = self.ended = time.perf_counter()
        return request

    def without_fields(self, response: Any) -> Any | None:
        """The request as the app made it, when a server that could not be asked says no to ours."""
        unsure = self.verdict is not None and self.verdict.accepts is None
        if not (self.injected and unsure and response.status_code in REFUSALS):
            return None
        self.injected, self.refused_fields = False, True
        return self._build(False)

    def _build(self, inject: bool) -> Any:
        assert self._wire is not None
        call, body = self.call, self._wire.fields
        put = token_fields(body) if inject else {}
        self._hidden = _hidden_by(tuple(put))
        model = routed_model(call.episode.core, call.agent, self)
        if model is not None and model != self.asked_model:
            put["model"] = model
            self._renamed = self.asked_model is not None
        if not (inject or put or self._tagged):
            self.request_body = body
            return self._request
        self.request_body, data = self._wire.edited(put, ("user",) if self._tagged else ())
        identity = (call.episode.id, call.agent) if inject else None
        return rebuilt(self._request, data, identity)

    def _settle(self) -> None:
        """Learn from a reply of a server that could not be asked."""
        if self.verdict is None or self.verdict.accepts is not None or not self.answered:
            return
        servers = self.call.episode.core.servers
        if self.refused_fields:
            reason = f"{self.base_url} refused them and took the request without them"
            servers.settle(self.base_url, False, reason)
            self.verdict = servers.known(self.base_url)
        elif self.reply is not None and self.reply.prompt_token_ids:
            servers.settle(self.base_url, True, f"{self.base_url} returned token ids")

    # -- response -----------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """No response came."""
        self.call.episode.core.sink.app_goes_on()
        self.error = self.error or describe_error(error)
        self.close()

    def begin(self, status: int, headers: Any) -> None:
        """The answer begins: what came before its body."""
        self.call.episode.core.sink.app_goes_on()
        self.status = status
        self._headers = by_name(headers)
        kind = self._headers.get(b"content-type", b"").lower()
        asked = bool(self.request_body.get("stream"))
        self.streaming = self.answered and (
            b"event-stream" in kind or (asked and b"json" not in kind)
        )
        if self.answered and asked != self.streaming:
            asked_for = "a stream" if asked else "a reply in one piece"
            self.error = f"the app asked for {asked_for} and the server answered otherwise"
        if self.streaming:
            self._lines = Lines()
        echo = bool(self.request_body.get("echo"))
        self._answer = Answer(streaming=self.streaming, expected=self._expected(), echo=echo)
        if self.answered and (self._hidden or self._renamed):
            asked = self.asked_model if self._renamed else None
            self._restorer = Restorer(asked, self._hidden, failed=self._restoring_failed())

    def received(self, response: Any, *, stream: bool, is_async: bool) -> Any:
        """Attach to ``response``; returns what the app is to get (the same object, as a rule)."""
        self.begin(response.status_code, response.headers)
        if stream:
            if self._restorer is not None and not self.streaming:
                set_length(response, None)
            tee(response, self, is_async=is_async)
            return response
        content = response.content
        seen = self._whole(content)
        self.close()
        return response if seen == content else restored_response(response, seen)

    def _whole(self, content: bytes) -> bytes:
        """The body came in one piece; returns what the app is to see of it."""
        if self.streaming or self._answer is None:
            return self.feed(content) + self.rest()
        self._fed = time.perf_counter()
        self.size += len(content)
        self._answer.add(content)
        restorer, self._restorer = self._restorer, None
        return content if restorer is None else restorer.whole(content)

    def feed(self, data: bytes) -> bytes:
        """The server has sent ``data``; returns what the app is to see after it."""
        self._fed = time.perf_counter()
        answer = self._answer
        if answer is None:
            return data
        self.size += len(data)
        if not self.streaming:
            answer.add(data)
            return data if self._restorer is None else b""
        restorer = self._restorer
        seen, more = self._quickly(answer, restorer, data) if restorer else (b"", data)
        lines = self._lines.feed(more) if more else ()
        if not self.closed:
            try:
                answer.take(lines)
                if answer.seems_finished and not self.turn_ids:
                    self._register_early(answer)
            except Exception as error:
                self.call.episode.core.safety.failed("read a streamed reply", error)
        if restorer is None:
            return data
        return seen + restorer.lines(lines) if lines else seen

    def _quickly(self, answer: Answer, restorer: Restorer, data: bytes) -> tuple[bytes, bytes]:
        """What the app is to see of whole events in the usual form, and what is behind them."""
        unfinished = self._lines.unfinished() if _EVENT_END in data else None
        if unfinished is None:
            return b"", data
        data = unfinished + data if unfinished else data
        seen, length = restorer.events(data)
        if not length:
            return b"", data
        self._lines.passed()
        if not self.closed:
            answer.take_events(data[:length])
        return seen, data[length:]

    def rest(self) -> bytes:
        """What the app is to see when nothing more comes."""
        restorer, self._restorer = self._restorer, None
        if restorer is None or self._answer is None:
            return b""
        if self.streaming:
            return restorer.end(self._lines.rest())
        return restorer.whole(self._answer.body)

    def _restoring_failed(self) -> Callable[[Exception], None]:
        return functools.partial(self.call.episode.core.safety.failed, "restore a reply")

    def close(self, error: BaseException | None = None) -> None:
        """The response is read, given up, or cut by ``error``. The first time counts."""
        if self.closed:
            return
        self.closed = True
        if error is not None:
            self._cut = describe_error(error)
        try:
            self._end()
            self._settle()
            self._register()
        except Exception as problem:
            self.call.episode.core.safety.failed("read a reply", problem)
        self._request = self._wire = None
        cut = error is not None or self._fed is None
        self.ended = time.perf_counter() if cut else cast("float", self._fed)

    def _end(self) -> None:
        if self._answer is None:
            return
        self._answer.end(self._lines.rest() if self.streaming else ())
        if not self.answered:
            self.error = self._redacted(f"HTTP {self.status}: {self._answer.refusal()}")

    def _problem(self) -> str | None:
        """What is wrong with a reply that is over."""
        if not self.answered or self._answer is None:
            return None
        if self.reply is None and self._unreadable:
            return "the reply could not be read"
        with self.call.episode.ledger.reading:
            return self._redacted(self._answer.problem())

    def _register_early(self, answer: Answer) -> None:
        """A stream has said all, though it may go on for a while."""
        if answer.expected == 1:
            self.call.register(self, 0)
        elif self.reply is not None and self.reply.finished:
            self._register()

    def _register(self) -> None:
        if self.answered and self._answer is not None and self._answer.has_one_choice:
            self.call.register(self, 0)
            return
        reply = self.reply if self.answered else None
        for index in reply.choices if reply else ():
            self.call.register(self, index)

    def _expected(self) -> int:
        n = self.request_body.get("n")
        return n if isinstance(n, int) and n > 0 else 1

    def _redacted(self, text: str | None) -> str | None:
        """An error text without the key that the request carried."""
        if text is None:
            return None
        for given in self._keys:
            key = given.removeprefix("Bearer ").strip()
            if len(key) >= _SHORTEST_KEY:  # "x" and the like are no secrets, but parts of words
                text = text.replace(key, "***")
        return text[:500]


@functools.lru_cache(maxsize=64)
def _hidden_by(asked: tuple[str, ...]) -> frozenset[str]:
    """What the app is not to see of a reply that was asked for more."""
    return frozenset(name.removeprefix("return_") for name in asked)


def _sent_messages(messages: Any) -> list[JsonDict]:
    """Messages of a request as the log keeps them.

    They were read from the wire for us alone, so those of plain text are kept without a copy.
    """
    if not isinstance(messages, list):
        return []
    listed = cast("list[Any]", messages)
    return [m if _is_plain(m) else stored_messages([m])[0] for m in listed]


def _is_plain(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(mapping(message).get("content", ""), str | None)


__all__ = ["CHAT_PATH", "REFUSALS", "Exchange"]
