"""The operator's routes: what serves, swaps, canaries, and episodes that have ended.

Invariant: they answer to this machine only, and only to whoever can read the operator key.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as HttpRoute

from marft_agents.errors import AdapterError, ConfigError, RegistryError
from marft_agents.registry import Bounds, Change
from marft_agents.registry.canary import Then
from marft_agents.serving.access import Access
from marft_agents.serving.bodies import read_limited
from marft_agents.serving.canary_swap import Canaries
from marft_agents.serving.loader import NoRoomError, StepError
from marft_agents.serving.refusals import Refusal
from marft_agents.serving.swap_events import asked_by

KEY_FILE = ".operator-key"
_MAX_BODY = 1024 * 1024
_MAX_NAME = 128
_MAX_EPISODES = 10_000
_Body = TypeVar("_Body", bound=BaseModel)


def ensure_operator_key(adapters: Path) -> str:
    """The key in ``adapters/.operator-key``, made anew unless it is there and private.

    Raises:
        ConfigError: when it cannot be written.
    """
    path = adapters / KEY_FILE
    try:
        if path.is_file() and path.stat().st_mode & 0o077 == 0:
            key = path.read_text(encoding="ascii").strip()
            if len(key) >= 32:
                return key
        adapters.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        key = secrets.token_urlsafe(32)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(key + "\n")
        return key
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot keep the operator key in {path}: {error}") from error


def read_operator_key(adapters: Path) -> str:
    """The key that a running server made.

    Raises:
        ConfigError: when there is none, or it is not readable by this user.
    """
    path = adapters / KEY_FILE
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the operator key {path} ({error}); name the folder that the server was"
            " started with (--adapters)"
        ) from error


class _Asked(BaseModel):
    """Who asks for a change of an agent, and why."""

    model_config = ConfigDict(extra="forbid", strict=True)

    agent: Annotated[str, Field(max_length=_MAX_NAME)]
    by: Annotated[str, Field(max_length=_MAX_NAME)] = "serve"
    command: Annotated[str, Field(max_length=_MAX_NAME)] | None = None
    action: Literal["promote", "rollback"] = "promote"
    evidence: dict[str, Any] = {}
    force: bool = False

    def change(self) -> Change:
        return Change(self.by, self.command, self.action, self.evidence, self.force)


class _Swap(_Asked):
    version: int
    now: bool = False
    watch: Bounds | None = None
    wait: bool = True
    """For the old version to be unloaded."""


class _Prepare(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    agent: Annotated[str, Field(max_length=_MAX_NAME)]
    version: int


class _Canary(_Asked):
    version: int
    share: float
    then: Then = "tell"
    bounds: Bounds = Bounds()


class _Stop(_Asked):
    now: bool = False


class _Release(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    episodes: Annotated[list[str], Field(max_length=_MAX_EPISODES)]


async def _body(request: Request, kind: type[_Body], example: str) -> _Body:
    """The request's body.

    Raises:
        Refusal: 400, saying what is wrong with it.
    """
    data = await read_limited(request, _MAX_BODY)
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise Refusal(400, f"{where}: {first['msg']}; send {example}") from error


@contextlib.contextmanager
def _refusals() -> Generator[None]:
    """What an operator asked for and cannot be done, as answers."""
    try:
        yield
    except StepError as error:
        at_engine = not error.refused and error.step != "check"
        raise Refusal(502 if at_engine else 409, str(error)) from error
    except (ConfigError, RegistryError, AdapterError) as error:
        raise Refusal(409, str(error)) from error
    except (ValidationError, OSError) as error:
        raise Refusal(502, f"nothing was changed: {error}") from error


def _agents(canaries: Canaries) -> dict[str, Any]:
    """What serves for each agent, and why each loaded version is kept."""
    aliases = canaries.aliases
    kept = aliases.kept()
    return {
        current.agent: {
            "current": current.version,
            "served": aliases.served(current.agent),
            "kept": {r.name: why for r, why in kept.items() if r.agent == current.agent},
            "leases": {
                r.name: n for r in kept if r.agent == current.agent and (n := aliases.leased(r))
            },
            **canaries.swapper.preparations.told(current.agent),
            **canaries.told(current.agent),
            **({"lost": why} if (why := aliases.lost(current.agent)) is not None else {}),
        }
        for current in aliases.routes()
    }


class _Control:
    """One handler a route."""

    def __init__(self, canaries: Canaries, access: Access) -> None:
        self._canaries = canaries
        self._access = access

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("/marft/state", self.state, methods=["GET"]),
            HttpRoute("/marft/swap", self.swap, methods=["POST"]),
            HttpRoute("/marft/prepare", self.prepare, methods=["POST"]),
            HttpRoute("/marft/canary", self.start, methods=["POST"]),
            HttpRoute("/marft/canary/stop", self.stop, methods=["POST"]),
            HttpRoute("/marft/release", self.release, methods=["POST"]),
        ]

    async def state(self, request: Request) -> Response:
        self._access.operator(request)
        fleet = self._canaries.swapper.fleet
        return JSONResponse(
            {
                "base": fleet.base.model_dump(mode="json"),
                "agents": _agents(self._canaries),
                "max_lora_rank": fleet.limits.max_lora_rank,
                "max_loras": fleet.limits.max_loras,
                "target_modules": list(fleet.limits.target_modules),
            }
        )

    async def swap(self, request: Request) -> Response:
        asked_by.set(self._access.operator(request).name)
        told = await _body(request, _Swap, '{"agent": "<name>", "version": <number>}')
        with _refusals():
            done = await self._canaries.swap(
                told.agent,
                told.version,
                told.change(),
                now=told.now,
                watch=told.watch,
                wait=told.wait,
            )
        return JSONResponse(done)

    async def prepare(self, request: Request) -> Response:
        asked_by.set(self._access.operator(request).name)
        told = await _body(request, _Prepare, '{"agent": "<name>", "version": <number>}')
        with _refusals():
            try:
                done = await self._canaries.swapper.preparations.prepare(told.agent, told.version)
            except NoRoomError as error:
                raise Refusal(507, str(error)) from error
        return JSONResponse(done)

    async def start(self, request: Request) -> Response:
        self._access.operator(request)
        example = '{"agent": "<name>", "version": <number>, "share": <0 to 1>}'
        told = await _body(request, _Canary, example)
        if not 0 < told.share < 1:
            raise Refusal(400, f"share: {told.share} is not between 0 and 1; send {example}")
        with _refusals():
            done = await self._canaries.start(
                told.agent,
                told.version,
                told.share,
                bounds=told.bounds,
                then=told.then,
                change=told.change(),
            )
        return JSONResponse(done)

    async def stop(self, request: Request) -> Response:
        self._access.operator(request)
        told = await _body(request, _Stop, '{"agent": "<name>"}')
        with _refusals():
            return JSONResponse(await self._canaries.stop(told.agent, told.change(), now=told.now))

    async def release(self, request: Request) -> Response:
        self._access.operator(request)
        told = await _body(request, _Release, '{"episodes": ["<id>"]}')
        return JSONResponse({"released": self._canaries.aliases.release(told.episodes)})


def control_routes(canaries: Canaries, access: Access) -> list[HttpRoute]:
    """``GET /marft/state``; ``POST`` of ``/marft/swap``, ``prepare``, ``canary``, ``canary/stop``
    and ``release``.

    All may be said again: what holds already is not changed.
    """
    return _Control(canaries, access).routes()
