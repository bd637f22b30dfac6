"""Episodes, rewards and what people do over HTTP.

Invariant: these routes ask for the same API key as every other, take small JSON objects only, and
refuse a field they do not know instead of ignoring it. They exist with ``--record`` alone; without
it they say so.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, cast, get_args
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as HttpRoute

from marft_agents.recording.reviews import give_edit, reward_event
from marft_agents.schema import EndReason, JsonDict
from marft_agents.serving.access import Access, Client
from marft_agents.serving.bodies import read_limited
from marft_agents.serving.episodes import GatewayEpisode
from marft_agents.serving.identity import checked_agent, checked_episode
from marft_agents.serving.recording import CHAT, Recording
from marft_agents.serving.refusals import Refusal, require_own_origin

Handler = Callable[[Request], Awaitable[Response]]
AGENT_PATHS = ("/episodes/{episode}/agents/{agent}", "/episodes/{episode}", "/agents/{agent}")
_MAX_BODY = 1024 * 1024
_OFF = (
    "this server records nothing, so {path} does not exist; start it with --record DIR, or use"
    " base_url http://.../v1"
)


def agent_routes(generate: Handler, models: Handler) -> list[HttpRoute]:
    """The chat route and the model list below every address that names an agent or an episode."""
    routes: list[HttpRoute] = []
    for prefix in AGENT_PATHS:
        routes.append(HttpRoute(f"{prefix}{CHAT}", generate, methods=["POST"]))
        routes.append(HttpRoute(f"{prefix}/v1/models", models, methods=["GET"]))
    return routes


def closed_routes(access: Access) -> list[HttpRoute]:
    """The same addresses at a server that does not record: a refusal with the cure."""

    async def refuse(request: Request) -> Response:
        access.application(request)
        raise Refusal(404, _OFF.format(path=request.url.path))

    paths = ["/episodes", *(f"{prefix}{{rest:path}}" for prefix in AGENT_PATHS)]
    return [HttpRoute(path, refuse, methods=["GET", "POST"]) for path in paths]


class _Episodes:
    """One handler a route; ``agents``: names that are served."""

    def __init__(
        self, recording: Recording, agents: Callable[[], list[str]], access: Access
    ) -> None:
        self._recording = recording
        self._episodes = recording.episodes
        self._agents = agents
        self._access = access

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("/episodes", self.begin, methods=["POST"]),
            HttpRoute("/episodes/{episode}", self.look, methods=["GET"]),
            HttpRoute("/episodes/{episode}/end", self.end, methods=["POST"]),
            HttpRoute("/episodes/{episode}/rewards", self.reward, methods=["POST"]),
            HttpRoute("/episodes/{episode}/edits", self.edit, methods=["POST"]),
            HttpRoute("/episodes/{episode}/humans", self.human, methods=["POST"]),
        ]

    async def begin(self, request: Request) -> Response:
        client = self._access.application(request)
        require_own_origin(request)
        body = await _fields(request, {"id", "task", "metadata", "agents"})
        wanted = body.get("id")
        metadata = body.get("metadata")
        if wanted is not None and not isinstance(wanted, str):
            raise Refusal(422, "id is a text, or left out")
        if metadata is not None and not isinstance(metadata, dict):
            raise Refusal(422, "metadata is a JSON object, or left out")
        names = _names(body.get("agents"))
        _require_may_ask(client, *names)
        names = names or [name for name in self._agents() if client.may_ask(name)]
        live = self._episodes.begin(
            wanted if wanted is None else checked_episode(wanted),
            body.get("task"),
            cast("JsonDict", metadata or {}),
        )
        return JSONResponse(_addresses(request, live, names), 201)

    async def end(self, request: Request) -> Response:
        self._access.application(request)
        require_own_origin(request)
        name = _episode(request)
        body = await _fields(request, {"reason", "detail"})
        reason, detail = body.get("reason", "terminated"), body.get("detail")
        if reason not in get_args(EndReason):
            raise Refusal(422, f"reason is one of {', '.join(get_args(EndReason))}")
        if detail is not None and not isinstance(detail, str):
            raise Refusal(422, "detail is a text, or left out")
        live = self._episodes.end(name, cast("EndReason", reason), detail)
        await self._recording.written()
        return JSONResponse(_state(live))

    async def reward(self, request: Request) -> Response:
        client = self._access.application(request)
        require_own_origin(request)
        name = _episode(request)
        body = await _fields(request, {"value", "agent", "turn_id", "source"})
        if "value" not in body:
            raise Refusal(422, 'send {"value": <number>}; null means not scored')
        source = body.get("source", "app")
        if not isinstance(source, str) or not source:
            raise Refusal(422, "source is a text, or left out")
        agent, turn_id = body.get("agent"), body.get("turn_id")
        _require_may_ask(client, agent)
        event = reward_event(
            self._recording.core, name, body["value"], agent=agent, turn_id=turn_id, source=source
        )
        self._recording.core.emit(event)
        if event.refused is not None:
            raise Refusal(
                422,
                f"the reward is refused: {event.refused}; send a finite number, a truth value, or"
                " null for not scored, and names as text",
            )
        await self._recording.written()
        live = self._episodes.get(name)
        known = live is not None and (turn_id is None or live.knows(turn_id))
        return JSONResponse({"episode": name, "value": event.value, "known": known})

    async def look(self, request: Request) -> Response:
        self._access.application(request)
        name = _episode(request)
        live = self._episodes.get(name)
        if live is None:
            raise Refusal(404, f"no episode {name!r} has begun at this server")
        return JSONResponse(_state(live))

    async def edit(self, request: Request) -> Response:
        self._access.application(request)
        require_own_origin(request)
        name = _episode(request)
        body = await _fields(request, {"turn_id", "text", "editor"})
        turn_id, text = _text(body, "turn_id"), _text(body, "text")
        editor = _text(body, "editor", optional=True)
        live = self._episodes.get(name)
        if live is None:
            give_edit(self._recording.core, name, turn_id, text, editor)
        else:
            live.edit(turn_id, text, editor)
        await self._recording.written()
        known = live is not None and live.knows(turn_id)
        return JSONResponse({"episode": name, "turn_id": turn_id, "known": known})

    async def human(self, request: Request) -> Response:
        self._access.application(request)
        require_own_origin(request)
        name = _episode(request)
        body = await _fields(request, {"text", "name"})
        text, speaker = _text(body, "text"), _text(body, "name", optional=True)
        live = self._episodes.get(name)
        if live is None:
            raise Refusal(404, f"no episode {name!r} has begun at this server")
        live.human(speaker or None, text)
        await self._recording.written()
        return JSONResponse({"episode": name})


def episode_routes(
    recording: Recording, agents: Callable[[], list[str]], access: Access
) -> list[HttpRoute]:
    """Begin, score, edit, end and look at episodes. ``agents``: names that are served."""
    return _Episodes(recording, agents, access).routes()


def _require_may_ask(client: Client, *agents: Any) -> None:
    """Refuse names of agents that the key is not for."""
    for agent in agents:
        if isinstance(agent, str) and not client.may_ask(agent):
            raise Refusal(
                403,
                f"the key {client.name!r} is not for the agent {agent[:80]!r}",
                code="agent_not_allowed",
            )


def _text(body: JsonDict, name: str, *, optional: bool = False) -> Any:
    """A field that is a text; an optional one may be left out."""
    value = body.get(name)
    if isinstance(value, str) and (value or name == "text"):
        return value
    if optional and value is None:
        return None
    raise Refusal(422, f"{name} is a text" + (", or left out" if optional else ""))


def _episode(request: Request) -> str:
    return checked_episode(str(request.path_params["episode"]))


async def _fields(request: Request, known: set[str]) -> JsonDict:
    """The request's JSON object; an empty body is an empty one."""
    data = await read_limited(request, _MAX_BODY)
    try:
        body: Any = json.loads(data) if data.strip() else {}
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "the request body is no valid JSON") from error
    if not isinstance(body, dict):
        raise Refusal(400, "the request body is no JSON object")
    fields = cast("JsonDict", body)
    if unknown := sorted(fields.keys() - known):
        raise Refusal(
            422, f"unknown field {unknown[0][:40]!r}; the fields are {', '.join(sorted(known))}"
        )
    return fields


def _names(value: Any) -> list[str]:
    if value is None:
        return []
    listed = cast("list[Any]", value) if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in listed):
        raise Refusal(422, "agents is a list of names, or left out")
    return [checked_agent(name) for name in listed]


def _addresses(request: Request, live: GatewayEpisode, agents: list[str]) -> JsonDict:
    root = str(request.base_url).rstrip("/")
    return {
        "id": live.id,
        "base_url": f"{root}/episodes/{live.id}/v1",
        "base_urls": {
            agent: f"{root}/episodes/{live.id}/agents/{quote(agent, safe='')}/v1"
            for agent in agents
        },
    }


def _state(live: GatewayEpisode) -> JsonDict:
    reason, detail = live.ended or (None, None)
    return {
        "id": live.id,
        "ended": reason,
        "detail": detail,
        "calls_under_way": live.in_flight,
        **live.newest(),
    }
