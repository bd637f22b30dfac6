"""The order in which an episode's turns are credited, and which turns are actions.

    D(a_i, a_j) = 1  ⇒  a_i comes before a_j

D is observed: ``Turn.depends_on`` lists the turns whose output was in the prompt. Among the orders
that respect D the one nearest to completion order is taken, so an episode recorded in order keeps
its order.

An *action* is a call whose output moves the team: kind ``act`` or ``reflect``, and answered.
Selection calls, summaries, guards and failed calls are part of the state (the critic's transcript
shows their effect) but they are no step of the recursion and carry no advantage.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from marft_agents.errors import LogError
from marft_agents.schema import ACTION_KINDS, Turn


def is_action(turn: Turn) -> bool:
    """Whether the turn is a step of the advantage recursion (external agents' turns are)."""
    return turn.kind in ACTION_KINDS and turn.error is None


def dependency_order(turns: Sequence[Turn]) -> list[Turn]:
    """Turns in completion order, moved only where a dependency asks for it.

    Dependencies on turns of other episodes are ignored.

    Raises:
        LogError: when turns depend on each other in a circle.
    """
    completed = sorted(turns, key=lambda t: (t.index, t.time))
    position = {t.turn_id: k for k, t in enumerate(completed)}
    if all(position.get(d, -1) < k for k, turn in enumerate(completed) for d in turn.depends_on):
        return completed
    waits: dict[int, set[int]] = {}
    unblocks: dict[int, list[int]] = {}
    for k, turn in enumerate(completed):
        waits[k] = {position[d] for d in turn.depends_on if d in position}
        for earlier in waits[k]:
            unblocks.setdefault(earlier, []).append(k)
    ready = [k for k, blockers in waits.items() if not blockers]
    order: list[Turn] = []
    while ready:
        k = heapq.heappop(ready)
        order.append(completed[k])
        for later in unblocks.get(k, ()):
            waits[later].discard(k)
            if not waits[later]:
                heapq.heappush(ready, later)
    if len(order) < len(completed):
        stuck = sorted(completed[k].turn_id for k, blockers in waits.items() if blockers)
        raise LogError(f"turns depend on each other in a circle: {', '.join(stuck[:5])}")
    return order
