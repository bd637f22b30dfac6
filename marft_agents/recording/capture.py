"""The hook under an SDK client: ``send`` of its HTTP client, on the instance.

Invariant: a request that is no chat completion, or is made outside a recorded call, goes through
untouched, and so does every request when something here fails. The hook is put on once per HTTP
client, whoever asks for it, and taken off by the last one.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

from marft_agents.errors import ConfigError, IntegrationError
from marft_agents.recording.call import CALL, TAG, Call, tagged_call
from marft_agents.recording.core import Core
from marft_agents.recording.episode import LiveEpisode, current_episode
from marft_agents.recording.exchange import CHAT_PATH, Exchange
from marft_agents.schema import JsonDict

_RETRIES: ContextVar[OwnCall | None] = ContextVar("marft_retries", default=None)


class OwnCall(Call):
    """A call that nobody announced: it begins with its request and ends with its response.

    An end that the SDK may retry is held back until its next attempt, another call, or the end of
    the episode.
    """

    def __init__(self, episode: LiveEpisode, agent: str, content: bytes) -> None:
        super().__init__(episode, agent)
        self.content = content
        episode.open_calls.add(self)

    @property
    def held_back(self) -> bool:
        """Whether its last attempt has failed and another may follow."""
        return not self.finished and bool(self.exchanges) and self.exchanges[-1].closed

    def over(self, exchange: Exchange) -> None:
        if exchange.answered or not exchange.may_be_retried:
            self.finish()


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
        return next((c for c in self.claims if c.agent is not None and not c.core.closed), None)

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
        exchange = self._open(request)
        if exchange is None:
            return self._send(request, **kwargs)
        core = exchange.call.episode.core
        if core.inject == "auto":
            exchange.verdict = core.servers.known(exchange.base_url) or core.servers.ask(
                exchange.base_url, request, self._send
            )
        request = core.safety.attempt("prepare a request", exchange.outgoing) or request
        try:
            response = self._send(request, **kwargs)
            plain = _plain(exchange, response)
            if plain is not None:
                response.close()
                response = self._send(plain, **kwargs)
        except BaseException as error:
            self._failed(exchange, error)
            raise
        return self._received(exchange, response, kwargs)

    async def send_async(self, request: Any, kwargs: dict[str, Any]) -> Any:
        exchange = self._open(request)
        if exchange is None:
            return await self._send(request, **kwargs)
        core = exchange.call.episode.core
        try:
            if core.inject == "auto":
                exchange.verdict = core.servers.known(
                    exchange.base_url
                ) or await core.servers.ask_async(exchange.base_url, request, self._send)
            request = core.safety.attempt("prepare a request", exchange.outgoing) or request
            response = await self._send(request, **kwargs)
            plain = _plain(exchange, response)
            if plain is not None:
                await response.aclose()
                response = await self._send(plain, **kwargs)
        except BaseException as error:
            self._failed(exchange, error)
            raise
        return self._received(exchange, response, kwargs)

    def _open(self, request: Any) -> Exchange | None:
        """The record of this request, or ``None`` when it is none of ours."""
        if request.method != "POST" or not request.url.path.endswith(CHAT_PATH):
            return None
        tagged = _tagged(request)
        announced, owner = tagged or CALL.get(), self.owner
        core = announced.episode.core if announced else owner.core if owner else None
        if core is None or (core.closed and tagged is None):
            return None
        with core.safety.guard("read a request"):
            body = json.loads(request.content)
            agent = (owner.agent if owner else None) or ""
            call = announced or _own_call(core, agent, request)
            if call is None or not isinstance(body, dict):
                return None
            exchange = Exchange(call, request, cast("JsonDict", body), tagged=tagged is not None)
            call.sends(exchange)
            return exchange
        return None

    def _failed(self, exchange: Exchange, error: BaseException) -> None:
        with exchange.call.episode.core.safety.guard("record a failed request"):
            exchange.failed(error)
            if isinstance(error, Exception):
                exchange.call.over(exchange)
            elif isinstance(exchange.call, OwnCall):
                exchange.call.finish(error)  # cancelled: nobody tries again

    def _received(self, exchange: Exchange, response: Any, kwargs: dict[str, Any]) -> Any:
        stream = bool(kwargs.get("stream"))
        with exchange.call.episode.core.safety.guard("record a reply"):
            response = exchange.received(response, stream=stream, is_async=self._is_async)
            if exchange.closed:
                exchange.call.over(exchange)
        return response


_lock = threading.Lock()


def _tagged(request: Any) -> Call | None:
    """The call that the request's body names, if any."""
    try:
        content: bytes = request.content
        if TAG.encode() not in content:
            return None
        body = json.loads(content)
    except Exception:  # a body that is streamed, or no JSON: none that a runtime tagged
        return None
    return tagged_call(body.get("user")) if isinstance(body, dict) else None


def _plain(exchange: Exchange, response: Any) -> Any | None:
    """The app's own request, to be sent after a refusal of ours."""
    safety = exchange.call.episode.core.safety
    return safety.attempt("read a refusal", lambda: exchange.without_fields(response))


def _own_call(core: Core, agent: str, request: Any) -> OwnCall | None:
    episode = current_episode(core)
    if episode is None:
        core.safety.warn_once(
            ("no episode", agent),
            f"marft-agents: a call of the client attached to agent {agent!r} was made outside"
            " an episode and is not recorded; put it inside `with recorder.episode():` (a"
            " thread of your own does not inherit it: use `with episode.active():` there)",
        )
        return None
    waiting = _RETRIES.get()
    if waiting is not None and waiting.held_back:
        again = request.headers.get("x-stainless-retry-count") not in (None, "0")
        if again and waiting.episode is episode and waiting.content == request.content:
            return waiting
        waiting.finish()
    call = OwnCall(episode, agent, request.content)
    _RETRIES.set(call)
    return call


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
