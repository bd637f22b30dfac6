"""How many requests are let in at once.

Invariant: a request is counted from ``enter`` until its one ``leave``; what is beyond the limit is
told when to come again and never queued without end.
"""

from __future__ import annotations

from marft_agents.serving.access import Client


class Ticket:
    """One request that was let in."""

    def leave(self) -> None:
        """It has ended; safe to call again."""


class Admission:
    """The limits of one gateway."""

    def enter(self, client: Client) -> Ticket:
        """Let a request in.

        Raises:
            Refusal: 429 with ``Retry-After``.
        """
        del client
        return Ticket()
