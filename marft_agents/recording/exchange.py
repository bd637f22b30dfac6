"""One HTTP attempt at a chat completion: the request as sent, the reply as received.

Invariant: the app's request keeps everything the app put in it and gains at most two body fields
and two headers (and, where the app asked for it, another model name). The app's response keeps its
bytes, chunk by chunk; reading them also feeds the record. ``httpx`` and ``httpx2`` are the same
here: requests and responses are built with the type that came in.
"""

from __future__ import annotations

import json
import time
from typing import Any, cast
from urllib.parse import quote

from marft_agents.recording.call import Call
from marft_agents.recording.clean import stored_messages
from marft_agents.recording.core import Models
from marft_agents.recording.episode import describe_error
from marft_agents.recording.reply import Reply, StreamReader, completion, error_text
from marft_agents.recording.server import Verdict
from marft_agents.recording.tee import tee
from marft_agents.schema import JsonDict

CHAT_PATH = "/chat/completions"
TOKEN_FIELDS: JsonDict = {"return_token_ids": True, "logprobs": True}
_RETRIED = frozenset({408, 409, 429})
_REFUSALS = frozenset({400, 422})
_KEY_HEADERS = ("authorization", "api-key", "x-api-key")
_SHORTEST_KEY = 6


class Exchange:
    """Record of one attempt; filled while the app reads the response."""

    def __init__(self, call: Call, request: Any, body: JsonDict, *, tagged: bool = False) -> None:
        self.call = call
        self._tagged = tagged
        """Whether the request as it came names the call; what goes out must not."""
        if tagged:
            body = {k: v for k, v in body.items() if k != "user"}
        self._app_body = self.request_body = body
        self.injected = self.refused_fields = False
        model = body.get("model")
        self.asked_model: str | None = model if isinstance(model, str) else None
        self.messages = stored_messages(body.get("messages"))
        self.base_url = str(request.url.copy_with(query=None)).removesuffix(CHAT_PATH)
        self.verdict: Verdict | None = None
        self.status: int | None = None
        self.streaming = False
        self.error: str | None = None
        self.reply: Reply | None = None
        self.closed = False
        self.started = self.ended = time.perf_counter()
        self._request = request
        self._headers: Any = {}
        self._reader: StreamReader | None = None
        self._raw: list[bytes] = []

    @property
    def answered(self) -> bool:
        """Whether the server gave this attempt a completion."""
        return self.status == 200

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

    def response_header(self, name: str) -> str | None:
        return self._headers.get(name)

    # -- request ------------------------------------------------------------------------------

    def outgoing(self) -> Any:
        """The request to send: the app's own when there is nothing to add."""
        core = self.call.episode.core
        undecided = self.verdict is None or self.verdict.accepts is not False
        self.injected = core.inject == "always" or (core.inject == "auto" and undecided)
        return self._build(self.injected)

    def without_fields(self, response: Any) -> Any | None:
        """The request as the app made it, when a server that could not be asked says no to ours."""
        unsure = self.verdict is not None and self.verdict.accepts is None
        if not (self.injected and unsure and response.status_code in _REFUSALS):
            return None
        self.injected, self.refused_fields = False, True
        return self._build(False)

    def _build(self, inject: bool) -> Any:
        core, body = self.call.episode.core, dict(self._app_body)
        headers: list[tuple[bytes, bytes]] = []
        if inject:
            body |= {k: v for k, v in TOKEN_FIELDS.items() if k not in body}
            headers = [
                (b"X-Marft-Episode", quote(self.call.episode.id).encode()),
                (b"X-Marft-Agent", quote(self.call.agent).encode()),
            ]
        model = self._routed(core.models)
        if model is not None:
            body["model"] = model
        self.request_body = body
        if body == self._app_body and not headers and not self._tagged:
            return self._request
        kept = [
            (k, v)
            for k, v in self._request.headers.raw
            if k.lower() not in (b"content-length", b"x-marft-episode", b"x-marft-agent")
        ]
        return type(self._request)(
            self._request.method,
            self._request.url,
            headers=kept + headers,
            content=json.dumps(body, separators=(",", ":")).encode(),
            extensions=self._request.extensions,
        )

    def _routed(self, models: Models) -> str | None:
        """The model to send this agent to, where the recorder was told one."""
        if models == "auto":
            return None
        return models.get(self.call.agent)

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
        self.error = self.error or describe_error(error)
        self.close()

    def begin(self, status: int, headers: Any) -> None:
        """The response has begun; its body goes to ``feed``, its end to ``close``."""
        self.status = status
        self._headers = headers
        self.streaming = bool(self.request_body.get("stream")) and self.answered
        if self.streaming:
            self._reader = StreamReader(expected=self._expected())
            self.reply = self._reader.reply

    def received(self, response: Any, *, stream: bool, is_async: bool) -> Any:
        """Attach to ``response``; returns what the app is to get (the same object, as a rule)."""
        self.begin(response.status_code, response.headers)
        if stream:
            tee(response, self, is_async=is_async)
            return response
        self.feed(response.content)
        self.close()
        return self._renamed(response)

    def feed(self, data: bytes) -> None:
        """The app has received ``data``."""
        if self._reader is None:
            self._raw.append(data)
            return
        self._reader.feed(data)
        if self._reader.reply.finished:
            for choice in self._reader.reply.choices.values():
                self.call.register(choice)

    def close(self, error: BaseException | None = None) -> None:
        """The response is read, cut or given up. The first time counts."""
        if self.closed:
            return
        self.closed = True
        self.ended = time.perf_counter()
        with self.call.episode.core.safety.guard("read a reply"):
            self._read_body()
            self._settle()
        cut = error is not None and not (self.reply and self.reply.finished)
        if error is not None and cut:
            self.error = self.error or describe_error(error)

    def _read_body(self) -> None:
        if self._reader is not None:
            self._reader.end()
            self.error = self.error or self._redacted(self._reader.reply.error)
            return
        if self.status is None:
            return
        raw, self._raw = b"".join(self._raw), []
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        if self.answered and isinstance(body, dict):
            self.reply = completion(cast("JsonDict", body), self._expected())
            self.error = self.error or self._redacted(self.reply.error)
        elif self.answered:
            self.error = self.error or "the reply is not JSON"
        else:
            detail = error_text(body) if isinstance(body, dict) else raw.decode("utf-8", "replace")
            self.error = self._redacted(f"HTTP {self.status}: {detail}")

    def _expected(self) -> int:
        n = self.request_body.get("n")
        return n if isinstance(n, int) and n > 0 else 1

    def _redacted(self, text: str | None) -> str | None:
        """An error text without the key that the request carried."""
        if text is None:
            return None
        for name in _KEY_HEADERS:
            key = str(self._request.headers.get(name) or "").removeprefix("Bearer ").strip()
            if len(key) >= _SHORTEST_KEY:  # "x" and the like are no secrets, but parts of words
                text = text.replace(key, "***")
        return text[:500]

    def _renamed(self, response: Any) -> Any:
        """With another model sent than asked for, the reply names the one asked for.

        Clients warn about a mismatch. Streams are left alone: nobody compares there, and rewriting
        them would cost the byte-for-byte promise.
        """
        sent = self.request_body.get("model")
        if sent == self.asked_model or self.asked_model is None or not self.succeeded:
            return response
        body = response.json()
        body["model"] = self.asked_model
        headers = [
            (k, v)
            for k, v in response.headers.raw
            if k.lower() not in (b"content-length", b"content-encoding", b"transfer-encoding")
        ]
        renamed = type(response)(
            response.status_code,
            headers=headers,
            content=json.dumps(body).encode(),
            request=response.request,
            extensions=response.extensions,
            history=response.history,
        )
        renamed.elapsed = response.elapsed
        return renamed

    def say_if_ids_are_missing(self) -> None:
        """Warn once per agent and server when a good reply cannot be trained on."""
        choices = self.reply.choices.values() if self.reply else ()
        ids = all(c.token_ids for c in choices) and self.reply and self.reply.prompt_token_ids
        if ids and all(c.logprobs for c in choices):
            return
        core, agent = self.call.episode.core, self.call.agent
        missing = "log-probabilities" if ids else "token ids"
        if self.verdict is not None and self.verdict.accepts is False:
            why = f"the server does not look like one that returns them: {self.verdict.reason}"
            cure = "serve the model with `marft-agents serve` or vLLM; if it is one behind a proxy,"
            cure += ' use MarftRecorder(inject="always")'
        elif core.inject == "never":
            why, cure = 'the recorder was made with inject="never"', 'use inject="auto"'
        else:
            fields = {k: self.request_body.get(k) for k in TOKEN_FIELDS}
            why = f"the server ignored them (the request said {fields})"
            cure = "leave these fields to the recorder, and serve with `marft-agents serve` or vLLM"
        core.safety.warn_once(
            ("no ids", agent, self.base_url),
            f"marft-agents: replies to agent {agent!r} from {self.base_url} carry no {missing}, so"
            f" its turns are logged but cannot be trained on; {why}; {cure}",
        )
