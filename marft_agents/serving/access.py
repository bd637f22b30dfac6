"""Who may ask for what.

Invariant: keys are compared in constant time and never named in an answer or a log. Control routes
answer to this machine only, whatever the key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from starlette.requests import Request

from marft_agents.serving.refusals import require_api_key, require_operator

Role = Literal["application", "operator"]


@dataclass(frozen=True, slots=True)
class Client:
    """Whose key a request bears; ``name`` is for metrics and logs."""

    name: str
    role: Role


ANYBODY = Client("anybody", "application")


class Access:
    """The keys of one gateway. Without ``api_key`` applications need none."""

    def __init__(self, operator_key: str, api_key: str | None = None) -> None:
        self._operator_key = operator_key
        self._api_key = api_key

    def application(self, request: Request) -> Client:
        """Who asks for a model's answer.

        Raises:
            Refusal: 401 for a wrong or missing key.
        """
        require_api_key(request, self._api_key)
        return ANYBODY if self._api_key is None else Client("application", "application")

    def operator(self, request: Request) -> Client:
        """Who asks for a change of what is served.

        Raises:
            Refusal: 401 for a wrong or missing key, 403 from another machine.
        """
        require_operator(request, self._operator_key)
        return Client("operator", "operator")
