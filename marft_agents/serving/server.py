"""``serve`` from nothing to ready: plan, engine, adapters, gateway.

Invariant: the address answers only after every agent's current version was loaded and probed, and
the engine is gone when ``serve`` returns, however it returns.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace

import uvicorn

from marft_agents.errors import ConfigError
from marft_agents.recording import MarftRecorder
from marft_agents.registry import locks
from marft_agents.serving.access_setup import make_access
from marft_agents.serving.admission import MAX_IN_FLIGHT, Admission
from marft_agents.serving.aliases import Aliases
from marft_agents.serving.connections import MAX_UNREAD, PatientProtocol, connection_limit
from marft_agents.serving.control import ensure_operator_key
from marft_agents.serving.engine_key import new_engine_key
from marft_agents.serving.fields import Fields
from marft_agents.serving.fleet import Fleet
from marft_agents.serving.gateway import Gateway, GatewaySettings
from marft_agents.serving.identity import BY_URL
from marft_agents.serving.launch import launched
from marft_agents.serving.leases import Leases
from marft_agents.serving.listener import Listener
from marft_agents.serving.plan import Plan, Say, ServeSettings, check_settings, make_plan
from marft_agents.serving.recording import Recording
from marft_agents.serving.refusals import is_loopback
from marft_agents.serving.resume import recent_episodes
from marft_agents.serving.supervisor import Pace, Supervisor
from marft_agents.serving.swap import Swapper


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


_ALL_ADDRESSES = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that are listened on and cannot be asked, and where this machine asks instead."""


def own_address(host: str, port: int) -> str:
    """Where a program of this machine finds what listens on ``host``."""
    name = _ALL_ADDRESSES.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def _aliases(plan: Plan, leases: Leases) -> Aliases:
    aliases = Aliases(leases)
    for route in plan.routes:
        aliases.point(route)
    return aliases


def _announce(address: str, aliases: Aliases, settings: ServeSettings, say: Say) -> None:
    width = max(len(route.agent) for route in aliases.routes())
    say("")
    for route in aliases.routes():
        say(f"  {route.agent:<{width}}  v{route.version}")
    say("")
    if settings.record is not None:
        what = "every call" if settings.record_all else f"calls to {address}{BY_URL}"
        say(f"recording {what} into {settings.record}")
    far = settings.host in _ALL_ADDRESSES
    more = "; other machines put this one's name in its place" if far else ""
    say(f"ready: base_url {address}/v1, model = the agent's name{more}")


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
    engine, engines = plan.engine, len(settings.servers) or settings.replicas
    return GatewaySettings(
        make_access(operator_key, settings.api_key, settings.api_keys, settings.keys),
        logprobs_mode=engine.logprobs_mode if engine else settings.logprobs_mode,
        sampling_defaults=engine.sampling_defaults if engine else None,
        fields=Fields(settings.allow_fields, media_urls=settings.allow_media_urls),
        admission=Admission(settings.max_in_flight or MAX_IN_FLIGHT * engines),
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
        timeout_graceful_shutdown=2,  # requests for models were waited for already
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
    if not settings.servers:
        settings = replace(settings, server_api_key=new_engine_key())
    with contextlib.closing(_listen(settings.host, settings.port)) as sock:
        plan = make_plan(settings, say)
        address = own_address(settings.host, sock.getsockname()[1])
        with locks.serving(plan.registry.root, address):
            key = ensure_operator_key(plan.registry.root)
            _run(settings, plan, sock, address, key, say)


def _run(
    settings: ServeSettings, plan: Plan, sock: socket.socket, address: str, key: str, say: Say
) -> None:
    with launched(settings, plan, say) as engines:
        fleet = Fleet(engines.replicas)
        aliases = _aliases(plan, Leases(timeout_s=settings.lease_timeout_s))
        swapper = Swapper(fleet, aliases)
        gateway = Gateway(
            swapper,
            _gateway_settings(settings, plan, key),
            _recording(settings),
            supervisor=Supervisor(
                fleet, swapper.keeper, engines.engines, say, Pace(silence_s=settings.silence_s)
            ),
        )
        server = Listener(
            _uvicorn_config(gateway),
            fleet,
            ready=lambda: _announce(address, aliases, settings, say),
            say=say,
            stop_timeout_s=settings.stop_timeout_s,
        )
        server.run(sockets=[sock])
