"""The operator's routes: what serves, and swap.

Invariant: they answer to this machine only, and only to whoever can read the operator key.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as HttpRoute

from marft_agents.errors import ConfigError
from marft_agents.registry import Change
from marft_agents.serving.access import Access
from marft_agents.serving.bodies import read_limited
from marft_agents.serving.loader import StepError
from marft_agents.serving.refusals import Refusal
from marft_agents.serving.swap import Swapper

KEY_FILE = ".operator-key"
_MAX_BODY = 64 * 1024
_MAX_NAME = 128


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


def _swap_arguments(data: bytes) -> tuple[str, int, Change]:
    try:
        body: Any = json.loads(data)
    except ValueError:
        body = None
    fields = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
    agent, version = fields.get("agent"), fields.get("version")
    if not isinstance(agent, str) or not isinstance(version, int) or isinstance(version, bool):
        raise Refusal(400, 'send {"agent": "<name>", "version": <number>}')
    command, evidence = fields.get("command"), fields.get("evidence")
    change = Change(
        by=str(fields.get("by", "serve"))[:_MAX_NAME],
        command=None if command is None else str(command)[:_MAX_NAME],
        action="rollback" if fields.get("action") == "rollback" else "promote",
        evidence=cast("dict[str, Any]", evidence) if isinstance(evidence, dict) else {},
        force=fields.get("force") is True,
    )
    return agent, version, change


def control_routes(swapper: Swapper, access: Access) -> list[HttpRoute]:
    """``GET /marft/state`` and ``POST /marft/swap``."""

    async def state(request: Request) -> Response:
        access.operator(request)
        aliases, fleet = swapper.aliases, swapper.fleet
        agents = {
            route.agent: {"current": route.version, "served": aliases.served(route.agent)}
            for route in aliases.routes()
        }
        return JSONResponse(
            {
                "base": fleet.base.model_dump(mode="json"),
                "agents": agents,
                "max_lora_rank": fleet.limits.max_lora_rank,
                "max_loras": fleet.limits.max_loras,
                "target_modules": list(fleet.limits.target_modules),
            }
        )

    async def swap(request: Request) -> Response:
        access.operator(request)
        agent, version, change = _swap_arguments(await read_limited(request, _MAX_BODY))
        try:
            return JSONResponse(await swapper.swap(agent, version, change))
        except StepError as error:
            raise Refusal(409 if error.refused else 502, str(error)) from error
        except ConfigError as error:
            raise Refusal(409, str(error)) from error

    return [
        HttpRoute("/marft/state", state, methods=["GET"]),
        HttpRoute("/marft/swap", swap, methods=["POST"]),
    ]
