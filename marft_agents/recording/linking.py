"""Which earlier outputs a prompt contained.

Invariant: a link goes only to a turn that was finished when the messages were sent. A message text
that was sent before an output existed cannot contain it, so each text is searched once, at first
sight. Three kinds of evidence are united: call ids, equal text (newest first, each output used
once, the speaker's name breaks ties), and text inside text (longer than 8 characters; neither
system text nor a speaker selection proves anything there).
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from marft_agents.schema import JsonDict

MIN_SUBSTRING = 9
MIN_TRUNCATED = 32
_MOST_WAITING = 1000


@dataclass(frozen=True, slots=True)
class Output:
    """Text that a turn brought into the conversation."""

    turn_id: str
    agent: str
    text: str
    quotable: bool
    """False for speaker selections, whose short answers occur everywhere."""


class Ledger:
    """Outputs of one episode's finished turns, in order of completion.

    What is to be done may be handed in by any thread, costs it nothing, and is done in that order
    by whoever asks first: as a rule the log's thread.
    """

    def __init__(self) -> None:
        self.reading = threading.RLock()
        """Held by whoever catches up, or reads a reply of this episode."""
        self._later: deque[Callable[[], None]] = deque()
        self._order: dict[str, int] = {}
        self._outputs: list[Output] = []
        self._by_text: dict[str, list[Output]] = {}
        self._known: set[tuple[str, str]] = set()
        self._by_call: dict[str, str] = {}
        self._quotes: dict[str, list[str]] = {}

    def after_fork(self) -> None:
        """The lock may have been held by a thread that a forked child does not have."""
        self.reading = threading.RLock()

    def later(self, action: Callable[[], None]) -> None:
        """Have ``action`` called in its turn; it may use ``note`` and ``found`` only."""
        self._later.append(action)
        if len(self._later) > _MOST_WAITING:  # nobody asks: the log takes no events
            self.catch_up()

    def catch_up(self) -> None:
        """Do what was handed in so far.

        Raises:
            Exception: what an action raised; those after it are left for the next time.
        """
        with self.reading:
            while self._later:
                self._later.popleft()()

    def add(
        self,
        turn_id: str,
        agent: str,
        text: str | None,
        *,
        call_ids: Iterable[str] = (),
        quotable: bool = True,
    ) -> None:
        """Register what a turn said; again with another ``text`` for a framework's rendering."""
        calls = tuple(call_ids)
        self.later(lambda: self.note(turn_id, agent, text, calls, quotable))

    def link(
        self,
        messages: Sequence[Mapping[str, Any]],
        delivered: Iterable[tuple[str, str]] = (),
    ) -> list[str]:
        """Turn ids that ``messages`` contain, oldest first.

        ``delivered`` holds (text, turn id) of framework messages that were handed to the speaker;
        one counts when its text is really among the messages sent.
        """
        with self.reading:
            self.catch_up()
            return self.found(messages, delivered)

    def note(
        self,
        turn_id: str,
        agent: str,
        text: str | None,
        call_ids: Iterable[str] = (),
        quotable: bool = True,
    ) -> None:
        """``add`` at once."""
        self._order.setdefault(turn_id, len(self._order))
        for call_id in call_ids:
            self._by_call[call_id] = turn_id
        key = (text or "").strip()
        if not key or (turn_id, key) in self._known:
            return
        self._known.add((turn_id, key))
        output = Output(turn_id, agent, key, quotable)
        self._by_text.setdefault(key, []).append(output)
        self._outputs.append(output)

    def found(
        self, messages: Sequence[Mapping[str, Any]], delivered: Iterable[tuple[str, str]] = ()
    ) -> list[str]:
        """``link`` at once."""
        found: set[str] = set()
        used: set[Output] = set()
        sent: list[str] = []
        for message in reversed(messages):
            found.update(self._by_call[c] for c in _call_ids(message) if c in self._by_call)
            text = message_text(message).strip()
            if not text:
                continue
            sent.append(text)
            quotes = self._quoted(text) if message.get("role") != "system" else []
            if text in self._by_text:
                found.update(self._equal(text, message.get("name"), used))
            else:
                found.update(quotes)
        for text, turn_id in delivered:
            key = text.strip()
            if key and turn_id in self._order and any(key in other for other in sent):
                found.add(turn_id)
        return sorted(found, key=self._order.__getitem__)

    def _equal(self, text: str, name: Any, used: set[Output]) -> list[str]:
        free = [o for o in self._by_text[text] if o not in used]
        if not free:
            return []
        output = next((o for o in reversed(free) if o.agent == name), free[-1])
        used.add(output)
        return [output.turn_id]

    def _quoted(self, text: str) -> list[str]:
        if text not in self._quotes:
            newest: dict[str, str] = {}
            for output in self._outputs:
                if output.quotable and _inside(output.text, text):
                    newest[output.text] = output.turn_id
            self._quotes[text] = list(newest.values())
        return self._quotes[text]


def _inside(output: str, text: str) -> bool:
    if len(output) >= MIN_SUBSTRING and output in text:
        return True
    return len(text) >= MIN_TRUNCATED and (output.startswith(text) or output.endswith(text))


def _call_ids(message: Mapping[str, Any]) -> list[str]:
    ids = [message.get("tool_call_id")]
    calls = message.get("tool_calls")
    for call in cast("list[Any]", calls) if isinstance(calls, list) else []:
        if isinstance(call, Mapping):
            ids.append(cast("Mapping[str, Any]", call).get("id"))
    return [i for i in ids if isinstance(i, str) and i]


def message_text(message: Mapping[str, Any]) -> str:
    """The readable text of a wire message, of any content form."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        texts = [cast("JsonDict", p).get("text") for p in parts if isinstance(p, dict)]
        return "\n".join(t for t in texts if isinstance(t, str))
    return "" if content is None else json.dumps(content, default=str)
