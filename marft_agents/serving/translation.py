"""An engine's stream on its way to the client: counted, recorded, rewritten.

Invariant: the recorder has seen what the client sees, before the client does. A stream that breaks
off ends with an error event, so that it never looks like a whole reply.
"""

from __future__ import annotations

from collections.abc import Callable

from marft_agents.serving.passage import Passage
from marft_agents.serving.refusals import Refusal
from marft_agents.serving.rewrite import StreamRewriter
from marft_agents.serving.watch import Watch


class Translation:
    """Of one streamed reply; the passage ends with it.

    ``refusal``: what a client is told of an engine that broke off.
    """

    def __init__(
        self,
        passage: Passage,
        watch: Watch,
        rewriter: StreamRewriter,
        refusal: Callable[[Exception], Refusal],
    ) -> None:
        self._passage = passage
        self._watch = watch
        self._recorded = type(watch) is not Watch
        self._begun = False
        self._rewriter = rewriter
        self._refusal = refusal
        passage.left = True  # until the last chunk went out

    def feed(self, data: bytes) -> bytes:
        if not self._begun:
            self._begun = True
            self._passage.saw(data)
        if self._recorded:
            self._watch.feed(data)
        return self._rewriter.feed(data)

    def end(self, error: Exception | None) -> bytes:
        passage, rewriter = self._passage, self._rewriter
        if error is None:
            rest = rewriter.end()
            passage.left = False
            return rest
        refusal = self._refusal(error)
        passage.problem, passage.left = refusal.message, False
        self._watch.over(refusal.message)
        # The status is out; an error event keeps this from looking like a whole reply.
        return rewriter.broken() + b"data: " + bytes(refusal.response().body) + b"\n\n"

    def failed(self, mistake: Exception) -> None:
        self._passage.problem, self._passage.left = type(mistake).__name__, False

    def close(self) -> None:
        try:
            self._watch.over()
        finally:
            self._passage.end()
