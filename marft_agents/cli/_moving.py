"""Move an agent to another version: on disk, or in a running server, which then moves it on disk.

Invariant: with a server, ``CURRENT`` moves only after the server loaded and probed the version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from marft_agents.cli._amounts import Finite, duration, episodes, requests, share
from marft_agents.cli._text import printable
from marft_agents.errors import ConfigError, ServerError
from marft_agents.registry import Bounds, Change, Registry, current_user, durable
from marft_agents.registry.canary import MAX_ERROR_INCREASE, MAX_LATENCY_RATIO, MIN_REQUESTS
from marft_agents.registry.locks import server_of
from marft_agents.serving.calls import AnswerError, NoAnswerError, call, new_client
from marft_agents.serving.client import root_url
from marft_agents.serving.gateway_client import GatewayClient

_FEW = 20
_Command = TypeVar("_Command", bound=Callable[..., Any])

adapters_option = click.option(
    "--adapters",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("adapters"),
    show_default=True,
    help="The registry's folder.",
)
server_option = click.option(
    "--server",
    metavar="URL",
    help="Running `marft-agents serve` to swap; without it, only the version in use on disk moves.",
)

now_option = click.option(
    "--now", is_flag=True, help="Move over the episodes that keep an older version, too."
)


def bounds_options(command: _Command) -> _Command:
    """When a version is worse than another: ``--min-requests`` and the two bounds."""
    for option in (
        click.option(
            "--max-latency-ratio",
            metavar="FACTOR",
            type=Finite(min=1, max=1000),
            default=MAX_LATENCY_RATIO,
            show_default=True,
            help="Most times as long until the first token, and per further token.",
        ),
        click.option(
            "--max-error-increase",
            type=share,
            metavar="SHARE",
            default=MAX_ERROR_INCREASE,
            help="Most that more of its requests may fail.  [default: 2%]",
        ),
        click.option(
            "--min-requests",
            metavar="N",
            type=click.IntRange(min=20, max=1_000_000),
            default=MIN_REQUESTS,
            show_default=True,
            help="Requests of each of the two before anything is judged.",
        ),
    ):
        command = option(command)
    return command


def read_bounds(options: Mapping[str, Any], for_s: float) -> Bounds:
    """What ``bounds_options`` gave."""
    return Bounds(
        min_requests=options["min_requests"],
        max_error_increase=options["max_error_increase"],
        max_latency_ratio=options["max_latency_ratio"],
        for_s=for_s,
    )


def evidence_options(command: _Command) -> _Command:
    """``--reason``, ``--evaluation`` and ``--force``."""
    for option in (
        click.option(
            "--force", is_flag=True, help="Although the agent is pinned, or has another canary."
        ),
        click.option(
            "--evaluation",
            metavar="FILE",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="What the decision rests on: its name and sha256 go into the audit trail.",
        ),
        click.option("--reason", metavar="TEXT", help="Why; goes into the audit trail."),
    ):
        command = option(command)
    return command


def change_of(
    command: str, reason: str | None = None, evaluation: Path | None = None, *, force: bool = False
) -> Change:
    """What the audit trail is to say."""
    evidence: dict[str, Any] = {} if reason is None else {"reason": reason}
    if evaluation is not None:
        evidence["evaluation"] = {
            "file": evaluation.name,
            "sha256": durable.sha256_file(evaluation),
        }
    return Change(current_user(), command, evidence=evidence, force=force)


def move(
    registry: Registry,
    agent: str,
    version: int,
    change: Change,
    server: str | None,
    *,
    now: bool = False,
    watch: Bounds | None = None,
) -> None:
    """On the server where one is named, else on disk; see below."""
    if server is not None:
        move_on_server(registry, agent, version, change, server, now=now, watch=watch)
        return
    if watch is not None:
        raise ConfigError("--watch is for a running server: name it with --server URL")
    move_on_disk(registry, agent, version, change)


def move_on_disk(registry: Registry, agent: str, version: int, change: Change) -> None:
    """Move ``CURRENT`` and say so, and which running server was not told."""
    registry.verify(agent, version)
    offline = replace(change, evidence={**change.evidence, "offline": True})
    before = registry.move(agent, version, offline)
    if before == version:
        told = f"{agent}: v{version} is in use already in {registry.root}; nothing was changed"
    else:
        told = f"{agent}: {_origin(before)} -> v{version} in {registry.root}"
    click.echo(f"{told}; {_untold(registry)}")


def _untold(registry: Registry) -> str:
    who = server_of(registry.root)
    return f"{printable(who)} was not told (--server URL)" if who else "no server was told"


def move_on_server(
    registry: Registry,
    agent: str,
    version: int,
    change: Change,
    server: str,
    *,
    now: bool = False,
    watch: Bounds | None = None,
) -> None:
    """Let the running server load, probe, serve and note the version, and say what it did.

    ``now``: for episodes that keep an older version, too. ``watch``: it goes back by itself.

    Raises:
        ServerError: it is down, or stopped at a step; the old version still serves.
        ConfigError: it serves another folder than the one named.
    """
    registry.verify(agent, version)
    require_server(server)
    with GatewayClient(server, adapters_dir=registry.root) as client:
        result = client.swap(agent, version, change, now=now, watch=watch)
    on_disk = registry.current(agent)
    if on_disk != version:
        raise ConfigError(
            f"{server} serves {agent}@v{version} now, and {registry.root} says {_origin(on_disk)}:"
            " the server was started with another folder; name that one (--adapters)"
        )
    _tell(result)


def require_server(url: str) -> None:
    """Say what to do when nothing answers.

    Raises:
        ServerError: nothing does.
    """
    with new_client({}) as http:
        try:
            call(http, "GET", f"{root_url(url)}/health", timeout_s=10.0)
        except AnswerError:
            return  # it runs; what is wrong with it the swap will say
        except NoAnswerError as error:
            raise ServerError(
                f"{error}; start `marft-agents serve`, name it with --server URL, or change the"
                " version in use without a server: --offline (swap), no --server (adapters)"
            ) from error


def _origin(version: int | None) -> str:
    return "nothing" if version is None else f"v{version}"


def probed(probe: dict[str, Any]) -> str:
    """What a probe found, as the end of a line."""
    line = ""
    if probe["error"] is not None:
        line += f"; served log-probabilities equal the trainer's to {probe['error']:.1e}"
    if probe["effect"] > 0:
        return line + f"; it differs from the base's by {probe['effect']:.3g}"
    return line + "; it is untrained and answers exactly as the base does"


def _tell(result: dict[str, Any]) -> None:
    line = f"{result['agent']}: {_origin(result['from'])} -> v{result['to']}"
    if result["from"] == result["to"]:
        line = f"{result['agent']}: v{result['to']} serves already and was probed again"
    if result.get("prepared"):
        line += ", which was loaded and probed before"
    line += probed(result["probe"])
    if moved := result.get("moved"):
        line += f"; {episodes(moved)} move over at their next call"
    if kept := result.get("leases"):
        old = _origin(result["from"])
        line += f"; {episodes(kept)} keep {old} until they end (--now moves them over)"
    click.echo(line)
    if watch := result.get("watch"):
        _tell_watch(result, watch)


def _tell_watch(result: dict[str, Any], watch: dict[str, Any]) -> None:
    old, before = _origin(result["from"]), watch["seen"]["incumbent"]["requests"]
    click.echo(
        f"  compared for {duration(watch['remaining_s'])} with {requests(before)} that {old}"
        f" answered before; it goes back to {old} by itself if it is worse"
    )
    if before < _FEW:
        click.echo(f"  NOTE that is too few to judge by: {_FEW} at least are needed")
