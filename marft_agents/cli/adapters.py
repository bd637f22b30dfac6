"""``marft-agents adapters``: which versions there are, which is in use, and everything about it.

Invariant: a published version is never changed; what changes which one is in use, or removes one,
leaves a line in the audit trail.
"""

from __future__ import annotations

from marft_agents.cli._subcommands import Subcommands

SUBCOMMANDS = {
    "canary": "Try a version on a share of the episodes.",
    "export": "Copy a version into a folder for PEFT, with its model card.",
    "list": "Agents and versions: which is in use, pinned, served.",
    "pin": "Keep an agent at one version.",
    "prepare": "Load and probe a version ahead of its swap.",
    "promote": "Use a version, in a running server too.",
    "prune": "Delete old versions that nothing needs.",
    "rollback": "Go back to the version that was in use before.",
    "show": "All about one version: training, probe, files, audit trail.",
    "verify": "Check files, configurations and tensors; name what is broken.",
}

command = Subcommands(
    "adapters",
    SUBCOMMANDS,
    help="List, check, prepare, promote, pin, prune and export adapter versions.",
)
