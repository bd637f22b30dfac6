"""Who speaks in which episode, read from a request.

Invariant: each of agent and episode comes from the first place that names it: the path, the
``X-Marft-*`` headers, the API key; an agent that none of them names is the model's name. A name
that the log should not hold is refused, never repaired. An app that records itself sends both
headers and is left alone, so that no turn is recorded twice by accident.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast, get_args
from urllib.parse import unquote

from starlette.requests import Request

from marft_agents.schema import TurnKind, parse_served_name
from marft_agents.serving.refusals import Refusal, bearer_token, split_key

MAX_NAME = 128
_EPISODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+~-]{0,127}")
BY_URL = "/episodes/<episode>/agents/<agent>/v1"


@dataclass(frozen=True, slots=True)
class Caller:
    """What a request says of itself.

    ``recorded``: whether the gateway is to record it. ``by_app``: the app records it, too, and
    logs how its episodes begin and end.
    """

    agent: str | None = None
    episode: str | None = None
    kind: TurnKind = "act"
    recorded: bool = False
    by_app: bool = False
    parent_turn: str | None = None
    """The turn of the agent on whose behalf a nested call is made."""

    def named(self, model: Any) -> Caller:
        """With the model's name for an agent that is not named otherwise."""
        if self.agent is not None or not isinstance(model, str) or not model.strip():
            return self
        served = parse_served_name(model.strip())
        return replace(self, agent=served[0] if served else checked_agent(model.strip()))


def checked_episode(value: str) -> str:
    """An episode's id as the log keeps it; refused when it is none."""
    if not _EPISODE.fullmatch(value):
        raise Refusal(
            400,
            f"{value[:40]!r} is no episode id; use 1 to {MAX_NAME} of the characters"
            " A-Z a-z 0-9 _ . : @ + ~ - beginning with a letter, a digit or _",
        )
    return value


def checked_agent(value: str) -> str:
    """An agent's name as the log keeps it; refused when it is none."""
    bad = not value or len(value) > MAX_NAME or not value.isprintable() or value != value.strip()
    if bad or value in (".", "..") or "/" in value or "\\" in value:
        raise Refusal(
            400,
            f"{value[:40]!r} is no agent's name; use 1 to {MAX_NAME} printable characters without"
            " slashes and without spaces at either end",
        )
    return value


def caller_of(request: Request, *, record_all: bool = False) -> Caller:
    """The caller, with an agent that may still have to be ``named`` by the model.

    Raises:
        Refusal: for names that are none, and for a request that is to be recorded but names no
            episode.
    """
    path = cast("Mapping[str, str]", request.path_params)
    headers = _from_headers(request)
    key = _from_key(request)
    asked = request.headers.get("x-marft-record")
    if asked not in (None, "gateway"):
        raise Refusal(400, f"X-Marft-Record is {asked[:40]!r}; the only value is gateway")
    app_records = len(headers) == 2 and asked is None
    recorded = record_all or asked is not None or (bool(path or key) and not app_records)
    if not recorded:
        return Caller()
    agent, episode = (_first(name, path, headers, key) for name in ("agent", "episode"))
    if episode is None:
        raise Refusal(400, _no_episode(record_all and asked is None and not path and not key))
    return Caller(
        agent if agent is None else checked_agent(agent),
        checked_episode(episode),
        _kind(request),
        recorded=True,
        by_app=app_records,
        parent_turn=_parent_turn(request),
    )


def episode_of(request: Request) -> str | None:
    """The episode that a request names, recorded or not; ``None`` for none, or for no usable id."""
    path = cast("Mapping[str, str]", request.path_params)
    value = _first("episode", path, _from_headers(request), _from_key(request))
    return value if value is not None and _EPISODE.fullmatch(value) else None


def _first(name: str, *places: Mapping[str, str]) -> str | None:
    return next((place[name] for place in places if name in place), None)


def _from_headers(request: Request) -> dict[str, str]:
    named = {n: request.headers.get(f"x-marft-{n}") for n in ("agent", "episode")}
    return {name: unquote(value) for name, value in named.items() if value}


def _from_key(request: Request) -> dict[str, str]:
    """``agent=planner,episode=e1`` behind the key's mark."""
    _, told = split_key(bearer_token(request) or "")
    out: dict[str, str] = {}
    for part in (told or "").split(",") if told is not None else ():
        name, equals, value = part.strip().partition("=")
        if name not in ("agent", "episode") or not equals:
            raise Refusal(
                400,
                "the part of the API key behind marft: is not understood; write"
                " marft:agent=<agent>,episode=<episode> (one of them may be left out)",
            )
        out[name] = unquote(value)
    return out


def _kind(request: Request) -> TurnKind:
    kind = request.headers.get("x-marft-kind", "act")
    if kind not in get_args(TurnKind):
        known = ", ".join(get_args(TurnKind))
        raise Refusal(400, f"X-Marft-Kind is {kind[:40]!r}; it is one of {known}")
    return cast("TurnKind", kind)


def _parent_turn(request: Request) -> str | None:
    turn = request.headers.get("x-marft-parent-turn")
    if turn is not None and not _EPISODE.fullmatch(turn):
        raise Refusal(
            400,
            f"X-Marft-Parent-Turn is {turn[:40]!r}; send the X-Marft-Turn of the reply that began"
            " the nested chat",
        )
    return turn


def _no_episode(unasked: bool) -> str:
    who = "this server records every call" if unasked else "this call is to be recorded"
    return (
        f"{who}, and it names no episode, so nobody could tell which run it belongs to;"
        f" use base_url http://...{BY_URL} (POST /episodes gives one), the header X-Marft-Episode,"
        " or the API key marft:agent=<agent>,episode=<episode>"
    )
