"""marft-agents: turn the multi-agent application you already have into one that learns."""

from __future__ import annotations

from marft_agents.errors import MarftError
from marft_agents.log import Retention
from marft_agents.recording import MarftRecorder, Redaction

__version__ = "0.1.0"

__all__ = ["MarftError", "MarftRecorder", "Redaction", "Retention", "__version__"]
