"""The running server of a ``finetune``: checked before training, given the new versions after it.

Invariant: a server that could not take what will be trained (another base, other limits, another
adapters folder) is refused before anything is trained.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from marft_agents.cli._text import say
from marft_agents.errors import ConfigError, MarftError, ServerError
from marft_agents.registry import Change, Registry, current_user, describe_base
from marft_agents.schema import adapter_slug
from marft_agents.serving import GatewayClient
from marft_agents.serving.calls import NoAnswerError

if TYPE_CHECKING:
    from marft_agents.training import ServerLimits
    from marft_agents.training.results import AdapterResult

COMMAND = "finetune"


@dataclass(frozen=True)
class Server:
    """A running gateway, checked before training."""

    url: str
    client: GatewayClient
    state: Mapping[str, Any]

    @property
    def limits(self) -> ServerLimits:
        """What its engine takes."""
        from marft_agents.training import ServerLimits

        modules: Any = self.state.get("target_modules")
        slots: Any = self.state.get("max_loras")
        return ServerLimits(
            int(self.state["max_lora_rank"]),
            modules or None,
            slots if isinstance(slots, int) else None,
            of_server=True,
        )

    def prepare(self, versions: Mapping[str, int]) -> tuple[bool, str | None]:
        """Get new versions ready, so that their aliases move one right after the other.

        A single one is as well swapped as it is.

        Returns:
            Whether they are, and what is to be said if they cannot be.

        Raises:
            ServerError: when one of them could not be swapped; nothing has moved.
        """
        if len(versions) < 2:
            return False, None
        why = self.client.prepare_all(versions)
        return why is None, why and f"{why}; they are swapped one after the other"

    def swap(self, adapter: str, version: int, *, prepared: bool = False) -> None:
        """Serve a new version; one that is ``prepared`` waits for no old one to be unloaded.

        Raises:
            ServerError: when it cannot; the old version still serves.
        """
        change = Change(current_user(), COMMAND)
        if prepared:
            self.client.swap(adapter, version, change, wait=False)
        else:
            self.client.swap(adapter, version, change)


def connect(stack: ExitStack, url: str, key_env: str | None, output: Path, model: str) -> Server:
    """The server's client, after comparing its base and limits with the run's.

    Raises:
        ConfigError, ServerError: it is down, or serves something else.
    """
    key = None
    if key_env is not None:
        key = os.environ.get(key_env)
        if not key:
            raise ConfigError(f"--operator-key-env: the variable {key_env} is not set")
    client = stack.enter_context(GatewayClient(url, operator_key=key, adapters_dir=output))
    try:
        state = client.state()
    except NoAnswerError as error:
        raise ServerError(
            f"{error}; start `marft-agents serve`, or leave out --server and swap later"
        ) from error
    served: Any = state.get("base")
    rank: Any = state.get("max_lora_rank")
    if not isinstance(served, dict) or not isinstance(rank, int):
        raise ServerError(
            f"{url} answers, but not as `marft-agents serve` of this version does; name its address"
        )
    served, ours = cast("dict[str, Any]", served), describe_base(model)
    if served.get("fingerprint") != ours.fingerprint:
        raise ServerError(
            f"{url} serves the base {served.get('name')} ({str(served.get('fingerprint'))[:12]}),"
            f" and --model is {ours.name} ({ours.fingerprint[:12]}); give the base that is served"
        )
    return Server(url, client, state)


def require_same_adapters(server: Server, output: Path) -> None:
    """Training while the app runs needs one folder of adapters: served here, published there.

    Raises:
        ConfigError: the server does not serve the versions in use in ``output``.
    """
    registry = Registry(output)
    agents: Any = server.state.get("agents")
    served = cast("dict[str, dict[str, Any]]", agents) if isinstance(agents, dict) else {}
    for adapter in registry.agents():
        ours = registry.current(adapter)
        if ours is None:
            continue
        theirs = served.get(adapter, {}).get("current")
        if theirs != ours:
            what = "nothing" if theirs is None else f"version {theirs}"
            raise ConfigError(
                f"{server.url} serves {what} for {adapter!r}, and version {ours} is in use in"
                f" {output}; name the folder that the server was started with (--output), or"
                " restart `marft-agents serve` with it"
            )


def pins(output: Path) -> dict[str, int]:
    """Pinned version of every adapter that is pinned."""
    registry = Registry(output)
    found = ((adapter, registry.pinned(adapter)) for adapter in registry.agents())
    return {adapter: version for adapter, version in found if version is not None}


def require_unpinned(output: Path, agents: Mapping[str, str]) -> None:
    """Training while the app runs needs every new version in use.

    Raises:
        ConfigError: an adapter is pinned or has a canary, and none of ``agents`` (the setting)
            freezes it.
    """
    from marft_agents.training.roles import UNTRAINED_ROLES

    still = {adapter_slug(a) for a, adapter in agents.items() if adapter in UNTRAINED_ROLES}
    for adapter, version in pins(output).items():
        if adapter not in still:
            raise ConfigError(
                f"{adapter!r} is pinned to version {version} in {output}, and every iteration of"
                f" --online puts a new one in use; take the pin off (marft-agents adapters pin"
                f" {adapter} --remove --adapters {output}), or set `agents: {{{adapter}: frozen}}`"
            )
    registry = Registry(output)
    for adapter in registry.agents():
        canary = None if adapter in still else registry.canary(adapter)
        if canary is not None:
            raise ConfigError(
                f"version {canary.version} of {adapter!r} is a canary, and every iteration of"
                f" --online puts a new version in use; end it first (marft-agents adapters canary"
                f" {adapter} --stop --server URL)"
            )


def swap_all(
    adapters: Iterable[AdapterResult], server: Server, pinned: Collection[str] = ()
) -> tuple[dict[str, str], MarftError | None]:
    """Swap every new version in; what is pinned or could not be swapped keeps its old one.

    All are prepared first. What that fails at, its swap says, and the others go on.
    """
    new = {adapter.adapter: adapter.version for adapter in adapters}
    swapped = {adapter: "pinned" for adapter in new if adapter in pinned}
    prepared, failure = False, None
    wanted = {adapter: version for adapter, version in new.items() if adapter not in pinned}
    with contextlib.suppress(ServerError):
        prepared, told = server.prepare(wanted)
        if told is not None:
            say(told)
    for adapter, version in wanted.items():
        try:
            server.swap(adapter, version, prepared=prepared)
            swapped[adapter] = "yes"
        except ServerError as error:
            swapped[adapter] = "failed"
            failure = failure or error
    return swapped, failure
