"""Serve adapter versions behind one address, and swap them while requests run. Loads no torch."""

from __future__ import annotations

from marft_agents.serving.child import ServerProcess
from marft_agents.serving.client import EngineClient, ServedModel
from marft_agents.serving.commands import (
    LOGPROBS_MODE,
    SAMPLING_DEFAULTS,
    EngineCommand,
    find_vllm,
    local_command,
    vllm_command,
)
from marft_agents.serving.gateway_client import GatewayClient
from marft_agents.serving.plan import ServeSettings
from marft_agents.serving.process import EngineProcess, GuardedProcess, free_port
from marft_agents.serving.server import serve

__all__ = [
    "LOGPROBS_MODE",
    "SAMPLING_DEFAULTS",
    "EngineClient",
    "EngineCommand",
    "EngineProcess",
    "GatewayClient",
    "GuardedProcess",
    "ServeSettings",
    "ServedModel",
    "ServerProcess",
    "find_vllm",
    "free_port",
    "local_command",
    "serve",
    "vllm_command",
]
