"""Talk to a running gateway as its operator.

Invariant: whatever goes wrong is one error that says what still serves or what to do.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from marft_agents.errors import ConfigError, ServerError, SwapError
from marft_agents.registry import Change
from marft_agents.serving.calls import AnswerError, NoAnswerError, call, json_object, new_client
from marft_agents.serving.client import root_url
from marft_agents.serving.control import read_operator_key


class GatewayClient:
    """Operator's client; the key is given, or read from the server's adapters folder.

    Raises:
        ConfigError: when neither gives a key.
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
        self.url = root_url(url)
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

    def swap(self, agent: str, version: int, change: Change | None = None) -> dict[str, Any]:
        """Serve ``version`` for ``agent``; ``change`` is for the audit trail.

        Returns:
            agent, from, to, probe, unloaded.

        Raises:
            SwapError: when the swap was refused or failed; the old version still serves.
            ServerError: when the server is down.
        """
        told = dataclasses.asdict(change or Change())
        body = {name: value for name, value in told.items() if value is not None}
        body |= {"agent": agent, "version": version}
        url = f"{self.url}/marft/swap"
        try:
            answer = call(self._http, "POST", url, body=body, timeout_s=self.swap_timeout_s)
        except AnswerError as error:
            if error.status in (409, 502):
                raise SwapError(error.detail) from error
            raise
        except NoAnswerError as error:
            raise ServerError(f"{error}; is marft-agents serve running at {self.url}?") from error
        result = json_object(answer)
        if not isinstance(result.get("probe"), dict):
            raise ServerError(f"{url} answered as no `marft-agents serve` does; is it one?")
        return result
