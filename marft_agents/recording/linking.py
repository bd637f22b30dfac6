"""Which earlier outputs a prompt contained.

Invariant: a link goes only to a turn that was finished when the messages were sent. A message text
that was sent before an output existed cannot contain it, so each text is searched once, at first
sight. Three kinds of evidence are united: call ids, equal text (newest first, each output used
once, the speaker's name breaks ties), and text inside text (longer than 8 characters; neither
system text nor a speaker selection proves anything there).

The newest turns are held (``MOST_TURNS``, ``MOST_TEXT``). Once older ones are let go, a prompt in
which a part is not explained by what is held may have contained them, and its links say so.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from marft_agents.recording.newest import ENTRY, MOST_NAMES, MOST_TEXT, MOST_TURNS
from marft_agents.schema import JsonDict

MIN_SUBSTRING = 9
MIN_TRUNCATED = 32
_MOST_WAITING = 1000
MOST_SOUGHT = 4 * MOST_TURNS


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """Text that a turn brought into the conversation; each is one of its own."""

    turn_id: str
    agent: str
    text: str
    quotable: bool
    """False for speaker selections, whose short answers occur everywhere."""


class Links(NamedTuple):
    """Turn ids that a prompt contained, oldest first.

    ``complete``: False where it may have contained outputs that are no longer held.
    """

    turn_ids: list[str]
    complete: bool = True


NO_LINKS = Links([])


@dataclass(slots=True)
class _Held:
    """What is held of one turn; ``order``: its place among all that ever were."""

    order: int
    outputs: list[Output] = field(default_factory=list[Output])
    calls: list[str] = field(default_factory=list[str])
    size: int = ENTRY


class _Quoted(NamedTuple):
    """(turn id, order) of turns whose text was inside another text."""

    turns: tuple[tuple[str, int], ...]
    complete: bool


class _Sought:
    """What was found in a text at first sight, for the texts that were sent last."""

    def __init__(self) -> None:
        self.let_go = False
        """Whether a text that was seen may count as new."""
        self._found: OrderedDict[tuple[int, int], _Quoted] = OrderedDict()
        self._turns = 0

    def get(self, text: str) -> _Quoted | None:
        key = hash(text), len(text)
        quoted = self._found.get(key)
        if quoted is not None:
            self._found.move_to_end(key)
        return quoted

    def put(self, text: str, quoted: _Quoted) -> None:
        """Keep what was found in a new text."""
        self._found[hash(text), len(text)] = quoted
        self._turns += len(quoted.turns)
        while len(self._found) > MOST_SOUGHT or self._turns > MOST_NAMES:
            if len(self._found) == 1:
                break
            self.let_go = True
            _, oldest = self._found.popitem(last=False)
            self._turns -= len(oldest.turns)


class Ledger:
    """Outputs of one episode's newest finished turns, in order of completion.

    What is to be done may be handed in by any thread, costs it nothing, and is done in that order
    by whoever asks first: as a rule the log's thread.
    """

    def __init__(self, most_turns: int = MOST_TURNS, most_text: int = MOST_TEXT) -> None:
        self.reading = threading.RLock()
        """Held by whoever catches up, or reads a reply of this episode."""
        self.let_go = False
        """Whether outputs of this episode are no longer held."""
        self._most_turns, self._most_text = most_turns, most_text
        self._later: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._count = self._size = 0
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._outputs: dict[Output, None] = {}
        self._by_text: dict[str, list[Output]] = {}
        self._by_call: dict[str, str] = {}
        self._sought = _Sought()

    def after_fork(self) -> None:
        """The lock may have been held by a thread that a forked child does not have."""
        self.reading = threading.RLock()

    def later(self, action: Callable[..., None], *args: Any) -> None:
        """Have ``action`` called in its turn; it may use ``note`` and ``found`` only."""
        self._later.append((action, args))
        if len(self._later) > _MOST_WAITING:  # nobody asks: the log takes no events
            self.catch_up()

    def catch_up(self) -> None:
        """Do what was handed in so far.

        Raises:
            Exception: what an action raised; those after it are left for the next time.
        """
        with self.reading:
            while self._later:
                action, args = self._later.popleft()
                action(*args)

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
        self.later(self.note, turn_id, agent, text, tuple(call_ids), quotable)

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
            return self.found(messages, delivered).turn_ids

    def note(
        self,
        turn_id: str,
        agent: str,
        text: str | None,
        call_ids: Iterable[str] = (),
        quotable: bool = True,
    ) -> None:
        """``add`` at once."""
        held = self._held.get(turn_id)
        if held is None:
            held = self._held[turn_id] = _Held(self._count)
            self._count, self._size = self._count + 1, self._size + held.size
        for call_id in call_ids:
            self._by_call[call_id] = turn_id
            held.calls.append(call_id)
            self._grow(held, call_id)
        key = (text or "").strip()
        if key and not any(output.text == key for output in held.outputs):
            output = Output(turn_id, agent, key, quotable)
            self._by_text.setdefault(key, []).append(output)
            self._outputs[output] = None
            held.outputs.append(output)
            self._grow(held, key)
        while len(self._held) > self._most_turns or self._size > self._most_text:
            if len(self._held) == 1:
                break
            self._let_oldest_go()

    def found(
        self, messages: Sequence[Mapping[str, Any]], delivered: Iterable[tuple[str, str]] = ()
    ) -> Links:
        """``link`` at once."""
        found: dict[str, int] = {}
        used: set[Output] = set()
        sent: list[str] = []
        explained = True
        for message in reversed(messages):
            for call_id in _call_ids(message):
                turn_id = self._by_call.get(call_id)
                explained = explained and turn_id is not None
                if turn_id is not None:
                    found[turn_id] = self._held[turn_id].order
            text = message_text(message).strip()
            if text:
                sent.append(text)
                explained = self._explain(message, text, found, used) and explained
        for text, turn_id in delivered:
            key = text.strip()
            if key and any(key in other for other in sent):
                held = self._held.get(turn_id)
                explained = explained and held is not None
                if held is not None:
                    found[turn_id] = held.order
        return Links(sorted(found, key=found.__getitem__), explained or not self._forgets)

    @property
    def _forgets(self) -> bool:
        """Whether something was let go that a prompt may contain, or may have contained first."""
        return self.let_go or self._sought.let_go

    def _explain(
        self, message: Mapping[str, Any], text: str, found: dict[str, int], used: set[Output]
    ) -> bool:
        """Add what a message's text contains; whether nothing else can be in it."""
        system = message.get("role") == "system"
        quoted = None if system else self._quoted(text)
        if text in self._by_text:
            name = message.get("name")
            output = self._equal(text, name, used)
            if output is None:
                return False
            found[output.turn_id] = self._held[output.turn_id].order
            return name in (None, output.agent)
        if quoted is None:
            return True
        found.update(quoted.turns)
        return quoted.complete

    def _equal(self, text: str, name: Any, used: set[Output]) -> Output | None:
        free = [o for o in self._by_text[text] if o not in used]
        if not free:
            return None
        output = next((o for o in reversed(free) if o.agent == name), free[-1])
        used.add(output)
        return output

    def _quoted(self, text: str) -> _Quoted:
        quoted = self._sought.get(text)
        if quoted is None:
            newest: dict[str, str] = {}
            for output in self._outputs:
                if output.quotable and _inside(output.text, text):
                    newest[output.text] = output.turn_id
            turns = tuple((turn_id, self._held[turn_id].order) for turn_id in newest.values())
            quoted = _Quoted(turns, not self._forgets)
            self._sought.put(text, quoted)
        return quoted

    def _grow(self, held: _Held, text: str) -> None:
        held.size += ENTRY + len(text)
        self._size += ENTRY + len(text)

    def _let_oldest_go(self) -> None:
        turn_id, held = self._held.popitem(last=False)
        self.let_go = True
        self._size -= held.size
        for call_id in held.calls:
            if self._by_call.get(call_id) == turn_id:
                del self._by_call[call_id]
        for output in held.outputs:
            del self._outputs[output]
            same = self._by_text[output.text]
            same.remove(output)
            if not same:
                del self._by_text[output.text]


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
