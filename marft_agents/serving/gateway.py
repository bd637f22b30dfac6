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

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as HttpRoute

from marft_agents.errors import MarftError
from marft_agents.serving.access import Access, Client
from marft_agents.serving.admission import Admission
from marft_agents.serving.aliases import Aliases, Route
from marft_agents.serving.answers import HANDLERS, Relay, is_stream, parse_object
from marft_agents.serving.commands import LOGPROBS_MODE, SAMPLING_DEFAULTS
from marft_agents.serving.control import control_routes
from marft_agents.serving.episode_routes import agent_routes, closed_routes, episode_routes
from marft_agents.serving.fields import Fields
from marft_agents.serving.fleet import Fleet
from marft_agents.serving.identity import episode_of
from marft_agents.serving.passage import Observer, Passage
from marft_agents.serving.recording import CHAT, TEXT, Recording, Watch, watched
from marft_agents.serving.refusals import Refusal, read_limited
from marft_agents.serving.replica import Replica
from marft_agents.serving.rewrite import rewrite_json, rewrite_stream
from marft_agents.serving.swap import Swapper
from marft_agents.serving.upstream import Answer
from marft_agents.serving.usage import StreamUsage, own_usage

_log = logging.getLogger(__name__)
MAX_BODY = 32 * 1024 * 1024
_KEPT_HEADERS = ("content-type", "x-request-id", "cache-control")


@dataclass(frozen=True)
class GatewaySettings:
    """What the gateway tells and asks of its clients.

    ``sampling_defaults`` and ``logprobs_mode`` describe the engine; ``None`` leaves them unsaid.
    """

    access: Access
    logprobs_mode: str | None = LOGPROBS_MODE
    sampling_defaults: Mapping[str, Any] | None = field(default_factory=lambda: SAMPLING_DEFAULTS)
    max_body: int = MAX_BODY
    fields: Fields = field(default_factory=Fields)
    admission: Admission = field(default_factory=Admission)


class Gateway:
    """Routes, alias table and engines of one ``serve``, and its ``recording`` if any.

    ``observers`` learn how every request to an engine ended.
    """

    def __init__(
        self,
        swapper: Swapper,
        settings: GatewaySettings,
        recording: Recording | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.swapper = swapper
        self.fleet: Fleet = swapper.fleet
        self.aliases: Aliases = swapper.aliases
        self.settings = settings
        self.access = settings.access
        self.recording = recording
        self.observers = list(observers)
        self._restoring: dict[tuple[str, str], asyncio.Task[None]] = {}

    def app(self) -> Starlette:
        """The ASGI application."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncGenerator[None]:
            recording = self.recording.running() if self.recording else contextlib.nullcontext()
            try:
                async with recording:
                    yield
            finally:
                await self.fleet.close()

        routes = [
            HttpRoute(CHAT, self._generate, methods=["POST"]),
            HttpRoute(TEXT, self._generate, methods=["POST"]),
            HttpRoute("/v1/models", self._models, methods=["GET"]),
            HttpRoute("/health", self._health, methods=["GET"]),
            *self._recording_routes(),
            *control_routes(self.swapper, self.access),
        ]
        app = Starlette(routes=routes, exception_handlers=HANDLERS, lifespan=lifespan)
        app.router.redirect_slashes = False
        return app

    def _recording_routes(self) -> Sequence[HttpRoute]:
        if self.recording is None:
            return closed_routes(self.access)
        return [
            *agent_routes(self._generate, self._models),
            *episode_routes(self.recording, lambda: self.aliases.agents, self.access),
        ]

    # -- answers ---------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        self.access.application(request)
        base = self.fleet.base.name
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
        problems = [p for replica in self.fleet.replicas if (p := await self._problem(replica))]
        if problems:
            reason = "; ".join(problems)
            return JSONResponse({"status": "unavailable", "reason": reason}, 503)
        return JSONResponse({"status": "ok"})

    async def _problem(self, replica: Replica) -> str | None:
        problem = await replica.upstream.problem()
        if problem is not None:
            return problem
        listed = await replica.upstream.model_names()
        lost = [route for route in self.aliases.routes() if route.name not in listed]
        for route in lost:
            self._restore_later(route, replica)
        if lost:
            names = ", ".join(route.name for route in lost)
            return f"the engine does not list {names}; loading again"
        return None

    async def _generate(self, request: Request) -> Response:
        client = self.access.application(request)
        body = parse_object(await read_limited(request, self.settings.max_body))
        path = TEXT if request.url.path == TEXT else CHAT
        body, dropped = self.settings.fields.checked(path, body)
        asked_at = self.fleet.replicas[0].upstream.url + CHAT
        body, watch = watched(self.recording, request, body, asked_at)
        if dropped:
            watch.headers["X-Marft-Dropped-Fields"] = ",".join(dropped)
        try:
            return await self._answer(request, client, path, body, watch)
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

    async def _answer(
        self, request: Request, client: Client, path: str, body: dict[str, Any], watch: Watch
    ) -> Response:
        asked, episode = body.get("model"), episode_of(request)
        route = self._resolve(asked, episode)
        replica = self.fleet.choose(episode)
        passage = Passage(
            aliases=self.aliases,
            route=route,
            replica=replica,
            ticket=self.settings.admission.enter(client),
            client=client,
            episode=episode,
            request_id=request.headers.get("x-request-id"),
            observers=self.observers,
        )
        handed_over = False
        try:
            own = own_usage(body)
            sent = json.dumps(watch.outgoing(body) | {"model": route.name} | own).encode()
            response = await self._send(request, path, sent, passage)
            passage.status = response.status_code
            headers = self._headers(response, route)
            watch.begin(response.status_code, Headers(headers))
            headers |= watch.headers
            try:
                if is_stream(response):
                    handed_over = passage.streamed = True
                    usage = StreamUsage(passage.counted, ours=bool(own))
                    return self._relay(response, passage, str(asked), headers, watch, usage)
                content = await replica.upstream.read(response, request)
            finally:
                if not handed_over:
                    await response.aclose()
            passage.saw(content)
            watch.feed(content)
            watch.over()
            content = rewrite_json(content, route.name, str(asked), watch.hidden, passage.counted)
            return Response(content, response.status_code, headers=headers)
        except Refusal as refusal:
            passage.status, passage.problem = refusal.status, refusal.message
            raise
        except ClientDisconnect:
            passage.left = True
            raise
        finally:
            if not handed_over:
                passage.end()

    # -- inside ----------------------------------------------------------------------------

    def _resolve(self, asked: Any, episode: str | None) -> Route:
        known = ", ".join(self.aliases.agents)
        if not isinstance(asked, str) or not asked:
            raise Refusal(400, f"the request names no model; use one of the agents: {known}")
        route = self.aliases.resolve(asked, episode)
        if route is not None:
            return route
        if asked in {"base", self.fleet.base.name}:
            message = (
                f"the base model ({asked!r}) is not served by itself: every agent answers from its"
                f" own adapter; use one of the agents: {known}"
            )
        else:
            message = f"no agent {asked!r} is served here; use one of the agents: {known}"
        raise Refusal(404, message, code="model_not_found")

    async def _send(self, request: Request, path: str, body: bytes, passage: Passage) -> Answer:
        upstream = passage.replica.upstream
        response = await upstream.post(path, body, request)
        if response.status_code == 404:
            # An engine that was restarted behind our back knows no adapter any more.
            await response.aclose()
            await self._restore(passage.route, passage.replica)
            response = await upstream.post(path, body, request)
        return response

    async def _restore(self, route: Route, replica: Replica) -> None:
        try:
            await self.swapper.restore(route, replica)
        except MarftError as error:
            raise Refusal(
                503, f"the engine does not know {route.name} and could not load it again: {error}"
            ) from error

    async def _try_restore(self, route: Route, replica: Replica) -> None:
        try:
            await self.swapper.restore(route, replica)
        except MarftError as error:
            _log.warning("could not load %s again: %s", route.name, error)

    def _restore_later(self, route: Route, replica: Replica) -> None:
        key = replica.name, route.name
        if key not in self._restoring:
            task = asyncio.create_task(self._try_restore(route, replica))
            self._restoring[key] = task
            task.add_done_callback(lambda _: self._restoring.pop(key, None))

    def _headers(self, response: Answer, route: Route) -> dict[str, str]:
        headers = {k: response.headers[k] for k in _KEPT_HEADERS if k in response.headers}
        headers["X-Marft-Adapter"] = route.name
        if self.settings.logprobs_mode is not None:
            headers["X-Marft-Logprobs-Mode"] = self.settings.logprobs_mode
        if self.settings.sampling_defaults is not None:
            headers["X-Marft-Sampling-Defaults"] = json.dumps(dict(self.settings.sampling_defaults))
        return headers

    def _relay(
        self,
        response: Answer,
        passage: Passage,
        asked: str,
        headers: dict[str, str],
        watch: Watch,
        usage: StreamUsage,
    ) -> Response:
        passage.left = True  # until the last chunk went out

        async def seen() -> AsyncIterator[bytes]:
            async for chunk in passage.replica.upstream.stream(response):
                passage.saw(chunk)
                yield chunk

        async def chunks() -> AsyncIterator[bytes]:
            try:
                raw = watch.tee(seen())
                name = passage.route.name
                async for chunk in rewrite_stream(raw, name, asked, watch.hidden, usage):
                    yield chunk
                passage.left = False
            except Refusal as refusal:
                passage.problem, passage.left = refusal.message, False
                watch.over(refusal.message)
                # The status is out; an error event keeps this from looking like a whole reply.
                yield b"data: " + bytes(refusal.response().body) + b"\n\n"

        async def close() -> None:
            watch.over()
            passage.end()
            await response.aclose()

        headers = headers | {"X-Accel-Buffering": "no"}
        return Relay(chunks(), response.status_code, headers, on_close=close)
