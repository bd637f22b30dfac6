"""Every record on disk: the events of a log, episodes made of them, and adapter versions.

Invariant: a record is frozen, carries ``schema_version``, and is built only through its model.
``None`` means "not known" or "never scored"; it is never replaced by zero.
"""

from __future__ import annotations

from marft_agents.schema.adapters import (
    CRITIC_ADAPTER,
    RESERVED_NAMES,
    AdapterManifest,
    BaseModelInfo,
    Probe,
    adapter_slug,
    adapter_slugs,
    parse_served_name,
    served_name,
)
from marft_agents.schema.episode import Episode
from marft_agents.schema.events import (
    ACTION_KINDS,
    EVENT,
    LARGEST_REWARD,
    SCHEMA_VERSION,
    AnyEvent,
    EditEvent,
    EndReason,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    HumanEvent,
    JsonDict,
    LogprobMode,
    Record,
    RewardEvent,
    Sampling,
    ToolEvent,
    Turn,
    TurnKind,
    are_ids,
    are_logprobs,
)

__all__ = [
    "ACTION_KINDS",
    "CRITIC_ADAPTER",
    "EVENT",
    "LARGEST_REWARD",
    "RESERVED_NAMES",
    "SCHEMA_VERSION",
    "AdapterManifest",
    "AnyEvent",
    "BaseModelInfo",
    "EditEvent",
    "EndReason",
    "Episode",
    "EpisodeEnded",
    "EpisodeStarted",
    "Event",
    "HumanEvent",
    "JsonDict",
    "LogprobMode",
    "Probe",
    "Record",
    "RewardEvent",
    "Sampling",
    "ToolEvent",
    "Turn",
    "TurnKind",
    "adapter_slug",
    "adapter_slugs",
    "are_ids",
    "are_logprobs",
    "parse_served_name",
    "served_name",
]
