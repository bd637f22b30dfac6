"""``marft-agents logs validate``: every line that is wrong, one line each.

Invariant: exit code 0 says that nothing was found, 1 that something was, 2 that it cannot be told.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from marft_agents.cli._amounts import Finite
from marft_agents.cli._text import say
from marft_agents.log.checking import LARGEST_LINE, Finding, check


@click.command("validate")
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--largest-line",
    metavar="MIB",
    type=Finite(min=0, min_open=True),
    default=LARGEST_LINE / 2**20,
    show_default=True,
    help="Name lines with more than this.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a finding, then a summary.")
def command(logs: tuple[Path, ...], largest_line: float, as_json: bool) -> int:
    """Check every line of LOGS (files, or folders of *.jsonl).

    Damage, newer formats, duplicates, ids and log-probabilities of different lengths, names of
    unknown or later turns, rewards for nobody, missing starts and ends, order, and size. Exits with
    0 when nothing was found, 1 when something was, 2 when the log cannot be read.
    """

    def tell(finding: Finding) -> None:
        say(json.dumps(_as_json(finding)) if as_json else " ".join(str(finding).split()))

    seen = check(*logs, tell=tell, largest_line=round(largest_line * 2**20))
    if as_json:
        say(json.dumps({"summary": seen._asdict()}))
    else:
        say(
            f"{seen.findings or 'no'} finding{'' if seen.findings == 1 else 's'}"
            f" in {seen.events} events of {seen.episodes} episodes"
        )
    return 1 if seen.findings else 0


def _as_json(finding: Finding) -> dict[str, str | int | None]:
    return {
        "file": str(finding.file),
        "line": finding.line,
        "episode_id": finding.episode,
        "what": finding.what,
    }
