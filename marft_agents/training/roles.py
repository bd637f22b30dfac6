"""Which agent trains which adapter.

Invariant: an agent either trains exactly one adapter, or is ``frozen`` (answers, stays as it is)
or ``external`` (another provider's model: part of the state, never trained). Two agents share an
adapter only when the configuration says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from marft_agents.errors import ConfigError
from marft_agents.schema import adapter_slug, adapter_slugs

UNTRAINED_ROLES = ("frozen", "external")


def resolve_adapters(
    trainable: Iterable[str],
    mapping: Mapping[str, str],
    *,
    recorded: Iterable[str],
    published: Iterable[str],
) -> dict[str, str]:
    """Adapter, ``frozen`` or ``external`` for every agent that is recorded or named in ``mapping``.

    ``trainable`` are the recorded agents with at least one trainable turn; a recorded agent
    without one is listed only when the configuration names it.

    Raises:
        ConfigError: for an unknown agent, or a name that is no adapter's.
    """
    recorded = sorted(set(recorded))
    published = sorted(set(published))
    for agent, adapter in mapping.items():
        _check_known(agent, adapter, recorded, published)
    implied = adapter_slugs([a for a in sorted(set(trainable)) if a not in mapping])
    for agent, slug in implied.items():
        taken = next((a for a, s in mapping.items() if s == slug), None)
        if taken is not None:
            raise ConfigError(
                f"agent {agent!r} gives the adapter name {slug!r}, which `agents:` gives to"
                f" {taken!r}; name {agent!r} under `agents:` too (the same adapter, another one,"
                " frozen or external)"
            )
    return {**implied, **mapping}


def check_adapter_settings(settings: Iterable[str], known: Iterable[str]) -> None:
    """Refuse settings of an adapter that is not there.

    Args:
        settings: the keys of ``adapters:``.
        known: adapters that the run may train.

    Raises:
        ConfigError: naming the nearest adapter.
    """
    names = sorted(set(known) - set(UNTRAINED_ROLES))
    for adapter in settings:
        if adapter in names:
            continue
        near = get_close_matches(adapter, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"`adapters:` has settings of {adapter!r}, which is no adapter of this run"
            f" (known: {', '.join(names) or 'none'}){hint}"
        )


def _check_known(agent: str, adapter: object, recorded: list[str], published: list[str]) -> None:
    if not isinstance(adapter, str):
        raise ConfigError(
            f"`agents:` maps {agent!r} to {adapter!r}; give an adapter name, frozen or external"
        )
    if adapter not in UNTRAINED_ROLES and adapter_slug(adapter) != adapter:
        raise ConfigError(
            f"`agents:` maps {agent!r} to {adapter!r}, which is no adapter name;"
            f" write {adapter_slug(adapter)!r}"
        )
    if agent in recorded or agent in published or adapter in published:
        return
    known = list(dict.fromkeys([*recorded, *published]))
    near = get_close_matches(agent, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"`agents:` names {agent!r}, which neither the logs nor the adapters know"
        f" (known: {', '.join(known) or 'none'}){hint}"
    )
