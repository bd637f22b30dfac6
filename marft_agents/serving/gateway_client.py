"""Talk to a running gateway as its operator.

Invariant: whatever goes wrong is one error that says what still serves or what to do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from marft_agents.errors import ConfigError, ServerError, SwapError
from marft_agents.registry import Bounds, Change
from marft_agents.registry.canary import Then
from marft_agents.serving.calls import AnswerError, NoAnswerError, call, json_object, new_client
from marft_agents.serving.client import checked_url, root_url
from marft_agents.serving.control import read_operator_key

_AT_ONCE = 5000


class NoRoomError(SwapError):
    """The engines have no slot for one version more."""


class NotOfferedError(ServerError):
    """The server is of a version that does not know what was asked for."""


class GatewayClient:
    """Operator's client; the key is given, or read from the server's adapters folder.

    Raises:
        ConfigError: when neither gives a key, or ``url`` is no address.
    """

    def __init__(
        self,
        url: str,
        *,
        operator_key: str | None = None,
        adapters_dir: str | Path | None = None,
        timeout_s: float = 30.0,
        swap_timeout_s: float = 300.0,
    ) -> None:
        self.url = root_url(checked_url(url, "its key is read from its folder (--adapters)"))
        self.timeout_s = timeout_s
        self.swap_timeout_s = swap_timeout_s
        key = operator_key or read_operator_key(Path(adapters_dir or "adapters"))
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(
                "the operator key holds characters that no key of a server has; copy the line of"
                " .operator-key in the folder that the server was started with"
            )
        self._http = new_client({"X-Marft-Operator-Key": key})

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def state(self) -> dict[str, Any]:
        """Base, agents with their current and loaded versions, and the engine's limits.

        Raises:
            ServerError: when the server is down or refuses.
        """
        url = f"{self.url}/marft/state"
        return json_object(call(self._http, "GET", url, timeout_s=self.timeout_s))

    def swap(
        self,
        agent: str,
        version: int,
        change: Change | None = None,
        *,
        now: bool = False,
        watch: Bounds | None = None,
        wait: bool = True,
    ) -> dict[str, Any]:
        """Serve ``version`` for ``agent``; ``change`` is for the audit trail.

        Args:
            now: move over the episodes that keep an older version, too.
            watch: go back by itself when the version does worse than the one before did.
            wait: for the old version to be unloaded, 2 s at most; otherwise the call returns as
                soon as the new one answers.

        Returns:
            agent, from, to, probe, prepared, unloaded, leases, moved, and seconds by step.

        Raises:
            SwapError: when the swap was refused or failed; the old version still serves.
            ServerError: when the server is down.
        """
        more: dict[str, Any] = {"version": version} | ({"now": True} if now else {})
        if not wait:
            more["wait"] = False
        if watch is not None:
            more["watch"] = watch.model_dump()
        return self._change("swap", agent, change, more, sign="probe")

    def prepare(self, agent: str, version: int) -> dict[str, Any]:
        """Load and probe ``version`` beside the one in use, so that a swap to it takes no time.

        It gets no request, and is kept for a while only; said again, it is kept anew.

        Returns:
            agent, version, probe, seconds by step, ``until`` when it is kept and for how many
            seconds (``keep_s``), and ``already``: whether it was loaded and probed before.

        Raises:
            NoRoomError: the engines have no slot for it beside what they have.
            SwapError: it was refused or failed; what serves is as before.
            NotOfferedError: the server is of a version that does not prepare.
            ServerError: when the server is down.
        """
        try:
            return self._post("prepare", {"agent": agent, "version": version}, sign="until")
        except AnswerError as error:
            if error.status == 507:
                raise NoRoomError(error.detail) from error
            if error.status == 404:
                raise NotOfferedError(
                    f"{self.url} is of a version that cannot prepare; swap without"
                ) from error
            raise

    def prepare_all(self, versions: Mapping[str, int]) -> str | None:
        """Prepare a version of each agent, so that all can then be swapped at once.

        Returns:
            Why they are to be swapped one after the other instead, if they are: too few slots, or a
            server that cannot prepare.

        Raises:
            SwapError: one was refused or failed; what serves is as before.
            ServerError: when the server is down.
        """
        try:
            for agent, version in versions.items():
                self.prepare(agent, version)
        except NoRoomError as error:
            return f"not all new versions fit beside those in use ({error})"
        except NotOfferedError:
            return f"{self.url} is of a version that cannot prepare versions"
        return None

    def canary(
        self,
        agent: str,
        version: int,
        share: float,
        change: Change | None = None,
        *,
        bounds: Bounds | None = None,
        then: Then = "tell",
    ) -> dict[str, Any]:
        """Give ``version`` a ``share`` (0 to 1) of the episodes that begin from now on.

        Returns:
            agent, from, changed, and the canary as in :meth:`state`.

        Raises:
            SwapError: when it was refused or failed; nothing was changed.
            ServerError: when the server is down.
        """
        more: dict[str, Any] = {"version": version, "share": share, "then": then}
        more["bounds"] = (bounds or Bounds()).model_dump()
        return self._change("canary", agent, change, more, sign="changed")

    def stop_canary(
        self, agent: str, change: Change | None = None, *, now: bool = False
    ) -> dict[str, Any]:
        """End the agent's canary; ``version`` is ``None`` in the answer when it has none.

        Returns:
            agent, version, unloaded, and how many episodes (``leases``) keep it.

        Raises:
            SwapError: when the server cannot; the canary goes on.
            ServerError: when the server is down.
        """
        return self._change("canary/stop", agent, change, {"now": now}, sign="unloaded")

    def release(self, episodes: Sequence[str]) -> int:
        """Say that episodes have ended, so that no version is kept for them.

        Returns:
            How many of them kept one.

        Raises:
            ServerError: when the server is down or refuses.
        """
        released = 0
        for start in range(0, len(episodes), _AT_ONCE):
            body = {"episodes": list(episodes[start : start + _AT_ONCE])}
            url = f"{self.url}/marft/release"
            answer = call(self._http, "POST", url, body=body, timeout_s=self.timeout_s)
            released += int(json_object(answer).get("released", 0))
        return released

    def _change(
        self, what: str, agent: str, change: Change | None, more: dict[str, Any], *, sign: str
    ) -> dict[str, Any]:
        told = dataclasses.asdict(change or Change())
        body = {name: value for name, value in told.items() if value is not None}
        return self._post(what, body | {"agent": agent} | more, sign=sign)

    def _post(self, what: str, body: dict[str, Any], *, sign: str) -> dict[str, Any]:
        """Ask for a change; ``sign`` is what an answer of ours has."""
        url = f"{self.url}/marft/{what}"
        try:
            answer = call(self._http, "POST", url, body=body, timeout_s=self.swap_timeout_s)
        except AnswerError as error:
            if error.status in (409, 502):
                raise SwapError(error.detail) from error
            raise
        except NoAnswerError as error:
            if error.timed_out:
                raise ServerError(
                    f"{error}; it goes on there, and what came of it says"
                    f" marft-agents adapters list --server {self.url}"
                ) from error
            raise ServerError(f"{error}; is marft-agents serve running at {self.url}?") from error
        result = json_object(answer)
        if sign not in result:
            raise ServerError(f"{url} answered as no `marft-agents serve` does; is it one?")
        return result
