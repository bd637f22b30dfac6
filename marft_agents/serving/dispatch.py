"""Send a request to an engine; for an engine that is dying or has lost adapters, to another one.

Invariant: a request is sent anew once for an engine that gave no answer or whose error is its last
word, and once where the engine does not know the adapter; never after a good status came.
"""

from __future__ import annotations

from starlette.requests import Request

from marft_agents.errors import MarftError
from marft_agents.serving.calls import NoAnswerError
from marft_agents.serving.fleet import Fleet, unready
from marft_agents.serving.keeper import Keeper
from marft_agents.serving.passage import Passage
from marft_agents.serving.refusals import Refusal
from marft_agents.serving.replica import Replica
from marft_agents.serving.supervisor import Supervisor
from marft_agents.serving.threads import in_thread
from marft_agents.serving.wire import Answer

_HEALTH_S = 1.0


class Dispatch:
    """Requests of one gateway on their way to its engines."""

    def __init__(self, fleet: Fleet, keeper: Keeper, supervisor: Supervisor | None = None) -> None:
        self._fleet = fleet
        self._keeper = keeper
        self._supervisor = supervisor

    async def send(self, request: Request, path: str, body: bytes, passage: Passage) -> Answer:
        """The answer of the passage's replica, or of the one that it has moved to.

        Raises:
            ClientDisconnect: when the client went away meanwhile.
            Refusal: when no engine answers.
        """
        answer = await self._post(request, path, body, passage)
        if answer.status_code != 404 or not await self._has_lost(passage):
            return answer
        answer.close()
        await self._regain(passage)
        return await passage.replica.upstream.post(path, body, request)

    async def _post(self, request: Request, path: str, body: bytes, passage: Passage) -> Answer:
        """The engine's answer; for an engine that is dying, once that of another."""
        first = passage.replica
        try:
            answer = await first.upstream.post(path, body, request)
            if answer.status_code < 500:
                return answer
            other = self._fleet.another(first, passage.episode)
            if other is None or not await self._is_dying(first):
                return answer
            answer.close()
        except Refusal as refusal:
            if refusal.status != 503:
                raise
            if self._supervisor is not None:
                self._supervisor.suspect(first)
            other = self._fleet.another(first, passage.episode)
            if other is None:
                raise
        passage.move(other)
        return await other.upstream.post(path, body, request)

    async def _is_dying(self, replica: Replica) -> bool:
        """Whether an error of the engine is its last word; one that answers late is not dying."""
        if self._supervisor is not None:
            self._supervisor.suspect(replica)
        if replica.upstream.death():
            return True
        try:
            await in_thread(replica.loader.client.health, _HEALTH_S)
        except NoAnswerError as error:
            return not error.timed_out
        except MarftError:
            return True
        return False

    async def _has_lost(self, passage: Passage) -> bool:
        """Whether the engine was restarted behind our back and knows no adapter any more."""
        try:
            listed = await in_thread(passage.replica.loader.listed)
        except MarftError:
            return False
        return (passage.route.agent, passage.route.version) not in listed

    async def _regain(self, passage: Passage) -> None:
        """Let another replica answer, or this one when it has its adapters again."""
        replica, keeper = passage.replica, self._keeper
        other = self._fleet.another(replica, passage.episode)
        if other is not None:
            keeper.settle_later(replica)
            passage.move(other)
            return
        try:
            await keeper.settle(replica, [passage.route])
        except MarftError as error:
            raise unready(
                f"the engine does not know {passage.route.name} and could not load it again:"
                f" {replica.upstream.masked(str(error))}"
            ) from error
