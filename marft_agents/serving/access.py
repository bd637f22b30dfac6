"""Who may ask for what.

Invariant: keys are compared in constant time and never named in an answer or a log. A key opens the
routes of its own role alone. Control routes answer to this machine only, whatever the key.
"""

from __future__ import annotations

from starlette.requests import Request

from marft_agents.serving.keys import Client, Key, Keyring, Role, digest_of
from marft_agents.serving.refusals import Refusal, bearer_token, is_loopback, split_key
from marft_agents.serving.scope import name_client

ANYBODY = Client("anybody", "application")
_NO_KEY = "wrong or missing API key; send it as Authorization: Bearer <key>"
_NO_OPERATOR = "wrong or missing operator key; it is in .operator-key in the adapters folder"


class Access:
    """The keys of one gateway. Without any of role application, applications need none.

    ``operator_key`` is the server's own, beside those of role operator in ``keyring``.
    """

    def __init__(
        self, operator_key: str, api_key: str | None = None, keyring: Keyring | None = None
    ) -> None:
        self._keyring = keyring or Keyring()
        self._operator = Keyring([Key(Client("operator", "operator"), digest_of(operator_key))])
        first = Key(Client("application", "application"), digest_of(api_key)) if api_key else None
        self._first = Keyring([first] if first is not None else ())
        self._needs_key = first is not None

    @property
    def needs_key(self) -> bool:
        """Whether applications need a key; once they do, they do though the last key goes."""
        self._needs_key = self._needs_key or self._keyring.has("application")
        return self._needs_key

    def application(self, request: Request) -> Client:
        """Who asks for a model's answer.

        Raises:
            Refusal: 401 for a wrong or missing key, 403 for one of another role.
        """
        if not self.needs_key:
            name_client(request, ANYBODY.name)
            return ANYBODY
        token = bearer_token(request)
        key, identity = split_key(token or "")
        client = self._find(request, token, key if identity is not None else None)
        if client is None:
            raise Refusal(401, _NO_KEY)
        return _with_role(client, "application")

    def operator(self, request: Request) -> Client:
        """Who asks for a change of what is served.

        Raises:
            Refusal: 401 for a wrong or missing key, 403 for one of another role or from another
                machine.
        """
        peer = request.client.host if request.client is not None else ""
        if not is_loopback(peer):
            raise Refusal(403, "control routes answer to this machine only")
        client = self._find(request, request.headers.get("x-marft-operator-key"))
        if client is None:
            raise Refusal(401, _NO_OPERATOR)
        return _with_role(client, "operator")

    def monitor(self, request: Request) -> Client:
        """Who looks at metrics: any key but an application's, once there is any key at all.

        Raises:
            Refusal: 401 for a wrong or missing key, 403 for an application's.
        """
        if not self.needs_key and not self._keyring.has("monitor"):
            return ANYBODY
        token = bearer_token(request) or request.headers.get("x-marft-operator-key")
        client = self._find(request, token)
        if client is None:
            raise Refusal(401, "wrong or missing key; metrics need one of role monitor or operator")
        if client.role == "application":
            raise _wrong_role(client, "monitor")
        return client

    def _find(self, request: Request, *tokens: str | None) -> Client | None:
        rings = (self._first, self._operator, self._keyring)
        found = [client for ring in rings if (client := ring.client(*tokens)) is not None]
        if not found:
            return None
        name_client(request, found[0].name)
        return found[0]


def _with_role(client: Client, role: Role) -> Client:
    if client.role != role:
        raise _wrong_role(client, role)
    return client


def _wrong_role(client: Client, role: Role) -> Refusal:
    return Refusal(
        403,
        f"the key {client.name!r} has the role {client.role}; this route asks for a key of role"
        f" {role}",
        code="wrong_role",
    )


__all__ = ["ANYBODY", "Access", "Client", "Role"]
