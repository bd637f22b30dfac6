"""The hook under an SDK client: ``send`` of its HTTP client, on the instance.

Invariant: a request that is no chat completion, or is made outside a recorded call, goes through
untouched, and so does every request when something here fails. The hook is put on once per HTTP
client, whoever asks for it, and taken off by the last one.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from marft_agents.errors import ConfigError, IntegrationError
from marft_agents.recording.call import CALL, TAG, tagged_call
from marft_agents.recording.core import Core
from marft_agents.recording.elsewhere import say_elsewhere
from marft_agents.recording.exchange import CHAT_PATH, REFUSALS, Exchange
from marft_agents.recording.jsontext import JsonObject
from marft_agents.recording.outgoing import rebuilt
from marft_agents.recording.own import OwnCall, own_call


@dataclass(eq=False)
class Claim:
    """One recorder's interest in an HTTP client; ``agent``: whose calls its own are.

    The hook holds its claims and the HTTP client holds the hook, so nothing outlives the client.
    """

    hook: Hook
    core: Core
    agent: str | None

    def release(self) -> None:
        with _lock:
            if self in self.hook.claims:
                self.hook.claims.remove(self)
            if not self.hook.claims:
                self.hook.remove()


class Hook:
    """The replaced ``send`` of one HTTP client."""

    def __init__(self, http: Any) -> None:
        self.claims: list[Claim] = []
        self._http = weakref.ref(http)
        self._is_async = hasattr(http, "aclose")
        self._send = http.send
        http.send = self._wrapped()

    @property
    def owner(self) -> Claim | None:
        """Who gets the calls that no runtime announced."""
        for claim in self.claims:
            if claim.agent is not None and not claim.core.closed:
                return claim
        return None

    def remove(self) -> None:
        http = self._http()
        if http is not None and getattr(http.send, "marft_hook", None) is self:
            del http.send

    def _wrapped(self) -> Callable[..., Any]:
        hook = self

        async def send_async(request: Any, **kwargs: Any) -> Any:
            return await hook.send_async(request, kwargs)

        def send_sync(request: Any, **kwargs: Any) -> Any:
            return hook.send_sync(request, kwargs)

        send: Any = send_async if self._is_async else send_sync
        send.marft_hook = hook
        return send

    def send_sync(self, request: Any, kwargs: dict[str, Any]) -> Any:
        exchange, request = self._open(request)
        if exchange is None:
            return self._send(request, **kwargs)
        core = exchange.call.episode.core
        if core.asks_servers:
            exchange.verdict = core.servers.known(exchange.base_url) or core.servers.ask(
                exchange.base_url, request, self._send
            )
        request = core.safety.attempt("prepare a request", exchange.outgoing) or request
        try:
            response = self._send(request, **kwargs)
            plain = _plain(exchange, response) if response.status_code in REFUSALS else None
            if plain is not None:
                response.close()
                response = self._send(plain, **kwargs)
        except BaseException as error:
            self._failed(exchange, error)
            raise
        return self._received(exchange, response, kwargs)

    async def send_async(self, request: Any, kwargs: dict[str, Any]) -> Any:
        exchange, request = self._open(request)
        if exchange is None:
            return await self._send(request, **kwargs)
        core = exchange.call.episode.core
        try:
            if core.asks_servers:
                exchange.verdict = core.servers.known(
                    exchange.base_url
                ) or await core.servers.ask_async(exchange.base_url, request, self._send)
            request = core.safety.attempt("prepare a request", exchange.outgoing) or request
            response = await self._send(request, **kwargs)
            plain = _plain(exchange, response) if response.status_code in REFUSALS else None
            if plain is not None:
                await response.aclose()
                response = await self._send(plain, **kwargs)
        except BaseException as error:
            self._failed(exchange, error)
            raise
        return self._received(exchange, response, kwargs)

    def _open(self, request: Any) -> tuple[Exchange | None, Any]:
        """The record of this request, ``None`` when it is none of ours, and the request to send."""
        if request.method != "POST":
            return None, request
        announced, owner = CALL.get(), self.owner
        path = request.url.path
        if not path.endswith(CHAT_PATH):
            core, agent = (owner.core, owner.agent) if owner else (None, None)
            say_elsewhere(path, announced, core, agent)
            return None, request
        body = _body(request, announced is not None or owner is not None)
        if body is None:
            return None, request
        tagged = tagged_call(body.fields.get("user"))
        call = tagged or announced
        core = call.episode.core if call else owner.core if owner else None
        if core is None or core.closed:
            drop = ("user",) if tagged else ()
            return None, rebuilt(request, body.edited(drop=drop)[1], None) if drop else request
        try:
            if call is None and owner is not None:
                call = own_call(core, owner.agent or "", request)
            if call is not None:
                exchange = Exchange(call, request, body, tagged=tagged is not None)
                call.sends(exchange)
                return exchange, request
        except Exception as error:
            core.safety.failed("read a request", error)
        return None, request

    def _failed(self, exchange: Exchange, error: BaseException) -> None:
        with exchange.call.episode.core.safety.guard("record a failed request"):
            exchange.failed(error)
            if isinstance(error, Exception):
                exchange.call.over(exchange)
            elif isinstance(exchange.call, OwnCall):
                exchange.call.finish(error)  # cancelled: nobody tries again

    def _received(self, exchange: Exchange, response: Any, kwargs: dict[str, Any]) -> Any:
        stream = bool(kwargs.get("stream"))
        try:
            response = exchange.received(response, stream=stream, is_async=self._is_async)
            if exchange.closed:
                exchange.call.over(exchange)
        except Exception as error:
            exchange.call.episode.core.safety.failed("record a reply", error)
        return response


def _fresh_lock() -> None:
    """The lock may have been held by a thread that a forked child does not have."""
    global _lock
    _lock = threading.Lock()


_lock = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fresh_lock)
_TAG = f'"{TAG}'.encode()


def _body(request: Any, recorded: bool) -> JsonObject | None:
    """The request's JSON, where somebody records it or it may name its call."""
    try:
        content: bytes = request.content
        if not recorded and _TAG not in content:
            return None
        return JsonObject(content)
    except Exception:  # a body that is streamed, or no JSON object: no SDK made it
        return None


def _plain(exchange: Exchange, response: Any) -> Any | None:
    """The app's own request, to be sent after a refusal of ours."""
    safety = exchange.call.episode.core.safety
    return safety.attempt("read a refusal", lambda: exchange.without_fields(response))


def capture(client: Any, core: Core, agent: str | None = None) -> Claim:
    """Hook the HTTP client inside an openai SDK object. Asking again gives the same claim.

    Raises:
        IntegrationError: no openai SDK client.
        ConfigError: the HTTP client already belongs to another agent.
    """
    http = getattr(client, "_client", None)
    if http is None or not hasattr(client, "chat") or not callable(getattr(http, "send", None)):
        raise IntegrationError(
            f"{type(client).__module__}.{type(client).__qualname__} is no openai SDK client;"
            " pass openai.OpenAI(...) or openai.AsyncOpenAI(...)"
        )
    with _lock:
        hook = getattr(http.send, "marft_hook", None)
        if not isinstance(hook, Hook):
            hook = Hook(http)
        owner = hook.owner
        if agent is not None and owner is not None and (owner.core, owner.agent) != (core, agent):
            raise ConfigError(
                f"this HTTP client already records agent {owner.agent!r}, so it cannot also record"
                f" {agent!r}; give each agent a client (and http_client) of its own"
            )
        for claim in hook.claims:
            if claim.core is core and claim.agent == agent:
                return claim
        claim = Claim(hook, core, agent)
        hook.claims.append(claim)
        return claim
