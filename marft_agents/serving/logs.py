"""The lines that a server writes of its requests and swaps.

Invariant: a request is one line when it has ended, with the id that its answer bore, the turns it
was recorded as and the version and replica that answered; never a prompt, a reply or a key.
"""

from __future__ import annotations

import logging
from typing import Any

from marft_agents.serving.log_lines import Told, say
from marft_agents.serving.swap_events import SwapEvent
from marft_agents.serving.visits import Visit

_access = logging.getLogger("marft_agents.serving.access_log")
_PROBES = frozenset({"/health", "/ready", "/metrics"})


def log_visit(visit: Visit) -> None:
    """The line of one request; those of probes that found everything well are ``debug``."""
    status = visit.status or 0
    level = logging.WARNING if status >= 500 or visit.status is None else logging.INFO
    if visit.path in _PROBES and status < 400:
        level = logging.DEBUG
    if _access.isEnabledFor(level):  # made here, as nobody asks which line of code has logged it
        told = Told(_visit_fields(visit))
        _access.handle(logging.LogRecord(_access.name, level, __file__, 0, told, (), None))


def _visit_fields(visit: Visit) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "event": "request",
        "id": visit.id,
        "asked_id": visit.asked_id,
        "client": visit.client,
        "peer": visit.peer,
        "method": visit.method,
        "path": visit.path,
        "status": visit.status,
        "seconds": visit.seconds,
        "episode": visit.episode,
        "turns": visit.turns,
        "problem": visit.problem,
    }
    outcome = visit.outcome
    if outcome is not None:
        fields |= {
            "client": outcome.client,
            "agent": outcome.route.agent,
            "version": outcome.route.version,
            "replica": outcome.replica,
            "episode": visit.episode or outcome.episode,
            "first_s": outcome.first_s,
            "prompt_tokens": outcome.prompt_tokens,
            "completion_tokens": outcome.completion_tokens,
            "left": outcome.left or None,
            "problem": outcome.problem or visit.problem,
        }
    return fields


def log_swap(event: SwapEvent) -> None:
    """The line of one step of a swap or a preparation, or of its end."""
    say(
        event.what if event.whole else "swap_step",
        logging.INFO if event.result == "ok" else logging.WARNING,
        agent=event.agent,
        version=event.version,
        **{"from": event.origin},
        by=event.by,
        step=event.step,
        replica=event.replica,
        result=event.result,
        seconds=event.seconds,
        problem=event.problem,
    )
