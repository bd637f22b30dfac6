"""Whether this server works, whether it can answer, and what it measures.

Invariant: no probe asks an engine anything. ``/health`` says that this process answers: it is for
whoever would restart it, which mends no engine (the supervisor does that), so it is 200 while
engines are down. ``/ready`` says whether a request would be answered: a replica takes traffic,
which means that it was seen alive and has every agent's current version loaded and probed, but for
versions that are lost on disk: as long as another agent is answered, that is told and is no reason
to send all of them nothing. Reasons,
replicas and versions are told to this machine and to keys of operators and monitors only.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as HttpRoute

from marft_agents.serving.access import Access
from marft_agents.serving.aliases import Aliases
from marft_agents.serving.fleet import Fleet
from marft_agents.serving.metrics import CONTENT_TYPE, Metrics
from marft_agents.serving.refusals import Refusal, is_loopback

_RETRY_S = "2"
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
"""What a proxy adds: behind one on this machine, everybody seems to be here."""


def is_here(request: Request) -> bool:
    """Whether somebody on this machine asks, and not a proxy for somebody else."""
    peer = request.client.host if request.client is not None else ""
    return is_loopback(peer) and not any(name in request.headers for name in _FORWARDED)


def problems(fleet: Fleet, aliases: Aliases) -> list[str]:
    """Why a request would not be answered; empty when it would."""
    if fleet.stopping:
        return ["this server is being stopped"]
    kept, lost = aliases.kept(), lost_agents(aliases)
    if len(lost) < len(aliases.agents):  # the others are answered
        kept |= {route: "lost" for route in aliases.routes() if route.agent in lost}
    found = [f"{route.name} is not loaded" for route in aliases.routes() if route not in kept]
    status = fleet.status()
    if not any(told.state == "ready" for told in status):
        found += [f"{told.name} is {told.state}: {told.reason}" for told in status]
    return found


def lost_agents(aliases: Aliases) -> dict[str, str]:
    """Agents that are not answered since the version in use is lost on disk, and why."""
    told = {agent: aliases.lost(agent) for agent in aliases.agents}
    return {agent: why for agent, why in told.items() if why is not None}


class _Monitoring:
    """One handler a route."""

    def __init__(self, fleet: Fleet, aliases: Aliases, access: Access, metrics: Metrics) -> None:
        self._fleet = fleet
        self._aliases = aliases
        self._access = access
        self._metrics = metrics
        self._began = time.monotonic()

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("/health", self.health, methods=["GET"]),
            HttpRoute("/ready", self.ready, methods=["GET"]),
            HttpRoute("/metrics", self.measured, methods=["GET"]),
        ]

    def _may_know(self, request: Request) -> bool:
        if is_here(request):
            return True
        try:
            return self._access.monitor(request).role != "application"
        except Refusal:
            return False

    async def health(self, request: Request) -> Response:
        told: dict[str, Any] = {"status": "ok"}
        if self._may_know(request):
            told |= {
                "version": version("marft-agents"),
                "uptime_s": round(time.monotonic() - self._began),
            }
        return JSONResponse(told)

    async def ready(self, request: Request) -> Response:
        found = problems(self._fleet, self._aliases)
        lost = lost_agents(self._aliases)
        status = "unavailable" if found else "degraded" if lost else "ok"
        told: dict[str, Any] = {"status": status}
        if self._may_know(request):
            told |= {"reason": "; ".join(found)} if found else {}
            told |= {"lost": lost} if lost else {}
            told["replicas"] = {
                s.name: {"state": s.state, "reason": s.reason} for s in self._fleet.status()
            }
            told["current"] = {route.agent: route.version for route in self._aliases.routes()}
        headers = {"Retry-After": _RETRY_S} if found else {}
        return JSONResponse(told, 503 if found else 200, headers)

    async def measured(self, request: Request) -> Response:
        if not self._may_know(request):
            self._access.monitor(request)
            raise Refusal(403, "metrics are for this machine, and for keys of role monitor")
        return Response(await self._metrics.page(), headers={"content-type": CONTENT_TYPE})


def monitoring_routes(
    fleet: Fleet, aliases: Aliases, access: Access, metrics: Metrics
) -> list[HttpRoute]:
    """``GET /health``, ``GET /ready`` and ``GET /metrics``."""
    return _Monitoring(fleet, aliases, access, metrics).routes()
