"""Which model an agent's call is sent to.

Invariant: the app's own choice stands unless the recorder was told otherwise; an agent that no
model is served for stays where it is, and that is said once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from marft_agents.errors import ConfigError
from marft_agents.recording.core import Core
from marft_agents.schema import adapter_slug

if TYPE_CHECKING:
    from marft_agents.recording.exchange import Exchange


def routed_model(core: Core, agent: str, exchange: Exchange) -> str | None:
    """The model to send this agent's call to; ``None``: the one that the app asked for."""
    if core.models != "auto":
        return core.models.get(agent)
    stays = f"marft-agents: agent {agent!r} stays with the model that the app names, because"
    try:
        name = adapter_slug(agent)
    except ConfigError as error:
        core.safety.warn_once(("route", agent), f"{stays} {error}")
        return None
    verdict, url = exchange.verdict, exchange.base_url
    if verdict is not None and name in verdict.models:
        return name
    if exchange.asked_model == name:
        return None
    why = f"{url} lists no model {name!r}"
    if verdict is None or not verdict.models:
        why = f"the models of {url} are not known" + (f": {verdict.reason}" if verdict else "")
    core.safety.warn_once(
        ("route", agent, url),
        f"{stays} {why}; serve it (marft-agents serve --agents {name}), or say where each agent"
        ' goes: MarftRecorder(models={"agent": "model"})',
    )
    return None
