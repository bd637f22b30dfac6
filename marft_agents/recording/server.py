"""Which servers take the request fields that token fidelity needs.

Invariant: a server is asked (``GET {base}/models``) through the app's own HTTP client, so that its
proxy, certificates and transport hold; it has one second, once. Only an owner known to accept
unknown fields counts as yes: others answer 400 to them. A server too busy to say is taken at its
deeds: the fields are tried, and a refusal is followed by the app's own request.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from marft_agents.recording.jsontext import mapping, mappings

ACCEPTING_OWNERS = frozenset({"vllm", "marft-agents"})
TIMEOUT_S = 1.0
_QUICK_S = 0.2
_RETRY_QUICK_S = 5.0
_RETRY_SLOW_S = 300.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of one base URL."""

    accepts: bool | None
    """``None``: it could not be asked."""
    reason: str
    retry_at: float | None = None
    """``time.monotonic()`` after which to ask again; ``None``: settled."""
    models: frozenset[str] = frozenset()
    """Names that it lists."""


class KnownServers:
    """Verdict per base URL, for one recorder."""

    def __init__(self) -> None:
        self._verdicts: dict[str, Verdict] = {}

    def known(self, base_url: str) -> Verdict | None:
        """The verdict that still holds, if any."""
        verdict = self._verdicts.get(base_url)
        if verdict is None or verdict.retry_at is None or time.monotonic() < verdict.retry_at:
            return verdict
        return None

    def settle(self, base_url: str, accepts: bool, reason: str) -> None:
        """A reply has shown what the server does."""
        before = self._verdicts.get(base_url)
        models = before.models if before else frozenset[str]()
        self._verdicts[base_url] = Verdict(accepts, reason, models=models)

    def ask(self, base_url: str, request: Any, send: Callable[[Any], Any]) -> Verdict:
        """Ask over a blocking client. ``request`` is the app's, for its headers."""
        started = time.monotonic()
        try:
            verdict = _judge(base_url, send(_question(base_url, request)))
        except Exception as error:
            verdict = _unreachable(base_url, error, started)
        self._verdicts[base_url] = verdict
        return verdict

    async def ask_async(
        self, base_url: str, request: Any, send: Callable[[Any], Awaitable[Any]]
    ) -> Verdict:
        """Ask over an async client, without blocking its event loop."""
        started = time.monotonic()
        try:
            answer = send(_question(base_url, request))
            verdict = _judge(base_url, await _within_a_second(answer))
        except Exception as error:
            verdict = _unreachable(base_url, error, started)
        self._verdicts[base_url] = verdict
        return verdict


async def _within_a_second(answer: Awaitable[Any]) -> Any:
    import asyncio  # here, so that importing the package stays quick

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return await answer  # another event loop; the request's own limits hold
    async with asyncio.timeout(TIMEOUT_S):
        return await answer


def _question(base_url: str, request: Any) -> Any:
    """``GET models`` with the app's credentials, in the app's own request type."""
    headers = [
        (name, value)
        for name, value in request.headers.raw
        if not name.lower().startswith((b"content-", b"x-stainless-", b"accept"))
    ]
    limits = dict.fromkeys(("connect", "read", "write", "pool"), TIMEOUT_S)
    return type(request)(
        "GET", f"{base_url}/models", headers=headers, extensions={"timeout": limits}
    )


def _judge(base_url: str, response: Any) -> Verdict:
    asked = f"GET {base_url}/models"
    retry_at = time.monotonic() + _RETRY_QUICK_S
    if response.status_code != 200:
        short = response.status_code == 404 and not base_url.endswith("/v1")
        hint = " (base_url of `marft-agents serve` ends in /v1)" if short else ""
        return Verdict(False, f"{asked} answered {response.status_code}{hint}", retry_at)
    listing = mapping(response.json())
    data = mappings(listing.get("data"))
    if not data:
        return Verdict(False, f"{asked} lists no model", retry_at)
    owners = {str(model.get("owned_by")) for model in data}
    names = frozenset(str(model.get("id")) for model in data)
    if owners & ACCEPTING_OWNERS:
        reason = f"{asked} names {sorted(owners & ACCEPTING_OWNERS)[0]}"
        return Verdict(True, reason, models=names)
    reason = f"{asked} names the owners {sorted(owners)}, not vllm or marft-agents"
    return Verdict(False, reason, models=names)


def _unreachable(base_url: str, error: Exception, started: float) -> Verdict:
    now = time.monotonic()
    wait = _RETRY_QUICK_S if now - started < _QUICK_S else _RETRY_SLOW_S
    reason = f"GET {base_url}/models failed ({type(error).__name__}: {error})"
    return Verdict(None, reason, now + wait)
