"""The engines of one ``serve``: started here or found running, loaded, and watched from then on.

Invariant: a replica is ready only when its engine has loaded and probed every version in use. One
that fails at the start is told, left out of the traffic and tried again; when all fail, that is an
error. No engine that was started outlives the block.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from marft_agents.errors import ConfigError, EngineError, MarftError
from marft_agents.serving.client import EngineClient
from marft_agents.serving.commands import LOOPBACK, EngineCommand
from marft_agents.serving.engine_key import guarded
from marft_agents.serving.foreign import is_without_lora, no_adapters, require_engine
from marft_agents.serving.loader import Loader
from marft_agents.serving.plan import Plan, Say, ServeSettings
from marft_agents.serving.presets import replica_env, usable_cores
from marft_agents.serving.replica import Replica
from marft_agents.serving.restartable import RestartableEngine
from marft_agents.serving.upstream import Upstream

_WAIT_FOR_SERVER_S = 60.0


@dataclass
class Launched:
    """Replicas in the order of their names, and the engines of those that were started here."""

    replicas: list[Replica]
    engines: dict[str, RestartableEngine]


@contextlib.contextmanager
def launched(settings: ServeSettings, plan: Plan, say: Say) -> Generator[Launched]:
    """Start or find every engine and load what is in use.

    Raises:
        ConfigError: when the machine cannot be divided among so many.
        EngineError: when no engine starts, or none takes the versions in use.
        ServerError: when no engine that runs elsewhere answers.
    """
    with contextlib.ExitStack() as stack:
        engines = {} if settings.servers else _engines(settings, plan, say)
        stack.callback(_close, list(engines.values()))
        urls = settings.servers or tuple(engine.url for engine in engines.values())
        replicas = [
            _replica(settings, plan, f"engine-{i}", url, engines.get(f"engine-{i}"))
            for i, url in enumerate(urls)
        ]
        for replica in replicas:
            stack.callback(replica.loader.client.close)
        _start_all(settings, plan, replicas, engines, say)
        yield Launched(replicas, engines)


def _engines(settings: ServeSettings, plan: Plan, say: Say) -> dict[str, RestartableEngine]:
    count = settings.replicas
    shares = [_share(settings, plan, i) for i in range(count)]
    engines: dict[str, RestartableEngine] = {}
    for i, (share, port) in enumerate(zip(shares, _free_ports(count), strict=True)):
        told = f"the {settings.engine} engine" + (f" {i}" if count > 1 else "")

        def command(port: int, share: dict[str, str] = share) -> EngineCommand:
            whole = _command(settings, plan, port)
            return replace(whole, env=whole.env | share)

        def progress(seconds: float, line: str, name: str = f"engine-{i}") -> None:
            say(f"  {seconds:3.0f} s  {f'{name}: ' if count > 1 else ''}{line[:100]}")

        engines[f"engine-{i}"] = RestartableEngine(
            told,
            plan.registry.root / f".engine-{i}.log",
            command,
            port=port,
            start_timeout_s=settings.start_timeout_s,
            progress=progress,
        )
    return engines


def _share(settings: ServeSettings, plan: Plan, index: int) -> dict[str, str]:
    """Variables for the part of the machine that one engine gets."""
    count, gpus = settings.replicas, settings.gpus
    if count == 1 and not gpus:
        return {}
    preset = plan.engine.preset if plan.engine is not None else None
    if preset is not None:
        return replica_env(preset.name, index, count, gpus)
    if gpus:
        return replica_env("gpu", index, count, gpus)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(usable_cores()) // count))
    return {"OMP_NUM_THREADS": threads}


def _command(settings: ServeSettings, plan: Plan, port: int) -> EngineCommand:
    if plan.engine is None or settings.server_api_key is None:
        raise ConfigError("there is no engine to start")
    command = plan.engine.command(
        plan.model_dir,
        port=port,
        max_lora_rank=plan.limits.max_lora_rank,
        slots=plan.slots,
        target_modules=plan.limits.target_modules,
        max_model_len=settings.max_model_len,
    )
    variables = [name for name, _ in settings.api_keys]  # engines need no client's key
    return guarded(command, settings.server_api_key, variables)


def _free_ports(count: int) -> list[int]:
    """Different ports that nothing listens on right now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind((LOOPBACK, 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


def _replica(
    settings: ServeSettings, plan: Plan, name: str, url: str, engine: RestartableEngine | None
) -> Replica:
    client = EngineClient(url, api_key=settings.server_api_key)
    loader = Loader(
        client, plan.registry, plan.base, plan.limits, tolerance=settings.probe_tolerance
    )
    if engine is None:
        return Replica(name, loader, Upstream(url, api_key=settings.server_api_key))
    upstream = Upstream(url, death=engine.death, api_key=settings.server_api_key)
    return Replica(name, loader, upstream)


def _start_all(
    settings: ServeSettings,
    plan: Plan,
    replicas: Sequence[Replica],
    engines: dict[str, RestartableEngine],
    say: Say,
) -> None:
    errors: dict[str, BaseException] = {}

    def start(replica: Replica) -> None:
        try:
            engine = engines.get(replica.name)
            if engine is not None:
                say(f"starting {engine.name} on {plan.base.name} (log: {engine.log})")
                engine.start()
            else:
                wait_s = min(_WAIT_FOR_SERVER_S, settings.start_timeout_s)
                say(f"asking the engine at {replica.upstream.url} (for {wait_s:.0f} s at most)")
                client, began = replica.loader.client, time.monotonic()
                client.wait_healthy(wait_s)
                require_engine(client)
                client.warm_up(max(1.0, wait_s - (time.monotonic() - began)))
            _load(replica, plan, say, alone=len(replicas) == 1)
        except BaseException as error:  # raised below, in the thread that waits
            errors[replica.name] = error

    threads = [threading.Thread(target=start, args=(r,), daemon=True) for r in replicas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _judge(replicas, errors, say)


def _judge(replicas: Sequence[Replica], errors: dict[str, BaseException], say: Say) -> None:
    """Go on with what started; raise when that is nothing, or an error is none of an engine."""
    for error in errors.values():
        if len(errors) == len(replicas) or not isinstance(error, MarftError):
            raise error
    for replica in replicas:
        if error := errors.get(replica.name):
            replica.become("down", str(error))
            say(f"{replica.name} takes no requests, the others do: {error}")


def _load(replica: Replica, plan: Plan, say: Say, *, alone: bool) -> None:
    loader = replica.loader
    loader.take_baseline()
    for route in plan.routes:
        try:
            report = loader.bring_up(route.agent, route.version)
        except MarftError as error:
            if is_without_lora(error):
                url = replica.upstream.url
                raise ConfigError(no_adapters(url, "it says that LoRA is not enabled")) from error
            older = f"marft-agents swap {route.agent} --version N --offline"
            raise EngineError(f"{error}; to go back to another version: {older}") from error
        where = "" if alone else f"{replica.name}: "
        effect = f"differs from the base by {report.effect:.3g}" if report.effect else "as the base"
        say(f"{where}loaded {route.name} ({effect})")


def _close(engines: Sequence[RestartableEngine]) -> None:
    """All at the same time: each may take seconds."""
    threads = [threading.Thread(target=engine.close, daemon=True) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
