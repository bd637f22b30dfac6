"""Adapter versions on disk.

Invariant: ``<root>/<agent>/v0007/`` appears whole, by one rename, and is never changed or reused
afterwards. ``CURRENT`` names the version in use and is replaced in one step, by one process at a
time; ``PINNED``, where there is one, names the version that it is not moved away from, and
``CANARY`` the one that a share of the episodes gets; both are moved or ended by the same hand.
``audit.jsonl`` says who changed what, when, and on which evidence: every move of ``CURRENT`` is in
it once. A crash at any point leaves at most dot files, which readers ignore; the next change of
that agent makes up for a line that a crash kept from being written.
"""

from __future__ import annotations

from marft_agents.registry.marks import Marker
from marft_agents.registry.pointer import Mover
from marft_agents.registry.publishing import Publisher


class Registry(Publisher, Mover, Marker):
    """The folder ``adapters/``: versions per agent, which one is in use, and the audit trail."""
