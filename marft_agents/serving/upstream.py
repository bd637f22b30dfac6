"""The engine as the gateway sees it: one async client, and what is known about its health.

Invariant: a request whose client has gone is cancelled upstream. An engine that is gone, or that
answers every request with an error, is reported as such and never as healthy.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import Any, TypeVar

import httpx
from starlette.requests import ClientDisconnect, Request

from marft_agents.serving.calls import KEEPALIVE_S, tls
from marft_agents.serving.client import root_url
from marft_agents.serving.refusals import Refusal

_T = TypeVar("_T")
_FAILURES_UNTIL_UNWELL = 3
_PASSED_ON = ("accept", "content-type", "x-request-id", "traceparent", "tracestate")


def _never_dead() -> str | None:
    return None


class Upstream:
    """Connection to one engine.

    Args:
        url: the engine's address.
        death: says why the engine's process is gone; ``None`` while it runs.
        api_key: sent to the engine, for one that was started elsewhere.
        read_timeout_s: longest wait for the next byte of an answer.
    """

    def __init__(
        self,
        url: str,
        *,
        death: Callable[[], str | None] = _never_dead,
        api_key: str | None = None,
        read_timeout_s: float = 600.0,
    ) -> None:
        self.url = root_url(url)
        self.death = death
        self._failures = 0
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(read_timeout_s, connect=5.0, pool=None),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=32, keepalive_expiry=KEEPALIVE_S
            ),
            trust_env=False,
            verify=tls(),
        )

    async def close(self) -> None:
        await self._http.aclose()

    def require_alive(self) -> None:
        """Refuse with 503 when the engine's process is gone."""
        if reason := self.death():
            raise Refusal(503, f"the engine behind this server is gone: {reason}")

    async def post(self, path: str, body: bytes, request: Request) -> httpx.Response:
        """Send a request on; the answer's body is still to be read and closed.

        Raises:
            ClientDisconnect: when the client went away meanwhile.
            Refusal: when the engine is gone, unreachable or too slow.
        """
        self.require_alive()
        headers = {k: request.headers[k] for k in _PASSED_ON if k in request.headers}
        headers |= {"content-type": "application/json", "accept-encoding": "identity"}
        sent = self._http.build_request("POST", self.url + path, content=body, headers=headers)
        with self._refusals():
            response = await unless_gone(request, self._http.send(sent, stream=True))
        self._failures = self._failures + 1 if response.status_code >= 500 else 0
        return response

    async def read(self, response: httpx.Response, request: Request) -> bytes:
        """The whole body of an answer.

        Raises:
            ClientDisconnect: when the client went away meanwhile.
            Refusal: when the engine broke off.
        """
        with self._refusals():
            return await unless_gone(request, response.aread())

    @contextlib.contextmanager
    def _refusals(self) -> Generator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            self._failures += 1
            raise Refusal(504, "the engine gave no answer in time") from error
        except httpx.HTTPError as error:
            self._failures += 1
            self.require_alive()
            reason = str(error) or type(error).__name__
            raise Refusal(
                503, f"the engine behind this server cannot be reached ({reason})"
            ) from error

    async def problem(self) -> str | None:
        """Why the engine cannot be relied on right now; ``None`` when it can."""
        if reason := self.death():
            return f"the engine is gone: {reason}"
        if self._failures >= _FAILURES_UNTIL_UNWELL:
            return f"the engine failed the last {self._failures} requests"
        try:
            answer = await self._http.get(f"{self.url}/health", timeout=5.0)
        except httpx.HTTPError as error:
            return f"the engine cannot be reached ({str(error) or type(error).__name__})"
        if not answer.is_success:
            return f"the engine says it is not well (status {answer.status_code})"
        return None

    async def model_names(self) -> set[str]:
        """Names that the engine lists; empty when it cannot be asked."""
        try:
            answer = await self._http.get(f"{self.url}/v1/models", timeout=5.0)
            return {str(entry["id"]) for entry in answer.json()["data"]}
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return set()

    async def stream(self, response: httpx.Response) -> AsyncIterator[bytes]:
        """Raw chunks as they come.

        Raises:
            Refusal: when the engine broke off before the end.
        """
        with self._refusals():
            async for chunk in response.aiter_raw():
                yield chunk


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Await ``work``, but cancel it when the client disconnects first.

    Raises:
        ClientDisconnect: in that case.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for future in (task, watch):
            future.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
