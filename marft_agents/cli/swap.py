"""``marft-agents swap``: let an agent answer from another version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from marft_agents.errors import ServerError
from marft_agents.registry import Registry, current_user
from marft_agents.schema import adapter_slug
from marft_agents.serving.calls import AnswerError, NoAnswerError, call, new_client
from marft_agents.serving.client import root_url
from marft_agents.serving.gateway_client import GatewayClient

_DEFAULT_SERVER = "http://127.0.0.1:8000"


def _require_server(url: str) -> None:
    with new_client({}) as http:
        try:
            call(http, "GET", f"{root_url(url)}/health", timeout_s=10.0)
        except AnswerError:
            return  # it runs; what is wrong with it the swap will say
        except NoAnswerError as error:
            raise ServerError(
                f"{error}; start `marft-agents serve`, name it with --server URL, or change the"
                " version in use without a server: --offline"
            ) from error


def _tell(result: dict[str, Any]) -> None:
    probe: dict[str, Any] = result["probe"]
    origin = f"v{result['from']}" if result["from"] is not None else "nothing"
    line = f"{result['agent']}: {origin} -> v{result['to']}"
    if result["from"] == result["to"]:
        line = f"{result['agent']}: v{result['to']} serves already and was probed again"
    if probe["error"] is not None:
        line += f"; served log-probabilities equal the trainer's to {probe['error']:.1e}"
    if probe["effect"] > 0:
        line += f"; it differs from the base's by {probe['effect']:.3g}"
    else:
        line += "; it is untrained and answers exactly as the base does"
    click.echo(line)


@click.command(name="swap")
@click.argument("agent")
@click.option(
    "--adapters",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("adapters"),
    show_default=True,
    help="The registry's folder.",
)
@click.option("--version", type=click.IntRange(min=1), help="Default: the highest version.")
@click.option("--server", metavar="URL", default=_DEFAULT_SERVER, show_default=True)
@click.option("--offline", is_flag=True, help="Only change the version in use; no server is told.")
def command(agent: str, adapters: Path, version: int | None, server: str, offline: bool) -> None:
    """Let AGENT answer from a published adapter version, without a break for running requests."""
    registry = Registry(adapters)
    slug = adapter_slug(agent)
    wanted = version or max(registry.versions(slug), default=1)
    registry.verify(slug, wanted)
    if offline:
        before = registry.current(slug)
        registry.promote(slug, wanted, by=current_user(), evidence={"offline": True})
        origin = f"v{before}" if before is not None else "nothing"
        click.echo(f"{slug}: {origin} -> v{wanted} in {registry.root}; no server was told")
        return
    _require_server(server)
    with GatewayClient(server, adapters_dir=adapters) as client:
        _tell(client.swap(slug, wanted, by=current_user()))
