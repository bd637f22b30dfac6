"""Agents, as they are handed messages and act on them.

Invariant: everything that happens until an agent's response, in whatever task, happens in one
speech; its frame is entered while the agent works and left whenever code of the app gets an item.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Sequence
from contextlib import nullcontext
from typing import Any

from marft_agents_autogen.frames import Speech, begin_speech, episode_in, here
from marft_agents_autogen.observe import executed, is_telling, observe
from marft_agents_autogen.seats import Binding, Seat, close_stream


class _Door:
    """One way into a speech: ``on_messages`` or ``on_messages_stream``."""

    def __init__(self, agent: Any, seat: Seat, messages: Sequence[Any]) -> None:
        self._agent = agent
        self._safety = seat.recorder.core.safety
        self._speech: Speech | None = None
        self._new = False
        if not seat.closed:
            try:
                self._speech, self._new = begin_speech(seat, messages)
            except Exception as error:
                self._safety.failed("see what an agent is given", error)

    def entered(self) -> Any:
        """The speech as the current frame, for one time after the other."""
        return self._speech.entered() if self._speech else nullcontext()

    def observe(self, item: Any) -> bool:
        """Take note of an item; whether items of its class tell anything."""
        if self._speech is None or not is_telling(item):
            return False
        try:
            observe(self._agent, self._speech, item)
        except Exception as error:
            self._safety.failed("see what an agent does", error)
        return True

    @property
    def read_by_team(self) -> bool:
        return self._speech is not None and self._speech.read_by_team

    def close(self) -> None:
        if self._speech is not None and self._new:
            self._speech.close()


def patch_speeches(agent: Any, seat: Seat, binding: Binding) -> None:
    original_stream, original, reset = agent.on_messages_stream, agent.on_messages, agent.on_reset

    @functools.wraps(original_stream)
    async def on_messages_stream(
        messages: Sequence[Any], *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        door = _Door(agent, seat, messages)
        inside, silent = door.entered(), None
        try:
            stream = aiter(original_stream(messages, *args, **kwargs))
            try:
                if door.read_by_team:
                    with inside:
                        async for item in stream:
                            if type(item) is not silent and not door.observe(item):
                                silent = type(item)  # pieces come by the dozen
                            yield item
                    return
                while True:
                    try:
                        with inside:
                            item = await anext(stream)
                    except StopAsyncIteration:
                        break
                    if type(item) is not silent and not door.observe(item):
                        silent = type(item)  # pieces come by the dozen
                    yield item
            finally:
                with inside:
                    await close_stream(stream)
        finally:
            door.close()

    @functools.wraps(original)
    async def on_messages(messages: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        door = _Door(agent, seat, messages)
        try:
            with door.entered():
                response = await original(messages, *args, **kwargs)
            door.observe(response)
            return response
        finally:
            door.close()

    @functools.wraps(reset)
    async def on_reset(*args: Any, **kwargs: Any) -> Any:
        with seat.recorder.core.safety.guard("forget what an agent was given"):
            forget(seat)
        return await reset(*args, **kwargs)

    binding.patches.set(agent, "on_messages_stream", on_messages_stream)
    binding.patches.set(agent, "on_messages", on_messages)
    binding.patches.set(agent, "on_reset", on_reset)


def forget(seat: Seat) -> None:
    """What the agent was handed in this episode is gone; in others it may go on."""
    episode = episode_in(here(seat), seat)
    if episode is None:
        seat.delivered.clear()
    else:
        seat.delivered.pop(episode, None)


def patch_executor(agent: Any, seat: Seat, binding: Binding) -> None:
    """The executor of an agent without a model: its response says neither code nor exit code."""
    executor = getattr(agent, "_code_executor", None)
    run = getattr(executor, "execute_code_blocks", None)
    if run is None or getattr(agent, "_model_client", None) is not None:
        return
    if hasattr(run, "marft_seen"):
        return

    @functools.wraps(run)
    async def execute_code_blocks(code_blocks: Any, *args: Any, **kwargs: Any) -> Any:
        result = await run(code_blocks, *args, **kwargs)
        with seat.recorder.core.safety.guard("see executed code"):
            speech = here(seat)
            if isinstance(speech, Speech):
                executed(speech, code_blocks, result)
        return result

    seen: Any = execute_code_blocks
    seen.marft_seen = True
    binding.patches.set(executor, "execute_code_blocks", execute_code_blocks)
