"""What ``serve`` is told, and what it settles before an engine starts.

Invariant: settings, base model, registry and every current version were checked against each other
when a plan exists; only the engine itself can still fail.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from marft_agents.errors import ConfigError
from marft_agents.registry import (
    ALLOWED_MAX_RANKS,
    DEFAULT_RANK,
    DEFAULT_TARGET_MODULES,
    Change,
    Registry,
    describe_base,
    locks,
    resolve_model_dir,
    write_untrained_adapter,
)
from marft_agents.schema import BaseModelInfo, adapter_slugs
from marft_agents.serving.aliases import Route
from marft_agents.serving.commands import EngineKind, lora_slots
from marft_agents.serving.loader import Limits, check_version
from marft_agents.serving.probe import TOLERANCE
from marft_agents.serving.refusals import is_loopback

Say = Callable[[str], None]


@dataclass(frozen=True)
class ServeSettings:
    """Everything that ``marft-agents serve`` can be told."""

    adapters: Path
    model: str
    agents: tuple[str, ...] = ()
    engine: EngineKind = "vllm"
    engine_python: str | None = None
    engine_args: tuple[str, ...] = ()
    server: str | None = None
    """Address of an engine that runs already; none is started then."""
    server_api_key: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_lora_rank: int = 16
    max_model_len: int | None = None
    target_modules: tuple[str, ...] = ()
    logprobs_mode: str | None = None
    """What the engine at ``server`` reports; one started here always reports processed ones."""
    probe_tolerance: float = TOLERANCE
    start_timeout_s: float = 600.0
    record: Path | None = None
    """Folder for the log of calls that clients ask to be recorded; ``None`` records nothing."""
    record_all: bool = False
    episode_idle_s: float = 3600.0


@dataclass(frozen=True)
class Plan:
    """What is served, settled before the engine starts."""

    registry: Registry
    model_dir: Path
    base: BaseModelInfo
    routes: tuple[Route, ...]
    limits: Limits


def check_settings(settings: ServeSettings) -> None:
    """Refuse settings that could not work, or would open the server to everyone.

    Raises:
        ConfigError: naming the flag.
    """
    if not is_loopback(settings.host) and not settings.api_key:
        raise ConfigError(
            f"--host {settings.host} is reachable from other machines; put a key into a variable"
            " and name it with --api-key-env NAME, or listen on 127.0.0.1"
        )
    if settings.max_lora_rank not in ALLOWED_MAX_RANKS:
        raise ConfigError(
            f"--max-lora-rank {settings.max_lora_rank} is not one of"
            f" {' '.join(map(str, ALLOWED_MAX_RANKS))}"
        )
    if settings.record_all and settings.record is None:
        raise ConfigError("--record-all says which calls to record; say where, too: --record DIR")
    if settings.record is not None:
        _check_writable(settings.record)


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"--record {folder} cannot be written ({error.strerror or error}); name a folder that"
            " this user may write to"
        ) from error


def _publish_missing(
    settings: ServeSettings, registry: Registry, base: BaseModelInfo, model: Path, say: Say
) -> None:
    for slug in sorted(adapter_slugs(settings.agents).values()):
        if registry.versions(slug):
            continue
        with tempfile.TemporaryDirectory(prefix="marft-untrained-") as folder:
            staged = write_untrained_adapter(
                folder,
                model,
                rank=min(DEFAULT_RANK, settings.max_lora_rank),
                target_modules=settings.target_modules or DEFAULT_TARGET_MODULES,
                seed=zlib.crc32(slug.encode()),
            )
            registry.publish(slug, staged, base=base, parent=None, untrained=True, command="serve")
        say(f"published {slug}@v1, an untrained adapter")


def _current_routes(registry: Registry) -> tuple[Route, ...]:
    routes: list[Route] = []
    for agent in registry.agents():
        version = registry.current(agent)
        if version is None:  # a crash came between the first version and its CURRENT
            version = registry.versions(agent)[0]
            evidence = {"reason": "no version was in use"}
            registry.move(agent, version, Change(command="serve", evidence=evidence))
        routes.append(Route(agent, version))
    return tuple(routes)


def make_plan(settings: ServeSettings, say: Say) -> Plan:
    """Read the base and the registry, publish what is missing, check what will be served.

    Raises:
        ConfigError: for settings, a model or a registry that cannot be served.
        AdapterError: for a current version that this engine could not serve.
        RegistryError: for a registry that contradicts itself.
    """
    check_settings(settings)
    model_dir = resolve_model_dir(settings.model)
    base = describe_base(settings.model)
    registry = Registry(settings.adapters)
    locks.require_not_served(registry.root)
    if not registry.agents() and not settings.agents:
        raise ConfigError(
            f"{registry.root} has no agent; name the agents to begin with: --agents planner,writer"
        )
    _publish_missing(settings, registry, base, model_dir, say)
    routes = _current_routes(registry)
    manifests = [registry.manifest(route.agent, route.version) for route in routes]
    modules = {*settings.target_modules, *(m for x in manifests for m in x.target_modules)}
    slots = lora_slots(len(routes)) if settings.engine == "vllm" and not settings.server else None
    limits = Limits(settings.max_lora_rank, tuple(sorted(modules)), slots)
    for route in routes:
        check_version(registry, base, limits, route.agent, route.version)
    return Plan(registry, model_dir, base, routes, limits)
