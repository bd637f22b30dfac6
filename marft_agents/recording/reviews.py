"""What is said about an episode from outside: rewards, and texts put in place of a turn's.

Invariant: it may come any time, by the episode's id alone, also from another process. What cannot
count as a reward is kept as refused and never as a number.
"""

from __future__ import annotations

from typing import Any

from marft_agents.errors import RewardError
from marft_agents.recording.clean import as_text
from marft_agents.recording.core import Core
from marft_agents.schema import EditEvent, RewardEvent


def give_edit(core: Core, episode_id: str, turn_id: str, text: str, editor: str | None) -> None:
    """Log that a turn's text was replaced: it is no sample of the policy any more."""
    with core.safety.guard("log an edit"):
        core.emit(
            EditEvent(
                time=core.clock(),
                episode_id=as_text(episode_id),
                turn_id=as_text(turn_id),
                text=as_text(text),
                editor=None if editor is None else as_text(editor),
            )
        )


def reward_event(
    core: Core,
    episode_id: str,
    value: Any,
    *,
    agent: Any,
    turn_id: Any,
    source: Any,
) -> RewardEvent:
    """A reward as the log keeps it: ``refused`` for a value or a name that cannot count."""
    names: dict[str, object] = {"agent": agent, "turn_id": turn_id}
    wrong = [
        f"{name} is a {type(given).__name__}, not a name"
        for name, given in names.items()
        if given is not None and not isinstance(given, str)
    ]
    fields: dict[str, Any] = {
        "time": core.clock(),
        "episode_id": as_text(episode_id) or "unnamed",
        "agent": None if wrong else agent,
        "turn_id": None if wrong else turn_id,
        "source": as_text(source),
    }
    if wrong:
        return RewardEvent(**fields, refused=wrong[0])
    try:
        return RewardEvent(**fields, value=_plain_number(value))
    except Exception as error:  # an object of the app's that fails when it is looked at
        problem = f"a {type(value).__name__} that cannot be read ({type(error).__name__})"
        return RewardEvent(**fields, refused=problem)


def give_reward(
    core: Core,
    episode_id: str,
    value: Any,
    *,
    agent: str | None,
    turn_id: str | None,
    source: str,
) -> None:
    """Log a reward. Only a real number (or bool, or ``None``: not scored) counts.

    Raises:
        RewardError: for any other value, or a name that is no text, when strict; it is logged as
            refused first.
    """
    event = reward_event(core, episode_id, value, agent=agent, turn_id=turn_id, source=source)
    core.emit(event)
    if event.refused is not None:
        message = (
            f"reward of episode {event.episode_id!r} refused: {event.refused};"
            " give a finite number, a bool, or None for not scored, and names as text"
        )
        if core.safety.strict:
            raise RewardError(message)
        core.safety.warn_once("reward", message)


def _plain_number(value: Any) -> Any:
    """Scalars of numpy and torch as Python numbers; everything else unchanged."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) in ((), None):
        try:
            return item()
        except Exception:
            return value
    return value
