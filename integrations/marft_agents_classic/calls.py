"""A model call: ``OpenAIWrapper.create``, whoever made the wrapper.

Invariant: the app gets AutoGen's own result or exception. A call belongs to the agent whose reply
goes on; a wrapper that is not the speaker's own (a summary's, a guardrail's, a helper's inside a
capability) is told apart by what it is used for. A reply that made no request is said to be cached
or uncaptured, never passed off as sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from marft_agents.recording import Call, LiveEpisode, TurnKind, Unseen
from marft_agents_classic.seats import (
    KIND,
    SPEECH,
    Seat,
    Speech,
    own_speech,
    seat_of,
    stage,
)

_CACHE = ("cache", "cache_seed")


class PassedBy(list[Any]):
    """A wrapper's ``_config_list`` without its caches, while it records."""


def create(original: Callable[..., Any], wrapper: Any, config: dict[str, Any]) -> Any:
    """``OpenAIWrapper.create(wrapper, **config)``, recorded where a recorded agent makes it."""
    place = _place(config.get("agent"))
    if place is None:
        return original(wrapper, **config)
    seat, speech = place
    safety = seat.recorder.core.safety
    call = safety.attempt("begin a model call", lambda: _begin(seat, speech, wrapper, config))
    if call is None:
        return original(wrapper, **config)
    if not seat.recorder.core.keep_caches:
        with safety.guard("pass by a cache"):
            config = _uncached(seat, wrapper, config)
    try:
        with call.current():
            response = original(wrapper, **config)
    except BaseException as error:
        with safety.guard("record a failed call"):
            _finish(call, speech, seat, wrapper, config, error=error)
        raise
    with safety.guard("record a model call"):
        _finish(call, speech, seat, wrapper, config, response=response)
    return response


def _place(agent: Any) -> tuple[Seat, Speech | None] | None:
    """The seat and the reply that a call belongs to; ``None`` when it is none of ours."""
    here = SPEECH.get()
    seat = None if isinstance(agent, str) else seat_of(agent)
    if seat is None:
        while here is not None and not here.seat.active:
            here = here.outer
        return (here.seat, here) if here is not None else None
    speech = own_speech(seat.recorder, here)
    if here is None and len(seat.speaking) == 1:  # a thread without context
        (speech,) = seat.speaking.values()
    return seat, speech


def _begin(seat: Seat, speech: Speech | None, wrapper: Any, config: Mapping[str, Any]) -> Call:
    episode = speech.episode if speech else seat.recorder.current()
    if episode is None:
        seat.recorder.core.safety.warn_once(
            ("no run", seat.name),
            f"marft-agents: agent {seat.name!r} called its model outside of any recorded chat and"
            " the call is not recorded; put it inside `with recorder.episode():`",
        )
        return cast("Call", None)
    for sdk in sdk_clients(wrapper):
        seat.recorder.capture(sdk)
    kind, name, nested = _identity(seat, speech, wrapper, config.get("agent"))
    parent: tuple[str | None, str | None] = (None, None)
    if speech is not None:
        parent = (speech.seat.name, speech.cause()) if nested else speech.parent
    call = Call(
        episode,
        name,
        kind,
        selected_by=speech.selected_by if speech and kind == "act" and not nested else None,
        parent_agent=parent[0],
        parent_turn=parent[1],
    )
    if speech is not None:
        speech.calls.add(call)
    return call


def _identity(
    seat: Seat, speech: Speech | None, wrapper: Any, agent: Any
) -> tuple[TurnKind, str, bool]:
    """Kind and agent of a call, and whether it is a helper's inside the reply."""
    special = KIND.get()
    if special is not None:
        return (*special, special[0] == "summary" and speech is not None)
    if _is_guardrail(wrapper):
        return "guard", seat.name, False
    if speech is None or speech.seat is not seat:
        return seat.kind, seat.name, speech is not None
    if agent is None or isinstance(agent, str):
        own = wrapper is getattr(speech.agent, "client", None)
        return (seat.kind, seat.name, False) if own else ("summary", seat.name, False)
    if agent is not speech.agent:
        return "act", str(getattr(agent, "name", seat.name)), True
    return seat.kind, seat.name, False


def _is_guardrail(wrapper: Any) -> bool:
    formats = [getattr(client, "response_format", None) for client in wrapper._clients]
    return any(getattr(f, "__name__", None) == "GuardrailCheckResult" for f in formats)


def _uncached(seat: Seat, wrapper: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The same call past any cache. Entries of the config list beat what a call asks for."""
    entries = wrapper._config_list
    if any(entry.get(name) is not None for entry in entries for name in _CACHE):
        off = dict.fromkeys(_CACHE)
        plain = [{**e, **{k: None for k in off if k in e}} for e in entries]
        seat.patches.set(wrapper, "_config_list", PassedBy(plain))
    return {**config, **dict.fromkeys(_CACHE)}


def sdk_clients(wrapper: Any) -> Iterator[Any]:
    """The openai SDK objects under a wrapper, in each of the places where AutoGen keeps them."""
    for client in wrapper._clients:
        for name in ("_oai_client", "client", "_client"):
            sdk = getattr(client, name, None)
            if hasattr(sdk, "chat") and hasattr(getattr(sdk, "_client", None), "send"):
                yield sdk


def _finish(
    call: Call,
    speech: Speech | None,
    seat: Seat,
    wrapper: Any,
    config: Mapping[str, Any],
    *,
    response: Any = None,
    error: BaseException | None = None,
) -> None:
    unseen: Unseen | None = None
    last = call.exchanges[-1] if call.exchanges else None
    if not call.sent:
        unseen = _unseen(wrapper, config, response, seat.recorder.core.keep_caches)
    call.finish(error, unseen)
    if unseen is not None and error is None:
        _say(call, wrapper, cached=unseen.cached)
    if speech is not None:
        speech.calls.discard(call)
    if error is None and call.turn_ids:
        _remember(call, speech, seat, last.reply if last else None, unseen)


def _remember(
    call: Call, speech: Speech | None, seat: Seat, reply: Any, unseen: Unseen | None
) -> None:
    """What later replies of the episode refer to: the text, the tool calls, the selection."""
    text, calls = (unseen.text, unseen.tool_calls) if unseen else (None, None)
    if reply is not None and reply.choices:
        choice = next(iter(reply.choices.values()))
        text, calls = choice.text, choice.tool_calls
    turn_id = call.turn_ids[-len(reply.choices) if reply and reply.choices else -1]
    known = stage(call.episode)
    for tool_call in calls or ():
        if isinstance(tool_call.get("id"), str):
            known.calls[tool_call["id"]] = (turn_id, call.agent)
    if call.kind == "act":
        known.said[call.agent] = ((text or "").strip(), turn_id)
    if speech is None or speech.seat is not seat:
        return
    if (call.kind, call.agent) == (seat.kind, seat.name):
        speech.turns += call.turn_ids
    if call.kind == "select":
        manager = speech.around()
        while manager is not None and not manager.seat.manages:
            manager = manager.around()
        if manager is not None:
            manager.pending = (turn_id, text or "")


def _unseen(wrapper: Any, config: Mapping[str, Any], response: Any, kept: bool) -> Unseen:
    """A call without HTTP request, as far as AutoGen's objects tell."""
    text, calls = None, None
    for choice in getattr(response, "choices", None) or ():
        message: Any = getattr(choice, "message", None)
        text, calls = getattr(message, "content", None), getattr(message, "tool_calls", None)
        break
    else:
        text = getattr(response, "text", None)
    plain = [c.model_dump() if hasattr(c, "model_dump") else c for c in calls or ()]
    return Unseen(
        config.get("messages") or (),
        text if isinstance(text, str) else None,
        plain or None,
        cached=kept and _captured(wrapper),
    )


def _captured(wrapper: Any) -> bool:
    """Whether what the wrapper sends would be seen."""
    kinds = [type(client).__name__ for client in wrapper._clients]
    return any(True for _ in sdk_clients(wrapper)) and not any("Responses" in k for k in kinds)


def _say(call: Call, wrapper: Any, *, cached: bool) -> None:
    safety: Any = call.episode.core.safety
    if cached:
        safety.warn_once(
            ("cached", call.agent),
            f"marft-agents: agent {call.agent!r} was answered from a cache; cached replies are"
            " logged and never trained on, and after a swap the cache still answers with what the"
            " old adapter said; record without keep_caches",
        )
        return
    kinds = sorted({f"{type(c).__module__}.{type(c).__qualname__}" for c in wrapper._clients})
    safety.warn_once(
        ("uncaptured", *kinds),
        f"marft-agents: agent {call.agent!r} uses {', '.join(kinds)}, which asked for no chat"
        " completion through an openai SDK client; its turns are logged without tokens and cannot"
        " be trained on; use a config with base_url and no api_type or model_client_cls",
    )


__all__ = ["LiveEpisode", "PassedBy", "create", "sdk_clients"]
