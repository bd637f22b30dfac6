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
from marft_agents.serving.access_setup import NamedKey, check_access
from marft_agents.serving.aliases import Route
from marft_agents.serving.client import root_url
from marft_agents.serving.commands import EngineKind
from marft_agents.serving.engine_setup import EngineSetup, EngineWishes, settle_engine
from marft_agents.serving.leases import LEASE_TIMEOUT_S
from marft_agents.serving.loader import Limits, check_version
from marft_agents.serving.lora_limits import Slots, settle_rank, settle_slots, slots_line
from marft_agents.serving.probe import TOLERANCE
from marft_agents.serving.supervisor import Pace

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
    preset: str = "auto"
    tool_calls: str = "auto"
    """``auto``, ``off`` or the name of a tool parser; ``reasoning_parser`` likewise."""
    reasoning_parser: str = "auto"
    chat_template: Path | None = None
    servers: tuple[str, ...] = ()
    """Addresses of engines that run already; none is started then."""
    server_api_key: str | None = None
    replicas: int = 1
    """Engines to start; ``gpus`` are divided among them."""
    gpus: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    api_keys: tuple[NamedKey, ...] = ()
    """Further keys of applications, each with the name that metrics and logs call it by."""
    keys: Path | None = None
    """A private file of keys with names and roles, read again when it changes."""
    max_in_flight: int | None = None
    """Requests under way at once; ``None``: as many as the engines run."""
    allow_fields: tuple[str, ...] = ()
    """Request fields to pass on beside the known ones."""
    allow_media_urls: bool = False
    allowed_hosts: tuple[str, ...] = ()
    """Further names that clients may call this server by."""
    max_lora_rank: int | None = None
    """``None``: enough for every version in use, and 16 at least."""
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    max_model_len: int | None = None
    target_modules: tuple[str, ...] = ()
    logprobs_mode: str | None = None
    """What the engines at ``servers`` report; one started here always reports processed ones."""
    probe_tolerance: float = TOLERANCE
    start_timeout_s: float = 600.0
    stop_timeout_s: float = 30.0
    """How long requests in flight may go on after the server was asked to stop."""
    silence_s: float = Pace.silence_s
    """Without a byte of any reply for so long, an engine is asked for a token; 0: never."""
    record: Path | None = None
    """Folder for the log of calls that clients ask to be recorded; ``None`` records nothing."""
    record_all: bool = False
    episode_idle_s: float = 3600.0
    lease_timeout_s: float = LEASE_TIMEOUT_S
    """An episode without a request for longer loses the versions that are kept for it."""


@dataclass(frozen=True)
class Plan:
    """What is served, settled before the engine starts."""

    registry: Registry
    model_dir: Path
    base: BaseModelInfo
    routes: tuple[Route, ...]
    limits: Limits
    slots: Slots
    engine: EngineSetup | None = None
    """How the engine is started; ``None``: another runs already."""


def check_settings(settings: ServeSettings) -> None:
    """Refuse settings that could not work, or would open the server to everyone.

    Raises:
        ConfigError: naming the flag.
    """
    check_access(settings.host, settings.api_key, settings.api_keys, settings.keys)
    settle_rank(settings.max_lora_rank, ())
    _check_started_here(settings)
    _check_replicas(settings)
    if settings.record_all and settings.record is None:
        raise ConfigError("--record-all says which calls to record; say where, too: --record DIR")
    if settings.record is not None:
        _check_writable(settings.record)


def _wishes(settings: ServeSettings) -> EngineWishes:
    return EngineWishes(
        settings.engine,
        settings.engine_python,
        settings.engine_args,
        settings.preset,
        settings.tool_calls,
        settings.reasoning_parser,
        settings.chat_template,
    )


def _check_started_here(settings: ServeSettings) -> None:
    """Refuse what only an engine that is started here could heed."""
    flags = list(_wishes(settings).changed()) if settings.servers else []
    if settings.servers:
        flags += ["--replicas"] if settings.replicas != 1 else []
        flags += ["--gpus"] if settings.gpus else []
        flags += ["--engine local"] if settings.engine == "local" else []
    if settings.servers or settings.engine == "local":
        flags += ["--max-loras"] if settings.max_loras is not None else []
        flags += ["--max-cpu-loras"] if settings.max_cpu_loras is not None else []
    if flags:
        who = (
            "the engine at --server runs already" if settings.servers else "this is --engine local"
        )
        raise ConfigError(
            f"{', '.join(flags)}: said of an engine that serve starts, but {who}; leave"
            f" {'it' if len(flags) == 1 else 'them'} out"
        )


def _check_replicas(settings: ServeSettings) -> None:
    urls = [root_url(url) for url in settings.servers]
    if doubled := sorted({url for url in urls if urls.count(url) > 1}):
        raise ConfigError(f"--server {doubled[0]} is given twice; name each engine once")
    if settings.replicas < 1:
        raise ConfigError(f"--replicas {settings.replicas}: at least one engine is needed")


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
                rank=min(DEFAULT_RANK, settings.max_lora_rank or DEFAULT_RANK),
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
    registry.settle()
    if not registry.agents() and not settings.agents:
        raise ConfigError(
            f"{registry.root} has no agent; name the agents to begin with: --agents planner,writer"
        )
    engine = None if settings.servers else settle_engine(_wishes(settings), model_dir, base)
    agents = {*registry.agents(), *adapter_slugs(settings.agents).values()}
    slots = settle_slots(
        len(agents), max_loras=settings.max_loras, max_cpu_loras=settings.max_cpu_loras
    )
    for notice in engine.notices if engine else ():
        say(f"note: {notice}")
    _publish_missing(settings, registry, base, model_dir, say)
    routes = _current_routes(registry)
    manifests = [registry.manifest(route.agent, route.version) for route in routes]
    modules = {*settings.target_modules, *(m for x in manifests for m in x.target_modules)}
    rank = settle_rank(settings.max_lora_rank, (x.rank for x in manifests))
    has_slots = settings.engine == "vllm" and not settings.servers
    held = (slots.loaded, slots.kept) if has_slots else (None, None)
    limits = Limits(rank, tuple(sorted(modules)), *held)
    for route in routes:
        check_version(registry, base, limits, route.agent, route.version)
    if engine and has_slots:
        size = engine.slot_bytes(model_dir, base, limits.target_modules, rank)
        say(slots_line(slots, len(agents), rank, size))
    return Plan(registry, model_dir, base, routes, limits, slots, engine)
