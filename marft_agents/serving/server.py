"""``serve`` from nothing to ready: plan, engine, adapters, gateway.

Invariant: the address answers only after every agent's current version was loaded and probed, and
the engine is gone when ``serve`` returns, however it returns.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Generator
from dataclasses import replace

import uvicorn

from marft_agents.errors import ConfigError, EngineError, MarftError
from marft_agents.recording import MarftRecorder
from marft_agents.registry import locks
from marft_agents.serving.access_setup import make_access
from marft_agents.serving.admission import MAX_IN_FLIGHT, Admission
from marft_agents.serving.aliases import Aliases
from marft_agents.serving.client import EngineClient
from marft_agents.serving.commands import EngineCommand
from marft_agents.serving.connections import MAX_UNREAD, PatientProtocol, connection_limit
from marft_agents.serving.control import ensure_operator_key
from marft_agents.serving.engine_key import guarded, new_engine_key
from marft_agents.serving.fields import Fields
from marft_agents.serving.fleet import Fleet
from marft_agents.serving.gateway import Gateway, GatewaySettings
from marft_agents.serving.identity import BY_URL
from marft_agents.serving.leases import Leases
from marft_agents.serving.loader import Loader
from marft_agents.serving.plan import Plan, Say, ServeSettings, check_settings, make_plan
from marft_agents.serving.process import EngineProcess, free_port
from marft_agents.serving.recording import Recording
from marft_agents.serving.refusals import is_loopback
from marft_agents.serving.replica import Replica
from marft_agents.serving.resume import recent_episodes
from marft_agents.serving.swap import Swapper
from marft_agents.serving.upstream import Upstream

LOG_FILE = ".engine.log"
Death = Callable[[], str | None]
"""Why the engine's process is gone; ``None`` while it runs, or when it is not ours."""


def _listen(host: str, port: int) -> socket.socket:
    """Reserve the address before anything slow begins."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends at once (TCP_NODELAY) only where it sees that this is TCP.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror or error}); choose another --port"
        ) from error
    return sock


def _engine_command(settings: ServeSettings, plan: Plan, port: int) -> EngineCommand:
    assert plan.engine is not None and settings.server_api_key is not None
    command = plan.engine.command(
        plan.model_dir,
        port=port,
        max_lora_rank=plan.limits.max_lora_rank,
        slots=plan.slots,
        target_modules=plan.limits.target_modules,
        max_model_len=settings.max_model_len,
    )
    return guarded(command, settings.server_api_key)


@contextlib.contextmanager
def _engine(
    settings: ServeSettings, plan: Plan, say: Say
) -> Generator[tuple[str, EngineProcess | None]]:
    """The engine's address, and its process when it was started here."""
    if settings.server is not None:
        with EngineClient(settings.server, api_key=settings.server_api_key) as client:
            client.wait_ready(min(60.0, settings.start_timeout_s))
        yield settings.server, None
        return
    port = free_port()
    log = plan.registry.root / LOG_FILE
    command = _engine_command(settings, plan, port)
    process = EngineProcess(command, port=port, log=log, name=f"the {settings.engine} engine")
    say(f"starting {process.name} on {plan.base.name} (log: {log})")
    try:
        process.start()

        def progress(seconds: float, line: str) -> None:
            say(f"  {seconds:3.0f} s  {line[:100]}")

        process.wait_ready(settings.start_timeout_s, progress)
        yield process.url, process
    finally:
        process.stop()


def _load_all(loader: Loader, plan: Plan, leases: Leases, say: Say) -> Aliases:
    aliases = Aliases(leases)
    loader.take_baseline()
    for route in plan.routes:
        try:
            report = loader.bring_up(route.agent, route.version)
        except MarftError as error:
            older = f"marft-agents swap {route.agent} --version N --offline"
            raise EngineError(f"{error}; to go back to another version: {older}") from error
        aliases.point(route)
        say(f"loaded {route.name} (differs from the base by {report.effect:.3g})")
    return aliases


def _death_of(process: EngineProcess | None) -> Death:
    def death() -> str | None:
        if process is None or process.running:
            return None
        code = process.exit_code
        return f"{process.name} ended with code {code}, see {process.log}; restart serve"

    return death


class _Server(uvicorn.Server):
    """Says when requests are accepted, and when the engine died."""

    def __init__(
        self, config: uvicorn.Config, *, ready: Callable[[], None], death: Death, say: Say
    ) -> None:
        super().__init__(config)
        self._ready = ready
        self._death = death
        self._say = say
        self._next_look = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + 1.0
            if reason := self._death():
                self._say(f"the engine is gone: {reason}")
                self._next_look = float("inf")
        return await super().on_tick(counter)


def _announce(address: str, aliases: Aliases, settings: ServeSettings, say: Say) -> None:
    width = max(len(route.agent) for route in aliases.routes())
    say("")
    for route in aliases.routes():
        say(f"  {route.agent:<{width}}  v{route.version}")
    say("")
    if settings.record is not None:
        what = "every call" if settings.record_all else f"calls to {address}{BY_URL}"
        say(f"recording {what} into {settings.record}")
    say(f"ready: base_url {address}/v1, model = the agent's name")


def _recording(settings: ServeSettings) -> Recording | None:
    if settings.record is None:
        return None
    return Recording(
        MarftRecorder(settings.record, inject="always", raise_errors=False),
        record_all=settings.record_all,
        idle_s=settings.episode_idle_s,
        resumable=recent_episodes(settings.record, settings.episode_idle_s),
    )


def _gateway_settings(settings: ServeSettings, plan: Plan, operator_key: str) -> GatewaySettings:
    engine = plan.engine
    return GatewaySettings(
        make_access(operator_key, settings.api_key, settings.api_keys, settings.keys),
        logprobs_mode=engine.logprobs_mode if engine else settings.logprobs_mode,
        sampling_defaults=engine.sampling_defaults if engine else None,
        fields=Fields(settings.allow_fields, media_urls=settings.allow_media_urls),
        admission=Admission(settings.max_in_flight or MAX_IN_FLIGHT),
        loopback=is_loopback(settings.host),
        allowed_hosts=settings.allowed_hosts,
    )


def _uvicorn_config(gateway: Gateway) -> uvicorn.Config:
    return uvicorn.Config(
        gateway.app(),
        log_config=None,  # whoever runs this says where its warnings go
        log_level="warning",
        access_log=False,
        http=PatientProtocol,
        ws="none",
        h11_max_incomplete_event_size=MAX_UNREAD,
        limit_concurrency=connection_limit(),
        proxy_headers=False,  # a forwarded address must not pass for a loopback peer
        server_header=False,
        timeout_keep_alive=75,  # longer than any client keeps an idle connection
        timeout_graceful_shutdown=5,
    )


def serve(settings: ServeSettings, say: Say) -> None:
    """Serve until interrupted.

    Raises:
        ConfigError: for settings, a model or a registry that cannot be served.
        AdapterError: for a current version that this engine could not serve.
        EngineError: when the engine does not start, or an adapter fails its probe.
        ServerError: when the engine does not answer.
    """
    check_settings(settings)
    if settings.server is None:
        settings = replace(settings, server_api_key=new_engine_key())
    with contextlib.closing(_listen(settings.host, settings.port)) as sock:
        plan = make_plan(settings, say)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"http://{host}:{sock.getsockname()[1]}"
        with locks.serving(plan.registry.root, address):
            key = ensure_operator_key(plan.registry.root)
            _run(settings, plan, sock, address, key, say)


def _run(
    settings: ServeSettings, plan: Plan, sock: socket.socket, address: str, key: str, say: Say
) -> None:
    with (
        _engine(settings, plan, say) as (url, process),
        EngineClient(url, api_key=settings.server_api_key) as client,
    ):
        loader = Loader(
            client, plan.registry, plan.base, plan.limits, tolerance=settings.probe_tolerance
        )
        leases = Leases(timeout_s=settings.lease_timeout_s)
        aliases = _load_all(loader, plan, leases, say)
        death = _death_of(process)
        upstream = Upstream(url, death=death, api_key=settings.server_api_key)
        fleet = Fleet([Replica("engine-0", loader, upstream)])
        gateway = Gateway(
            Swapper(fleet, aliases), _gateway_settings(settings, plan, key), _recording(settings)
        )
        server = _Server(
            _uvicorn_config(gateway),
            ready=lambda: _announce(address, aliases, settings, say),
            death=death,
            say=say,
        )
        server.run(sockets=[sock])
