"""The one address that applications see.

Invariant: only the routes below answer. A request reaches the engine under the name of one probed
adapter version or not at all; the bare base is never a substitute. What the engine answers passes
unchanged, but for the model name that was asked for. Recording a call changes nothing of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as HttpRoute

from marft_agents.errors import MarftError
from marft_agents.serving.aliases import Aliases, Route
from marft_agents.serving.answers import HANDLERS, Relay, is_stream, parse_object
from marft_agents.serving.commands import LOGPROBS_MODE, SAMPLING_DEFAULTS
from marft_agents.serving.control import control_routes
from marft_agents.serving.episode_routes import agent_routes, closed_routes, episode_routes
from marft_agents.serving.recording import CHAT, TEXT, Recording, Watch, watched
from marft_agents.serving.refusals import (
    Refusal,
    read_limited,
    require_api_key,
)
from marft_agents.serving.rewrite import rewrite_json, rewrite_stream
from marft_agents.serving.swap import Swapper
from marft_agents.serving.upstream import Upstream

_log = logging.getLogger(__name__)
MAX_BODY = 32 * 1024 * 1024
_KEPT_HEADERS = ("content-type", "x-request-id", "cache-control")


@dataclass(frozen=True)
class GatewaySettings:
    """What the gateway tells and asks of its clients.

    ``sampling_defaults`` and ``logprobs_mode`` describe the engine; ``None`` leaves them unsaid.
    """

    operator_key: str
    api_key: str | None = None
    logprobs_mode: str | None = LOGPROBS_MODE
    sampling_defaults: Mapping[str, Any] | None = field(default_factory=lambda: SAMPLING_DEFAULTS)
    max_body: int = MAX_BODY


class Gateway:
    """Routes, alias table and engine connection of one ``serve``, and its ``recording`` if any."""

    def __init__(
        self,
        swapper: Swapper,
        upstream: Upstream,
        settings: GatewaySettings,
        recording: Recording | None = None,
    ) -> None:
        self.swapper = swapper
        self.aliases: Aliases = swapper.aliases
        self.upstream = upstream
        self.settings = settings
        self.recording = recording
        self._restoring: dict[str, asyncio.Task[None]] = {}

    def app(self) -> Starlette:
        """The ASGI application."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncGenerator[None]:
            recording = self.recording.running() if self.recording else contextlib.nullcontext()
            try:
                async with recording:
                    yield
            finally:
                await self.upstream.close()

        routes = [
            HttpRoute(CHAT, self._generate, methods=["POST"]),
            HttpRoute(TEXT, self._generate, methods=["POST"]),
            HttpRoute("/v1/models", self._models, methods=["GET"]),
            HttpRoute("/health", self._health, methods=["GET"]),
            *self._recording_routes(),
            *control_routes(self.swapper, self.settings.operator_key),
        ]
        app = Starlette(routes=routes, exception_handlers=HANDLERS, lifespan=lifespan)
        app.router.redirect_slashes = False
        return app

    def _recording_routes(self) -> Sequence[HttpRoute]:
        key = self.settings.api_key
        if self.recording is None:
            return closed_routes(key)
        return [
            *agent_routes(self._generate, self._models),
            *episode_routes(self.recording, lambda: self.aliases.agents, key),
        ]

    # -- answers ---------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        require_api_key(request, self.settings.api_key)
        base = self.swapper.loader.base.name
        data = [
            {
                "id": route.agent,
                "object": "model",
                "created": 0,
                "owned_by": "marft-agents",
                "root": route.name,
                "parent": base,
            }
            for route in self.aliases.routes()
        ]
        return JSONResponse({"object": "list", "data": data})

    async def _health(self, request: Request) -> Response:
        problem = await self.upstream.problem()
        if problem is None:
            listed = await self.upstream.model_names()
            lost = [route for route in self.aliases.routes() if route.name not in listed]
            for route in lost:
                self._restore_later(route)
            if lost:
                names = ", ".join(route.name for route in lost)
                problem = f"the engine does not list {names}; loading again"
        if problem is not None:
            return JSONResponse({"status": "unavailable", "reason": problem}, 503)
        return JSONResponse({"status": "ok"})

    async def _generate(self, request: Request) -> Response:
        require_api_key(request, self.settings.api_key)
        body = parse_object(await read_limited(request, self.settings.max_body))
        body, watch = watched(self.recording, request, body, self.upstream.url + CHAT)
        try:
            return await self._answer(request, body, watch)
        except Refusal as refusal:
            watch.begin(refusal.status, {})
            watch.feed(bytes(refusal.response().body))
            watch.over()
            refusal.headers |= watch.headers
            raise
        except BaseException as error:
            left = isinstance(error, ClientDisconnect)
            watch.over("the client left before the reply" if left else type(error).__name__)
            raise

    async def _answer(self, request: Request, body: dict[str, Any], watch: Watch) -> Response:
        asked = body.get("model")
        route = self._resolve(asked)
        self.aliases.begin(route)
        handed_over = False
        try:
            sent = json.dumps(watch.outgoing(body) | {"model": route.name}).encode()
            response = await self._send(request, sent, route)
            headers = self._headers(response, route)
            watch.begin(response.status_code, Headers(headers))
            headers |= watch.headers
            try:
                if is_stream(response):
                    handed_over = True
                    return self._relay(response, route, str(asked), headers, watch)
                content = await self.upstream.read(response, request)
            finally:
                if not handed_over:
                    await response.aclose()
            watch.feed(content)
            watch.over()
            content = rewrite_json(content, route.name, str(asked), watch.hidden)
            return Response(content, response.status_code, headers=headers)
        finally:
            if not handed_over:
                self.aliases.end(route)

    # -- inside ----------------------------------------------------------------------------

    def _resolve(self, asked: Any) -> Route:
        known = ", ".join(self.aliases.agents)
        if not isinstance(asked, str) or not asked:
            raise Refusal(400, f"the request names no model; use one of the agents: {known}")
        route = self.aliases.resolve(asked)
        if route is not None:
            return route
        if asked in {"base", self.swapper.loader.base.name}:
            message = (
                f"the base model ({asked!r}) is not served by itself: every agent answers from its"
                f" own adapter; use one of the agents: {known}"
            )
        else:
            message = f"no agent {asked!r} is served here; use one of the agents: {known}"
        raise Refusal(404, message, code="model_not_found")

    async def _send(self, request: Request, body: bytes, route: Route) -> httpx.Response:
        path = TEXT if request.url.path == TEXT else CHAT
        response = await self.upstream.post(path, body, request)
        if response.status_code == 404:
            # An engine that was restarted behind our back knows no adapter any more.
            await response.aclose()
            await self._restore(route)
            response = await self.upstream.post(path, body, request)
        return response

    async def _restore(self, route: Route) -> None:
        try:
            await self.swapper.restore(route)
        except MarftError as error:
            raise Refusal(
                503, f"the engine does not know {route.name} and could not load it again: {error}"
            ) from error

    async def _try_restore(self, route: Route) -> None:
        try:
            await self.swapper.restore(route)
        except MarftError as error:
            _log.warning("could not load %s again: %s", route.name, error)

    def _restore_later(self, route: Route) -> None:
        if route.name not in self._restoring:
            task = asyncio.create_task(self._try_restore(route))
            self._restoring[route.name] = task
            task.add_done_callback(lambda _: self._restoring.pop(route.name, None))

    def _headers(self, response: httpx.Response, route: Route) -> dict[str, str]:
        headers = {k: response.headers[k] for k in _KEPT_HEADERS if k in response.headers}
        headers["X-Marft-Adapter"] = route.name
        if self.settings.logprobs_mode is not None:
            headers["X-Marft-Logprobs-Mode"] = self.settings.logprobs_mode
        if self.settings.sampling_defaults is not None:
            headers["X-Marft-Sampling-Defaults"] = json.dumps(dict(self.settings.sampling_defaults))
        return headers

    def _relay(
        self,
        response: httpx.Response,
        route: Route,
        asked: str,
        headers: dict[str, str],
        watch: Watch,
    ) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                raw = watch.tee(self.upstream.stream(response))
                async for chunk in rewrite_stream(raw, route.name, asked, watch.hidden):
                    yield chunk
            except Refusal as refusal:
                watch.over(refusal.message)
                # The status is out; an error event keeps this from looking like a whole reply.
                yield b"data: " + bytes(refusal.response().body) + b"\n\n"

        async def close() -> None:
            watch.over()
            self.aliases.end(route)
            await response.aclose()

        headers = headers | {"X-Accel-Buffering": "no"}
        return Relay(chunks(), response.status_code, headers, on_close=close)
