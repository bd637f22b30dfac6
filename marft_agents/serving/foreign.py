"""Whether what runs at ``--server`` can be an engine of ours.

Invariant: another gateway, or an engine that takes no adapters, is one error that says what is
there and what to do, before anything is asked of it that it could not do.
"""

from __future__ import annotations

from marft_agents.errors import ConfigError
from marft_agents.serving.client import EngineClient

_NO_LORA = "LoRA is not enabled"


def require_engine(client: EngineClient) -> None:
    """Refuse another gateway, and an engine that loads no adapters while it runs.

    Raises:
        ConfigError: saying which, and what to do.
        ServerError: it does not answer.
    """
    if client.is_gateway():
        raise ConfigError(
            f"{client.url} is a gateway of marft-agents, not an engine; give --server the address"
            " of an engine (that gateway's /ready names its replicas), or let applications use it"
            f" as it is: base_url {client.url}/v1"
        )
    if not client.loads_adapters():
        raise ConfigError(no_adapters(client.url, "it has no route /v1/load_lora_adapter"))


def no_adapters(url: str, seen: str) -> str:
    """What to tell of an engine that takes no adapters, as was ``seen``."""
    return (
        f"the engine at {url} takes no adapters: {seen}; start it with --enable-lora and the"
        " variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, or leave out --server, and serve starts"
        " one"
    )


def is_without_lora(error: Exception) -> bool:
    """Whether vLLM says that it was started without room for adapters."""
    return _NO_LORA in str(error)
