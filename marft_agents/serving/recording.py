"""The gateway as a recorder: calls of any client become turns, without code in the client.

Invariant: a call is recorded when its address, its API key or ``X-Marft-Record`` says so (with
``--record-all``, always), and never twice. Attempts of one call are one turn, for clients that show
that they retry. A failure here leaves the call unrecorded and answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping

import httpx
from starlette.requests import Request

from marft_agents.recording import MarftRecorder
from marft_agents.recording.exchange import Exchange
from marft_agents.schema import Episode, JsonDict
from marft_agents.serving.episodes import Episodes, GatewayEpisode
from marft_agents.serving.identity import Caller, caller_of
from marft_agents.serving.refusals import Refusal, bearer_token, require_own_origin, split_key
from marft_agents.serving.threads import in_thread
from marft_agents.serving.tool_results import note_tools
from marft_agents.serving.watch import HttpCall, Recorded, Watch

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
_SWEEP_S = 15.0
_FLUSH_S = 2.0


def _not_recorded(reason: str) -> Watch:
    return Watch({"X-Marft-Recorded": f"no; {reason}"})


class Recording:
    """What every recorded call of one gateway shares."""

    def __init__(
        self,
        recorder: MarftRecorder,
        *,
        record_all: bool = False,
        idle_s: float = 3600.0,
        resumable: Mapping[str, Episode] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recorder = recorder
        self.core = recorder.core
        self.all = record_all
        self.episodes = Episodes(self.core, idle_s=idle_s, resumable=resumable, now=now)
        self._sweep_s = min(_SWEEP_S, idle_s / 4)

    def watch(self, request: Request, body: JsonDict, caller: Caller, url: str) -> Watch:
        """Begin to record a call; ``url`` is where the engine will be asked."""
        with self.core.safety.guard("record a call"):
            assert caller.episode is not None and caller.agent is not None
            episode = self.episodes.use(caller.episode, by_app=caller.by_app)
            if episode is None:
                reason = f"the episode {caller.episode} has ended"
                self.core.safety.warn_once(
                    ("ended", caller.episode),
                    f"marft-agents: a call of agent {caller.agent!r} came after its episode"
                    f" {caller.episode!r} was ended; it is answered and not recorded",
                )
                return _not_recorded(reason)
            return self._recorded(request, body, caller, episode, url)
        return _not_recorded("the recorder failed, see the server's output")

    def _recorded(
        self,
        request: Request,
        body: JsonDict,
        caller: Caller,
        episode: GatewayEpisode,
        url: str,
    ) -> Recorded:
        assert caller.agent is not None
        key = _attempts_key(request, body, caller.agent)
        call = episode.held(key) if key is not None else None
        if call is not None and not _tries_again(request):
            call.finish()
            call = None
        if not isinstance(call, HttpCall):
            note_tools(episode, caller.agent, body.get("messages"))
            n = body.get("n")
            choices = n if isinstance(n, int) and n > 0 else 1
            parent = episode.speaker(caller.parent_turn), caller.parent_turn
            call = HttpCall(episode, caller.agent, caller.kind, key, choices, parent)
        secret, _ = split_key(bearer_token(request) or "")  # kept out of what errors quote
        asked = httpx.Request("POST", url, headers=[(b"authorization", secret.encode("latin-1"))])
        return Recorded(episode, call, Exchange(call, asked, body))

    async def written(self) -> None:
        """Return when all that was logged so far is on disk, or when that takes too long.

        What a client was told to be logged, or ended, another program may read at once. The
        client is not kept waiting for a slow disk, which is said instead.
        """
        if not await in_thread(self.recorder.flush, _FLUSH_S):
            self.core.safety.warn_once(
                ("slow", "log"),
                f"marft-agents: the log was not on disk after {_FLUSH_S:g} s; what clients are told"
                " to be logged may not be readable yet, and would be lost with this process",
            )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Sweep while the gateway runs; write everything when it stops."""

        async def sweep() -> None:
            while True:
                await asyncio.sleep(self._sweep_s)
                with self.core.safety.guard("end idle episodes"):
                    self.episodes.sweep()

        sweeper = asyncio.create_task(sweep())
        try:
            yield
        finally:
            sweeper.cancel()
            with self.core.safety.guard("log what is held back"):
                self.episodes.close()
            await asyncio.to_thread(self.recorder.close)


def watched(
    recording: Recording | None, request: Request, body: JsonDict, url: str
) -> tuple[JsonDict, Watch]:
    """Begin to record a request, if it is to be; without a model, its agent's name is the model.

    Raises:
        Refusal: for a request that asks to be recorded in a way that cannot work.
    """
    caller = caller_of(request, record_all=recording is not None and recording.all)
    if not caller.recorded:
        return body, Watch()
    if recording is None:
        raise Refusal(
            400, "this server records nothing; start it with --record DIR, or do not ask for it"
        )
    require_own_origin(request)
    if request.url.path == TEXT:
        raise Refusal(400, f"text completions are not recorded; use {CHAT}")
    if caller.agent is not None and body.get("model") is None:
        body = body | {"model": caller.agent}
    caller = caller.named(body.get("model"))
    if caller.agent is None:
        return body, Watch()  # it names no model: refused next
    return body, recording.watch(request, body, caller, url)


class _Words:
    """A key that is equal for the same body of the same agent.

    It costs as much as the body is long, so it is worked out when a call has failed, or when one
    that has waits to be tried again.
    """

    __slots__ = ("_agent", "_body", "_digest")

    def __init__(self, agent: str, body: JsonDict) -> None:
        self._agent = agent
        self._body = body
        self._digest: bytes | None = None

    @property
    def digest(self) -> bytes:
        if self._digest is None:
            text = f"{self._agent} {self._body!r}"
            self._digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()
            self._body = {}
        return self._digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Words) and self.digest == other.digest


def _attempts_key(request: Request, body: JsonDict, agent: str) -> Hashable | None:
    """What the attempts of one call have in common, for clients that show that they retry."""
    for name in ("x-marft-call", "idempotency-key"):
        if value := request.headers.get(name):
            return f"{agent} {name} {value}"
    if "x-stainless-retry-count" not in request.headers:
        return None
    return _Words(agent, body)


def _tries_again(request: Request) -> bool:
    if request.headers.get("x-marft-call") or request.headers.get("idempotency-key"):
        return True
    return request.headers.get("x-stainless-retry-count") not in (None, "0")
