"""``marft-agents logs``: what has to be done with logs beside learning from them.

Invariant: each subcommand is a file of its own, imported when it is named; the log named as source
is never changed.
"""

from __future__ import annotations

from marft_agents.cli._subcommands import Subcommands

SUBCOMMANDS = {
    "compact": "Merge segments into few files, without what is there twice.",
    "export": "Write the log in a format that other tools read.",
    "import": "Make a log of what another program recorded.",
    "stats": "Count events, tokens, turns and bytes.",
    "validate": "Check every line, and name each that is wrong.",
}

command = Subcommands("logs", SUBCOMMANDS, help="Count, check, merge, export and import logs.")
