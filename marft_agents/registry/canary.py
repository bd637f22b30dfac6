"""The version that answers a share of an agent's episodes, beside the one in use.

Invariant: ``<agent>/CANARY`` is there exactly while a canary runs, and is replaced in one step; it
holds all that a restarted server needs to go on with it. It is never guessed: an unreadable one is
an error for whoever needs to know, and stopping the canary takes it away.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from marft_agents.errors import RegistryError

CANARY_FILE = "CANARY"
MIN_REQUESTS = 50
MAX_ERROR_INCREASE = 0.02
MAX_LATENCY_RATIO = 1.5
FOR_S = 1800.0
_LONGEST_S = 30 * 86400.0
Then = Literal["tell", "promote", "stop"]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Bounds(BaseModel):
    """How much worse than the version in use a version may be, and how it is judged.

    ``max_error_increase``: of the share of failed requests, from 0 to 1. ``max_latency_ratio``: of
    the time until a stream's first token, and of the time per further token.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    min_requests: Annotated[int, Field(ge=20, le=1_000_000)] = MIN_REQUESTS
    """Of each of the two, before anything is judged."""
    max_error_increase: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = (
        MAX_ERROR_INCREASE
    )
    max_latency_ratio: Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)] = (
        MAX_LATENCY_RATIO
    )
    for_s: Annotated[_Positive, Field(le=_LONGEST_S)] = FOR_S
    """Seconds until it has stood the test."""


class CanaryPlan(BaseModel):
    """What ``CANARY`` holds. ``key`` says which episodes: a larger share of it has those, too."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Annotated[int, Field(ge=1)]
    share: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
    key: Annotated[str, Field(min_length=1, max_length=64)]
    since: AwareDatetime
    by: str
    bounds: Bounds = Bounds()
    then: Then = "tell"
    """What to do when it has stood the test."""
    passed: bool = False

    def told(self) -> dict[str, Any]:
        """For the audit trail."""
        told = self.bounds.model_dump()
        return {"share": self.share, "key": self.key, "then": self.then, **told}


def read_canary(path: Path) -> CanaryPlan | None:
    """The plan in a file; ``None`` when there is no file.

    Raises:
        RegistryError: it is unreadable.
    """
    try:
        return CanaryPlan.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise RegistryError(
            f"cannot read {path} ({str(error).splitlines()[0]}); marft-agents adapters canary"
            f" {path.parent.name} --stop takes it away"
        ) from error
