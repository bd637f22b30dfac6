"""Recording: what agents said, exactly as the model server read and sampled it.

Invariant: the application runs the same with and without it. An integration says who speaks and
where an episode begins and ends; the capture under the SDK's HTTP client takes the tokens; a
daemon thread writes.

``MarftRecorder`` and ``EpisodeHandle`` are for applications; the rest is for integrations.
"""

from __future__ import annotations

from marft_agents.errors import ConfigError, IntegrationError, MissingExtraError
from marft_agents.recording.call import Call, Unseen
from marft_agents.recording.capture import Claim
from marft_agents.recording.clean import jsonable
from marft_agents.recording.distributions import KnownDistribution, installed_runtime
from marft_agents.recording.episode import LiveEpisode, describe_error
from marft_agents.recording.handle import EpisodeContext, EpisodeHandle, end_run
from marft_agents.recording.outlet import EventLog
from marft_agents.recording.own import Speaker
from marft_agents.recording.patches import Patches
from marft_agents.recording.recorder import MarftRecorder
from marft_agents.recording.redact import Redaction
from marft_agents.recording.stand_in import StandIn
from marft_agents.schema import EndReason, TurnKind

__all__ = [
    "Call",
    "Claim",
    "ConfigError",
    "EndReason",
    "EpisodeContext",
    "EpisodeHandle",
    "EventLog",
    "IntegrationError",
    "KnownDistribution",
    "LiveEpisode",
    "MarftRecorder",
    "MissingExtraError",
    "Patches",
    "Redaction",
    "Speaker",
    "StandIn",
    "TurnKind",
    "Unseen",
    "describe_error",
    "end_run",
    "installed_runtime",
    "jsonable",
]
