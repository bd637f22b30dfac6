"""``marft-agents adapters canary``: try a version on a share of the episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import click

from marft_agents.cli._adapters import agent_name, require_registry
from marft_agents.cli._amounts import (
    duration,
    episodes,
    percent,
    requests,
    share,
    span,
    version_number,
)
from marft_agents.cli._moving import (
    adapters_option,
    bounds_options,
    change_of,
    evidence_options,
    read_bounds,
    require_server,
)
from marft_agents.cli._text import say
from marft_agents.errors import ConfigError, RegistryError
from marft_agents.registry import Registry
from marft_agents.registry.canary import FOR_S, Then
from marft_agents.registry.locks import server_of
from marft_agents.serving.gateway_client import GatewayClient


@click.command("canary")
@click.argument("agent")
@click.argument("version", required=False, type=version_number)
@click.option(
    "--share", type=share, metavar="SHARE", help="Share of the episodes that begin from now on."
)
@click.option("--server", metavar="URL", help="The running `marft-agents serve`.")
@bounds_options
@click.option(
    "--for",
    "for_s",
    type=span,
    metavar="TIME",
    default=FOR_S,
    help="How long until it has stood the test.  [default: 30m]",
)
@click.option(
    "--then",
    type=click.Choice(["promote", "stop"]),
    help="What to do when it has; without it, the server only says so.",
)
@click.option("--stop", is_flag=True, help="End the agent's canary.")
@click.option("--now", is_flag=True, help="With --stop: move over the episodes that have it, too.")
@click.option("--status", is_flag=True, help="Say how the agent's canary does.")
@adapters_option
@evidence_options
def command(agent: str, version: int | None, adapters: Path, **options: Any) -> None:
    """Let AGENT answer a share of its episodes from VERSION, which is watched meanwhile.

    An episode has one version from its first call to its end. A canary whose requests fail more
    often, or which is slower per token, is taken out by itself.
    """
    registry, slug = require_registry(adapters), agent_name(agent)
    _check(version, options)
    server = cast("str | None", options["server"])
    if options["status"]:
        for line in _status(registry, slug, server):
            say(line)
    elif options["stop"]:
        say(_stop(registry, slug, server, options))
    else:
        say(_start(registry, slug, cast("int", version), server, options))


def _check(version: int | None, options: Mapping[str, Any]) -> None:
    wanted = [options["stop"], options["status"], version is not None]
    if sum(map(bool, wanted)) != 1:
        raise ConfigError("canary takes a version with --share, or --stop, or --status")
    if (version is None) != (options["share"] is None):
        raise ConfigError("a canary has a share: canary AGENT VERSION --share 10%")
    if options["share"] == 0:
        raise ConfigError("--share 0 is no canary; to end one: canary AGENT --stop")
    if options["now"] and not options["stop"]:
        raise ConfigError("--now goes with --stop")


def _start(
    registry: Registry, agent: str, version: int, server: str | None, options: Mapping[str, Any]
) -> str:
    if server is None:
        raise ConfigError("a canary runs in a server: name it with --server URL")
    registry.verify(agent, version)
    require_server(server)
    bounds = read_bounds(options, options["for_s"])
    reason, evaluation, force = (options[n] for n in ("reason", "evaluation", "force"))
    change = change_of("adapters canary", reason, evaluation, force=force)
    then = cast("Then", options["then"] or "tell")
    with GatewayClient(server, adapters_dir=registry.root) as client:
        done = client.canary(agent, version, options["share"], change, bounds=bounds, then=then)
    _require_same(registry, agent, version, server)
    part, current = percent(done["share"]), done["from"]
    if not done["changed"]:
        return f"{agent}: v{version} has {part} of the episodes already; nothing was changed"
    after = {"tell": "", "promote": ", then promoted", "stop": ", then stopped"}[then]
    return (
        f"{agent}: v{version} gets {part} of the episodes that begin from now on, v{current} stays"
        f" in use; compared with it for {duration(bounds.for_s)}{after}"
    )


def _require_same(registry: Registry, agent: str, version: int, server: str) -> None:
    plan = registry.canary(agent)
    if plan is None or plan.version != version:
        raise ConfigError(
            f"{server} has the canary {agent}@v{version} now, and {registry.root} has not: the"
            " server was started with another folder; name that one (--adapters)"
        )


def _stop(registry: Registry, agent: str, server: str | None, options: Mapping[str, Any]) -> str:
    reason, evaluation, force = (options[n] for n in ("reason", "evaluation", "force"))
    change = change_of("adapters canary --stop", reason, evaluation, force=force)
    if server is None:
        if who := server_of(registry.root):
            raise RegistryError(f"{registry.root} is served by {who}; name it: --server URL")
        version = registry.end_canary(agent, change)
        return f"{agent}: {_ended(version)}"
    require_server(server)
    with GatewayClient(server, adapters_dir=registry.root) as client:
        done = client.stop_canary(agent, change, now=options["now"])
    if done["version"] is None:
        return f"{agent}: {_ended(None)}"
    kept = done["leases"]
    more = f"; {episodes(kept)} keep it until they end (--now moves them over)" if kept else ""
    return f"{agent}: {_ended(done['version'])}{more}"


def _ended(version: int | None) -> str:
    return "has no canary" if version is None else f"the canary v{version} was stopped"


def _status(registry: Registry, agent: str, server: str | None) -> Iterator[str]:
    plan = registry.canary(agent)
    if server is None:
        if plan is None:
            yield f"{agent}: {_ended(None)}"
            return
        who = server_of(registry.root)
        seen = "--server URL says how it does" if who else "no server runs; the next one goes on"
        yield f"{agent}: v{plan.version} has {percent(plan.share)} of the episodes; {seen}"
        return
    with GatewayClient(server, adapters_dir=registry.root) as client:
        told = client.state()["agents"].get(agent)
    if told is None:
        raise RegistryError(f"{server} serves no agent {agent!r}")
    yield from _told(agent, told)


def _told(agent: str, told: Mapping[str, Any]) -> Iterator[str]:
    canary, ended, watch = (told.get(name) for name in ("canary", "ended", "watch"))
    if canary is None:
        yield f"{agent}: {_ended(None)}; v{told['current']} is in use"
    elif "seen" not in canary:
        yield f"{agent}: the canary v{canary['version']} is being loaded"
    else:
        left = duration(canary["remaining_s"])
        state = "has stood the test" if canary["passed"] else f"{left} to go"
        part = percent(canary["share"])
        yield f"{agent}: the canary v{canary['version']} has {part} of the episodes; {state}"
        yield from _sides(canary["version"], told["current"], canary["seen"])
    if watch is not None:
        left, back = duration(watch["remaining_s"]), watch["back"]
        yield f"{agent}: v{watch['version']} is watched, {left} to go, or back to v{back}"
        yield from _sides(watch["version"], back, watch["seen"])
    if ended is not None:
        yield f"{agent}: the last canary or watch, of v{ended['version']}: {ended['how']}"
        if ended.get("seen"):
            yield from _sides(ended["version"], None, ended["seen"])


def _sides(version: int, other: int | None, seen: Mapping[str, Any]) -> Iterator[str]:
    for name, side in (
        (f"v{version}", "version"),
        (f"v{other}" if other else "compared with", "incumbent"),
    ):
        numbers = seen[side]
        line = f"  {name}: {requests(numbers['requests'])}, {numbers['failed']} failed"
        for what, key in (("until the first token", "first_token_s"), ("per token", "token_s")):
            if numbers[key] is not None:
                line += f", {numbers[key]:.3g} s {what}"
        yield line
    if not seen["enough"]:
        yield "  too few requests to judge"
    for reason in seen["worse"]:
        yield f"  worse: {reason}"
