"""The one address that applications see.

Invariant: only the routes below answer. A request reaches the engine under the name of one probed
adapter version or not at all; the bare base is never a substitute. What the engine answers passes
unchanged, but for the model name that was asked for. Recording a call changes nothing of that.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as HttpRoute
from starlette.types import ASGIApp

from marft_agents.errors import ConfigError
from marft_agents.schema import adapter_slug, parse_served_name
from marft_agents.serving.access import Access, Client
from marft_agents.serving.admission import Admission, Ticket
from marft_agents.serving.aliases import Aliases, Route
from marft_agents.serving.answers import HANDLERS, Direct, Relay, is_stream
from marft_agents.serving.bodies import read_limited, read_object
from marft_agents.serving.borders import Borders
from marft_agents.serving.canary_swap import Canaries
from marft_agents.serving.commands import LOGPROBS_MODE, SAMPLING_DEFAULTS
from marft_agents.serving.control import control_routes
from marft_agents.serving.dispatch import Dispatch
from marft_agents.serving.episode_routes import agent_routes, closed_routes, episode_routes
from marft_agents.serving.fields import Fields
from marft_agents.serving.fleet import RETRY_AFTER_S, Fleet, unready
from marft_agents.serving.health import monitoring_routes
from marft_agents.serving.identity import caller_of, episode_of
from marft_agents.serving.large import LARGE
from marft_agents.serving.logs import log_swap, log_visit
from marft_agents.serving.masking import masked_body
from marft_agents.serving.metrics import Metrics
from marft_agents.serving.metrics_state import State
from marft_agents.serving.other_routes import other_routes
from marft_agents.serving.passage import Observer, Passage
from marft_agents.serving.recording import CHAT, TEXT, Recording, Watch, watched
from marft_agents.serving.refusals import Refusal
from marft_agents.serving.rewrite import StreamRewriter, rewrite_json, written
from marft_agents.serving.supervisor import Supervisor
from marft_agents.serving.swap import Swapper
from marft_agents.serving.translation import Translation
from marft_agents.serving.upstream import WhileThere
from marft_agents.serving.usage import StreamUsage, own_usage
from marft_agents.serving.visits import Visits
from marft_agents.serving.wire import Answer

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
    loopback: bool = True
    """Whether the server listens on loopback alone; then it answers to the names of that only."""
    allowed_hosts: tuple[str, ...] = ()

    def announced(self) -> dict[str, str]:
        """Headers of every answer of an engine."""
        out: dict[str, str] = {}
        if self.logprobs_mode is not None:
            out["X-Marft-Logprobs-Mode"] = self.logprobs_mode
        if self.sampling_defaults is not None:
            out["X-Marft-Sampling-Defaults"] = json.dumps(dict(self.sampling_defaults))
        return out


class Gateway:
    """Routes, alias table and engines of one ``serve``, and its ``recording`` if any.

    ``observers`` learn how every request to an engine ended; so does the ``supervisor``, which
    looks after the engines while the application runs.
    """

    def __init__(
        self,
        swapper: Swapper,
        settings: GatewaySettings,
        recording: Recording | None = None,
        observers: Sequence[Observer] = (),
        supervisor: Supervisor | None = None,
    ) -> None:
        self.swapper = swapper
        self.fleet: Fleet = swapper.fleet
        self.aliases: Aliases = swapper.aliases
        self.settings = settings
        self.access = settings.access
        self.recording = recording
        self._announced = settings.announced()
        self.supervisor = supervisor
        self._engines = Dispatch(self.fleet, swapper.keeper, supervisor)
        self.canaries = Canaries(swapper)
        self.observers = [
            self.canaries.observe,
            *observers,
            *([supervisor.observe] if supervisor else []),
        ]
        if recording is not None:
            recording.episodes.on_end = lambda episode: self.aliases.release([episode])
        sink = recording.core.sink if recording else None
        verdicts = self.canaries.verdicts
        silences = supervisor.silences if supervisor else dict[tuple[str, str], int]
        self.metrics = Metrics(
            State(self.fleet, self.aliases, settings.admission, sink, verdicts, silences)
        )
        self.visits = Visits([self.metrics.visit, log_visit])
        self.observers += [self.metrics.outcome, self.visits.outcome]
        swapper.observers += [self.metrics.swap, log_swap]

    def app(self) -> ASGIApp:
        """The ASGI application."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncGenerator[None]:
            recording = self.recording.running() if self.recording else contextlib.nullcontext()
            watch = self.supervisor.running() if self.supervisor else contextlib.nullcontext()
            try:
                async with recording, watch, self.canaries.running():
                    yield
            finally:
                await self.fleet.close()

        routes = [
            HttpRoute(CHAT, self._generate, methods=["POST"]),
            HttpRoute(TEXT, self._generate, methods=["POST"]),
            *other_routes(self._serve),
            HttpRoute("/v1/models", self._models, methods=["GET"]),
            *monitoring_routes(self.fleet, self.aliases, self.access, self.metrics),
            *self._recording_routes(),
            *control_routes(self.canaries, self.access),
        ]
        app = Starlette(routes=routes, exception_handlers=HANDLERS, lifespan=lifespan)
        app.router.redirect_slashes = False
        direct = Direct(app, {("POST", path): self._generate for path in (CHAT, TEXT)})
        settings = self.settings
        return self.visits.around(
            Borders(direct, loopback=settings.loopback, names=settings.allowed_hosts)
        )

    def _recording_routes(self) -> Sequence[HttpRoute]:
        if self.recording is None:
            return closed_routes(self.access)
        return [
            *agent_routes(self._generate, self._models),
            *episode_routes(self.recording, lambda: self.aliases.agents, self.access),
        ]

    # -- answers ---------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        client = self.access.application(request)
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
            if client.may_ask(route.agent)
        ]
        return JSONResponse({"object": "list", "data": data})

    async def _generate(self, request: Request) -> Response:
        return await self._serve(request, TEXT if request.scope["path"] == TEXT else CHAT)

    async def _serve(self, request: Request, path: str) -> Response:
        """Answer from the engine's ``path``."""
        ticket = self.settings.admission.arrive(self.access.application(request))
        try:
            return await self._admitted(request, path, ticket)
        except BaseException:
            ticket.leave()
            raise

    async def _admitted(self, request: Request, path: str, ticket: Ticket) -> Response:
        data = await read_limited(request, self.settings.max_body, ticket.spend)
        body, dropped = self.settings.fields.checked(path, await read_object(data))
        if path in (CHAT, TEXT):
            self._require_may_speak(request, body, ticket.client)
            asked_at = self.fleet.replicas[0].upstream.url + CHAT
            body, watch = watched(self.recording, request, body, asked_at)
        else:
            watch = Watch()
        if dropped:
            watch.headers["X-Marft-Dropped-Fields"] = ",".join(dropped)
        try:
            large = len(data) > LARGE
            return await self._answer(request, ticket, path, body, watch, large=large)
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
        self,
        request: Request,
        ticket: Ticket,
        path: str,
        body: dict[str, Any],
        watch: Watch,
        *,
        large: bool,
    ) -> Response:
        asked, episode = body.get("model"), episode_of(request)
        if not ticket.enter_at_once():
            async with WhileThere(request.receive):
                await ticket.enter()
        route = self._resolve(asked, episode, ticket.client)
        replica = self.fleet.choose(episode)
        passage = Passage(
            aliases=self.aliases,
            route=route,
            replica=replica,
            ticket=ticket,
            client=ticket.client,
            episode=episode,
            request_id=request.headers.get("x-request-id"),
            observers=self.observers if path in (CHAT, TEXT) else (),
        )
        with _accounted(passage):
            return await self._passed_on(request, path, body, watch, passage, large=large)

    async def _passed_on(
        self,
        request: Request,
        path: str,
        body: dict[str, Any],
        watch: Watch,
        passage: Passage,
        *,
        large: bool,
    ) -> Response:
        """The engine's answer, as the client is to see it."""
        own = own_usage(body)
        asking = watch.outgoing(body) | {"model": passage.route.name} | own
        sent = await written(asking, large=large)
        answer = await self._engines.send(request, path, sent, passage)
        passage.status = answer.status_code
        upstream, names = passage.replica.upstream, (passage.route.name, str(body.get("model")))
        try:
            headers = self._headers(answer, passage.route)
            watch.begin(answer.status_code, Headers(headers))
            headers |= watch.headers
            if is_stream(answer):
                headers["X-Accel-Buffering"] = "no"
                usage = StreamUsage(passage.counted, ours=bool(own))
                rewriter = StreamRewriter(*names, watch.hidden, usage, upstream.masked)
                translation = Translation(passage, watch, rewriter, upstream.refusal)
                passage.streamed = True  # from here on the relay closes and ends everything
                return Relay(answer, translation, headers)
            content = await upstream.read(answer, request)
        finally:
            if not passage.streamed:
                answer.close()
        passage.saw(content)
        watch.feed(content)
        watch.over()
        content = rewrite_json(content, *names, watch.hidden, passage.counted)
        if answer.status_code >= 400:
            content = masked_body(content, upstream.masked)
        return Response(content, answer.status_code, headers=headers)

    # -- inside ----------------------------------------------------------------------------

    def _require_may_speak(self, request: Request, body: dict[str, Any], client: Client) -> None:
        """Refuse what the key is not for, before it begins an episode or a turn.

        That is to speak as an agent, which would be recorded as its turn, or to ask one.
        """
        if client.agents is None:
            return
        every = self.recording is not None and self.recording.all
        agent = caller_of(request, record_all=every).named(body.get("model")).agent
        for name in (agent, body.get("model")):
            if isinstance(name, str) and name and not client.may_ask(name):
                raise _not_for(client, name)

    def _resolve(self, asked: Any, episode: str | None, client: Client) -> Route:
        named = isinstance(asked, str) and asked != ""
        if named and not client.may_ask(asked):
            raise _not_for(client, asked)
        route = self.aliases.resolve(asked, episode) if named else None
        if route is not None:
            return route
        lost = [r for r in self.aliases.routes() if named and r.agent == _agent_of(asked)]
        if lost and self.aliases.lost(lost[0].agent) is not None:
            raise unready(
                f"{lost[0].name}, which is in use, is lost or damaged on the server's disk; whoever"
                " runs it can let another version answer: marft-agents adapters rollback"
                f" {lost[0].agent} --server URL, or adapters promote {lost[0].agent} N --server URL"
            )
        known = ", ".join(agent for agent in self.aliases.agents if client.may_ask(agent))
        if not named:
            raise Refusal(400, f"the request names no model; use one of the agents: {known}")
        if asked in {"base", self.fleet.base.name}:
            message = (
                f"the base model ({asked!r}) is not served by itself: every agent answers from its"
                f" own adapter; use one of the agents: {known}"
            )
        else:
            message = f"no agent {asked!r} is served here; use one of the agents: {known}"
        raise Refusal(404, message, code="model_not_found")

    def _headers(self, response: Answer, route: Route) -> dict[str, str]:
        headers = {k: response.headers[k] for k in _KEPT_HEADERS if k in response.headers}
        return headers | {"X-Marft-Adapter": route.name} | self._announced


@contextlib.contextmanager
def _accounted(passage: Passage) -> Generator[None]:
    """Notes what becomes of a passage, and ends it, but for a stream: its relay does that."""
    try:
        yield
    except Refusal as refusal:
        passage.status, passage.problem = refusal.status, refusal.message
        if refusal.status == 503:
            refusal.headers.setdefault("Retry-After", RETRY_AFTER_S)
        raise
    except ClientDisconnect:
        passage.left = True
        raise
    except Exception:
        passage.status = 500  # a mistake of our own is no good reply
        raise
    finally:
        if not passage.streamed:
            passage.end()


def _agent_of(model: Any) -> str | None:
    with contextlib.suppress(ConfigError):
        return (parse_served_name(str(model)) or (adapter_slug(str(model)), 0))[0]
    return None


def _not_for(client: Client, agent: str) -> Refusal:
    return Refusal(
        403,
        f"the key {client.name!r} is not for the agent {agent[:80]!r}",
        code="agent_not_allowed",
    )
