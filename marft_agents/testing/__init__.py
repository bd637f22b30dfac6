"""Test kit for applications and integrations: a scripted model server, fakes, and a contract.

Invariant: everything is deterministic and in this process.
"""

from __future__ import annotations

from marft_agents.testing.contract import IntegrationContract, refused, without_model
from marft_agents.testing.fakes import BrokenLog, FakeClock, FakeIds, InMemoryLog
from marft_agents.testing.server import (
    END,
    Reply,
    Script,
    ScriptedServer,
    ServerRequest,
    completion_body,
    default_reply,
    stream_events,
    token_ids_of,
)

__all__ = [
    "END",
    "BrokenLog",
    "FakeClock",
    "FakeIds",
    "InMemoryLog",
    "IntegrationContract",
    "Reply",
    "Script",
    "ScriptedServer",
    "ServerRequest",
    "completion_body",
    "default_reply",
    "refused",
    "stream_events",
    "token_ids_of",
    "without_model",
]
