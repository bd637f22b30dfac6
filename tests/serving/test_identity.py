"""Which agent and episode a request names, and whether it is recorded at all."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request

from marft_agents.serving.access import Access
from marft_agents.serving.identity import Caller, caller_of, checked_agent, checked_episode
from marft_agents.serving.refusals import Refusal, split_key


def request(path: Any = None, **headers: str) -> Request:
    raw = [(k.replace("_", "-").lower().encode(), v.encode("latin-1")) for k, v in headers.items()]
    return Request({"type": "http", "headers": raw, "path_params": path or {}})


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


PATH = {"agent": "planner", "episode": "e1"}
HEADERS = {"x_marft_agent": "coder", "x_marft_episode": "e2"}
KEY = bearer("k:marft:agent=tester,episode=e3")


@pytest.mark.parametrize(
    ("given", "agent", "episode"),
    [
        (request(PATH), "planner", "e1"),
        (request(PATH, **KEY), "planner", "e1"),
        (request({"episode": "e1"}, **KEY), "tester", "e1"),
        (request({"agent": "planner"}, **KEY), "planner", "e3"),
        (request({"episode": "e1"}, x_marft_agent="coder"), "coder", "e1"),
        (request({"agent": "planner"}, x_marft_episode="e2"), "planner", "e2"),
        (request(**HEADERS, x_marft_record="gateway"), "coder", "e2"),
        (request(**HEADERS, **KEY, x_marft_record="gateway"), "coder", "e2"),
        (request(**KEY), "tester", "e3"),
        (request(**bearer("marft:agent=tester,episode=e3")), "tester", "e3"),
        (request(**bearer("marft: episode=e3 , agent=the%20tester")), "the tester", "e3"),
        (request(**bearer("marft:episode=e3")), None, "e3"),
        (request(x_marft_episode="e%3A2", x_marft_record="gateway"), None, "e:2"),
        (request({"agent": "Küche", "episode": "a"}), "Küche", "a"),
    ],
)
def test_who_asks(given: Request, agent: str | None, episode: str) -> None:
    assert caller_of(given) == Caller(agent, episode, recorded=True)


@pytest.mark.parametrize(
    "given",
    [
        request(),
        request(**HEADERS),
        request(x_marft_episode="e2"),
        request(**bearer("sk-123")),
        request(PATH, **HEADERS),
        request(**HEADERS, **KEY),
    ],
    ids=["plain", "app records", "episode only", "plain key", "path, app records", "key, app"],
)
def test_who_is_left_alone(given: Request) -> None:
    assert not caller_of(given).recorded


def test_record_all_takes_what_apps_record_themselves() -> None:
    assert caller_of(request(**HEADERS), record_all=True) == Caller(
        "coder", "e2", recorded=True, by_app=True
    )
    with pytest.raises(Refusal, match="this server records every call, and it names no episode"):
        caller_of(request(), record_all=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (request({"agent": "planner"}), "names no episode.*base_url http.*X-Marft-Episode"),
        (request(**bearer("marft:agent=a")), "names no episode"),
        (request(x_marft_record="gateway"), "names no episode"),
        (request(x_marft_record="yes"), "the only value is gateway"),
        (request(**bearer("marft:planner")), "marft:agent=<agent>,episode=<episode>"),
        (request(**bearer("k:marft:agent=a,run=3")), "marft:agent=<agent>,episode=<episode>"),
        (request(**bearer("k:marft:")), "marft:agent=<agent>,episode=<episode>"),
        (request({"agent": "..", "episode": "e"}), "is no agent's name"),
        (request({"agent": "a", "episode": ".."}), "is no episode id"),
        (request(PATH, x_marft_kind="speak"), "one of act, select"),
    ],
)
def test_what_is_refused(given: Request, message: str) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        caller_of(given)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "name", ["", "..", "a/b", "a\\b", "a\n", " a", "a\x00", "é", "x" * 129, "-a"]
)
def test_no_episode_id(name: str) -> None:
    with pytest.raises(Refusal):
        checked_episode(name)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "a\nb", " a", "\u200b", "x" * 129])
def test_no_agent_name(name: str) -> None:
    with pytest.raises(Refusal):
        checked_agent(name)


@pytest.mark.parametrize("name", ["e1", "2026-11-29T10:00:00+02:00", "a.b_c~d@e", "x" * 128])
def test_episode_ids(name: str) -> None:
    assert checked_episode(name) == name


@pytest.mark.parametrize(
    ("model", "agent"),
    [("writer", "writer"), ("writer@v3", "writer"), (" Writer ", "Writer"), ("", None), (7, None)],
)
def test_the_model_names_the_agent_that_nothing_else_does(model: Any, agent: str | None) -> None:
    assert Caller(episode="e").named(model).agent == agent
    assert Caller("planner", "e").named(model).agent == "planner"


def test_a_kind_can_be_told() -> None:
    assert caller_of(request(PATH, x_marft_kind="select")).kind == "select"


def test_keys_split_at_their_last_mark() -> None:
    assert split_key("k:marft:agent=a") == ("k", "agent=a")
    assert split_key("marft:agent=a") == ("", "agent=a")
    assert split_key("k") == ("k", None)
    assert split_key("a:marft:b:marft:agent=a") == ("a:marft:b", "agent=a")


@pytest.mark.parametrize(
    ("token", "good"),
    [
        ("k", True),
        ("k:marft:agent=a,episode=e", True),
        ("marft:agent=a,episode=e", False),
        ("x:marft:agent=a,episode=e", False),
        (":marft:agent=a", False),
        ("k:marft", False),
    ],
)
def test_the_key_is_asked_for_before_who_speaks(token: str, good: bool) -> None:
    asked = request(**bearer(token))
    access = Access("operator", "k")
    if good:
        assert access.application(asked).name == "application"
        return
    with pytest.raises(Refusal) as caught:
        access.application(asked)
    assert caught.value.status == 401
