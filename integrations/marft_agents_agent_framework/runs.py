"""Where an episode begins and ends.

Invariant: a run of a wrapped root joins the episode it happens in, or is one; the episode is the
current one only while the app awaits the run or pulls its stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from agent_framework import WorkflowAgent

from marft_agents.recording import (
    EndReason,
    LiveEpisode,
    describe_error,
    end_run,
)
from marft_agents_agent_framework.following import follow
from marft_agents_agent_framework.observe import human
from marft_agents_agent_framework.seats import Binding
from marft_agents_agent_framework.words import contents, plain

LIMITS = (
    "The group chat has reached the maximum number of rounds.",
    "Workflow terminated due to reaching maximum round count.",
    "Workflow terminated due to reaching maximum reset count.",
)


class Run:
    """One run of a wrapped root, inside the episode it joined or opened."""

    def __init__(self, binding: Binding) -> None:
        self.safety = binding.recorder.core.safety
        self._binding = binding
        self._episode: LiveEpisode | None = None
        self._own = False

    def begin(self, root: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = kwargs.get("message", kwargs.get("messages", args[0] if args else None))
        answers = list(_answers(root, given, kwargs.get("responses")))
        episode = self._binding.recorder.current()
        self._own = episode is None
        if episode is None:
            task = plain(given if given is not None else kwargs.get("responses"))
            episode = self._binding.recorder.open_episode(task, self._binding.runtime)
            if answers or kwargs.get("checkpoint_id") is not None:
                self._say_apart()
        self._episode = episode
        for answer in answers:
            human(episode, answer)

    def _say_apart(self) -> None:
        self.safety.warn_once(
            "apart",
            "marft-agents: a run that answers a request of an earlier run, or goes on from a"
            " checkpoint, is an episode of its own; put runs that belong together into one `with"
            " recorder.episode():`",
        )

    def entered(self) -> AbstractContextManager[None]:
        """The episode as the current one, for code that the run starts from here."""
        return self._episode.active() if self._episode else nullcontext()

    def read(self) -> None:
        """Its result is still to come."""

    def done(self, result: Any) -> None:
        reason, detail = _outcome(result)
        self._close("terminated" if self._binding.end == "terminated" else reason, detail, result)

    def failed(self, error: BaseException | None) -> None:
        if error is None or isinstance(error, GeneratorExit):
            self._close("failed", "the run was left before its result", None)
        elif type(error).__name__ == "WorkflowConvergenceException":  # too many supersteps
            limit: EndReason = "terminated" if self._binding.end == "terminated" else "truncated"
            self._close(limit, describe_error(error), None)
        else:
            self._close("failed", describe_error(error), None)

    def _say_empty(self) -> None:
        self.safety.warn_once(
            "empty",
            "marft-agents: a run ended in which no model call was recorded: the agents that it"
            " called were not found in what was wrapped (they are made while it runs, or held"
            " elsewhere); wrap these agents too",
        )

    def _close(self, reason: EndReason, detail: str | None, result: Any) -> None:
        episode, self._episode = self._episode, None
        if episode is None:
            return
        if not self._own:
            episode.report(reason, detail)
            return
        if reason != "failed" and not episode.turn_ids():
            self._say_empty()
        on_end = self._binding.on_end if result is not None else None
        end_run(episode, reason, detail, on_end, result)


def _answers(root: Any, given: Any, responses: Any) -> Sequence[Any]:
    """What humans answered to requests of an earlier run."""
    if isinstance(responses, Mapping):
        return list(cast("Mapping[str, Any]", responses).values())
    if isinstance(root, WorkflowAgent):
        return list(contents(given, "function_result"))
    return ()


def _outcome(result: Any) -> tuple[EndReason, str | None]:
    """``truncated`` when a limit of the orchestration had the last word."""
    words = _last_words(result)
    if words in LIMITS:
        return "truncated", words
    events: Any = getattr(result, "get_request_info_events", None)
    waiting: Any = events() if events else getattr(result, "user_input_requests", None)
    return "terminated", f"it waits for {len(waiting)} answer(s)" if waiting else None


def _last_words(result: Any) -> str | None:
    outputs: Any = getattr(result, "get_outputs", None)
    items: list[Any] = outputs() if outputs else [result]
    last: Any = items[-1] if items else None
    if isinstance(last, list):
        many: list[Any] = last
        last = many[-1] if many else None
    messages: Any = getattr(last, "messages", None)
    text: Any = getattr(messages[-1] if messages else last, "text", None)
    return text.strip() if isinstance(text, str) else None


def patch_run(root: Any, binding: Binding, walk: Callable[[Any], None]) -> None:
    """Make each outermost run of ``root`` an episode; ``walk`` finds what is new in it."""
    original, core = root.run, binding.recorder.core

    def run(*args: Any, **kwargs: Any) -> Any:
        if core.closed:
            return original(*args, **kwargs)
        going = Run(binding)
        with core.safety.guard("look for new agents"):
            walk(root)
        with core.safety.guard("begin a run"):
            going.begin(root, args, kwargs)
        try:
            with going.entered():
                result = original(*args, **kwargs)
        except BaseException as error:
            with core.safety.guard("see a failure"):
                going.failed(error)
            raise
        return follow(result, going)

    patched: Any = functools.wraps(original)(run)
    patched.marft_binding = binding
    binding.patches.set(root, "run", patched)
