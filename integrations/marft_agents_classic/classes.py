"""The methods that only a class can lend, put on while something is recorded.

Invariant: agents that AutoGen makes for a moment (a speaker selection, the executor of ``run``, a
pattern's manager) and chats that an unwrapped agent starts with a wrapped one are reached through
their classes alone. Each patched method is inert unless a wrapped agent takes part; the classes are
put back when the last recorder that needs them is closed or gone.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

from autogen import ConversableAgent, OpenAIWrapper

from marft_agents.recording import LiveEpisode, MarftRecorder
from marft_agents_classic import calls
from marft_agents_classic.runs import STAMP, Border, Chat, Chats
from marft_agents_classic.seats import Binding

_lock = threading.RLock()
_users = 0
_recorders: weakref.WeakSet[MarftRecorder] = weakref.WeakSet()
_done: list[tuple[Any, str, Any, Any]] = []


def engage(binding: Binding) -> None:
    """Keep the classes patched for as long as ``binding`` is in use."""
    global _users
    with _lock:
        if _users == 0:
            _put_on()
        _users += 1
        _recorders.add(binding.recorder)
    binding.dismiss = weakref.finalize(binding, _dismiss)
    binding.dismiss.atexit = False


def _dismiss() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            while _done:
                owner, name, original, ours = _done.pop()
                if vars(owner).get(name) is ours:
                    setattr(owner, name, original)


def _put_on() -> None:
    _patch(OpenAIWrapper, "create", _create)
    _patch(ConversableAgent, "initiate_chat", _initiate_chat)
    _patch(ConversableAgent, "a_initiate_chat", _a_initiate_chat)
    _patch(ConversableAgent, "initiate_chats", _initiate_chats)
    _patch(ConversableAgent, "a_initiate_chats", _a_initiate_chats)
    for owner in _streams():
        _patch(owner, "__init__", _stream)


def _patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = vars(owner)[name]
    ours = functools.wraps(original)(make(original))
    setattr(owner, name, ours)
    _done.append((owner, name, original, ours))


def _create(original: Any) -> Any:
    def create(self: Any, **config: Any) -> Any:
        return calls.create(original, self, config)

    return create


def _initiate_chat(original: Any) -> Any:
    def initiate_chat(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _chat(self, args, kwargs) as chat:
            chat.result = original(self, *args, **kwargs)
            return chat.result

    return initiate_chat


def _a_initiate_chat(original: Any) -> Any:
    async def a_initiate_chat(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _chat(self, args, kwargs) as chat:
            chat.result = await original(self, *args, **kwargs)
            return chat.result

    return a_initiate_chat


_POSITIONS = (
    "recipient",
    "clear_history",
    "silent",
    "cache",
    "max_turns",
    "summary_method",
    "summary_args",
    "message",
)


def _chat(sender: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Border:
    options = dict(zip(_POSITIONS, args, strict=False)) | kwargs
    return _safely(lambda: Chat(sender, options.get("recipient"), options, _stamped()))


def _safely(make: Callable[[], Border]) -> Border:
    """A border, or one that does nothing where the recorder failed to make it."""
    try:
        return make()
    except Exception as error:
        for recorder in list(_recorders):
            recorder.core.safety.failed("see a chat begin", error)
        return Border()


def _initiate_chats(original: Any) -> Any:
    def initiate_chats(self: Any, chat_queue: Any, *args: Any, **kwargs: Any) -> Any:
        with _sequence(self, chat_queue) as chats:
            chats.result = original(self, chat_queue, *args, **kwargs)
            return chats.result

    return initiate_chats


def _a_initiate_chats(original: Any) -> Any:
    async def a_initiate_chats(self: Any, chat_queue: Any, *args: Any, **kwargs: Any) -> Any:
        with _sequence(self, chat_queue) as chats:
            chats.result = await original(self, chat_queue, *args, **kwargs)
            return chats.result

    return a_initiate_chats


def _sequence(sender: Any, chat_queue: Any) -> Border:
    chats = chat_queue if isinstance(chat_queue, list) else []
    queue = [cast("dict[str, Any]", c) for c in cast("list[Any]", chats) if isinstance(c, dict)]
    agents = [sender, *(chat.get(k) for chat in queue for k in ("recipient", "sender"))]
    return _safely(lambda: Chats(agents, [chat.get("message") for chat in queue], _stamped()))


# -- threads that AutoGen starts ------------------------------------------------------------------


def _streams() -> Iterator[Any]:
    """Classes of the streams through which newer versions' ``run`` hears its own thread."""
    try:
        from autogen.io import thread_io_stream  # pyright: ignore
    except ImportError:
        return  # AutoGen 0.2 starts no threads
    for name in ("ThreadIOStream", "AsyncThreadIOStream"):
        owner = getattr(thread_io_stream, name, None)
        if owner is not None and "__init__" in vars(owner):
            yield owner


def _stream(original: Any) -> Any:
    """A stream is made where ``run`` is called: it brings the episodes into the thread."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        episodes = [e for r in list(_recorders) if (e := r.current()) is not None]
        if episodes:
            setattr(self, STAMP, episodes)

    return __init__


def _stamped() -> list[LiveEpisode]:
    """The episodes in which the ``run`` behind this thread was called."""
    from autogen.io import IOStream

    return list(getattr(IOStream.get_default(), STAMP, ()))
