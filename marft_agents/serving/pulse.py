"""Whether an engine that says it is well still generates.

Invariant: an engine is asked for a token of ours only while requests wait for it and none of them
had a byte for long, and again only after as long. One that answered, sent a byte to anybody or has
counted new tokens meanwhile is busy; only one that did nothing of that seems to hang.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal, Protocol

from marft_agents.serving.calls import AnswerError, NoAnswerError
from marft_agents.serving.log_lines import say
from marft_agents.serving.threads import in_thread

Found = Literal["answered", "busy", "hangs"]


class Waited(Protocol):
    """What requests wait for."""

    @property
    def silent_s(self) -> float: ...


class Asked(Protocol):
    """Where the engine is asked."""

    def one_token(self, model: str, timeout_s: float) -> None: ...

    def tokens_counted(self) -> float | None: ...


class Pulse:
    """Of one replica.

    Args:
        silence_s: without a byte of any reply for so long, the engine is asked; 0: never.
        token_s: longest wait for the token.
        now: seconds that never go back.
    """

    def __init__(
        self,
        name: str,
        silence_s: float,
        token_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.found: Counter[Found] = Counter()
        """How often it was asked, by what came of it."""
        self._name = name
        self._silence_s = silence_s
        self._token_s = token_s
        self._now = now
        self._lived = -math.inf

    async def feel(self, upstream: Waited, client: Asked, model: str) -> str | None:
        """Why the engine seems to hang; ``None`` while it does not.

        Args:
            model: a name that the engine has listed.

        Raises:
            ServerError: it cannot be reached, or fails by itself.
        """
        silent = upstream.silent_s
        since_s = min(silent, self._now() - self._lived)
        if not self._silence_s or since_s < self._silence_s:
            return None
        found = await self._ask(upstream, client, model, silent)
        self.found[found] += 1
        level = logging.WARNING if found == "hangs" else logging.INFO
        say("silence", level, replica=self._name, seconds=round(silent, 1), result=found)
        if found != "hangs":
            self._lived = self._now()
            return None
        return (
            f"it generates nothing: no request has had a byte for {silent:.0f} s, and one of ours"
            f" for a single token no answer in {self._token_s:g} s"
        )

    async def _ask(self, upstream: Waited, client: Asked, model: str, silent: float) -> Found:
        counted = await in_thread(client.tokens_counted)
        try:
            await in_thread(client.one_token, model, self._token_s)
        except AnswerError as error:
            if error.status >= 500:
                raise
        except NoAnswerError as error:
            if not error.timed_out:
                raise
            more = counted is not None and await in_thread(client.tokens_counted) != counted
            return "busy" if more or upstream.silent_s < silent else "hangs"
        return "answered"
