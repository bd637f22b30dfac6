"""``marft-agents keys``: a private file of keys for ``serve --keys``.

Invariant: the file never holds a key itself, only its SHA-256; a key is shown once, when made.
"""

from __future__ import annotations

from marft_agents.cli._subcommands import Subcommands

SUBCOMMANDS = {
    "list": "Show names, roles and limits.",
    "new": "Make a key and show it once.",
    "revoke": "Take a key back.",
}

command = Subcommands("keys", SUBCOMMANDS, help="Make, list and take back keys for a server.")
