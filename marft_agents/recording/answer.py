"""The body of a response: kept as it came, and read when somebody asks what it says.

Invariant: taking a piece costs next to nothing, for the application waits for it; reading is done
once, mostly on the log's thread. Everything that came before the question is in the answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import cast

from marft_agents.recording.events import StreamReader
from marft_agents.recording.lines import Line, parsed
from marft_agents.recording.reply import Reply, completion, error_text
from marft_agents.schema import JsonDict

_REASON = b'"finish_reason":'
_GIVEN = (b'"finish_reason":"', b'"finish_reason": "')


class Answer:
    """What a server sends to one attempt; ``expected``: choices asked for.

    ``read`` and ``problem`` are for one thread at a time.
    """

    def __init__(self, *, streaming: bool, expected: int = 1, echo: bool = False) -> None:
        self.expected = expected
        self.over = False
        self._reader = StreamReader(expected, echo=echo) if streaming else None
        if streaming:
            self._unread: deque[Line | bytes] = deque()
            """Lines, and whole events."""
        self._pieces: list[bytes] = []
        self._reply: Reply | None = None
        self._reasons = 0
        """Choices that were seen to end, as far as that shows without reading."""

    def add(self, data: bytes) -> None:
        """A piece of a reply that is no stream."""
        self._pieces.append(data)

    def take(self, lines: Sequence[Line]) -> None:
        """Lines of a stream."""
        self._unread.extend(lines)
        for line in lines:
            if line.data is not None:
                self._reasons += sum(map(line.text.count, _GIVEN))

    def take_events(self, data: bytes) -> None:
        """Whole events of a stream, of one line each."""
        self._unread.append(data)
        self._reasons += data.count(_GIVEN[0])

    def end(self, rest: Iterable[Line] = ()) -> None:
        """Nothing more will come; ``rest``: a line without an end."""
        if self._reader is not None:
            self._unread.extend(rest)
        elif self._pieces:
            self._pieces = [b"".join(self._pieces)]
            self._reasons = self._pieces[0].count(_REASON)
        self.over = True

    @property
    def body(self) -> bytes:
        """The bytes of a reply that is no stream, so far."""
        return b"".join(self._pieces)

    @property
    def seems_finished(self) -> bool:
        """Whether every choice asked for seems to have ended."""
        return self._reasons >= self.expected

    @property
    def has_one_choice(self) -> bool:
        """Whether that is certain without reading: each choice has its reason to end."""
        return self.expected == 1 and self.over and self._reasons == 1

    def read(self) -> Reply | None:
        """What the reply says so far; ``None`` for one in one piece that is not over, or no JSON.

        Raises:
            Exception: whatever a bug in here raises.
        """
        if self._reader is not None:
            over = self.over
            for _ in range(len(self._unread)):
                self._reader.take_next(self._unread.popleft())
            if over and self._reply is None:
                self._reader.end()
                self._reply = self._reader.reply
            return self._reader.reply
        if self._reply is None and self.over:
            body = parsed(self.body)
            if isinstance(body, dict):
                self._reply = completion(cast("JsonDict", body), self.expected)
                self._pieces = []
        return self._reply

    def problem(self) -> str | None:
        """Why a reply that is over, and was accepted, is none."""
        reply = self.read()
        if reply is None:
            return "the reply is not JSON"
        if self._reader is not None or reply.choices:
            return reply.error
        return reply.error or "the reply has no choices"

    def refusal(self) -> str:
        """What a server says that did not accept the request."""
        raw = self.body
        body = parsed(raw)
        return error_text(body) if isinstance(body, dict) else raw.decode("utf-8", "replace")
