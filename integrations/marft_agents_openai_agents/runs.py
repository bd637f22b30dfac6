"""One run of an agent: the episode it joins or is, who speaks in it, and how it ends.

Invariant: within one run one agent speaks at a time, so the run knows whose a model call is; runs
that start inside it (agents as tools, guardrail agents, an app's own calls) are runs of their own
in the same episode and name the agent and the turn that they serve.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

from agents.exceptions import (
    InputGuardrailTripwireTriggered,
    MaxTurnsExceeded,
    OutputGuardrailTripwireTriggered,
)

from marft_agents.recording import (
    Call,
    EndReason,
    LiveEpisode,
    TurnKind,
    describe_error,
    end_run,
    jsonable,
)
from marft_agents_openai_agents.binding import Binding
from marft_agents_openai_agents.wire import last_words

RUN: ContextVar[Run | None] = ContextVar("marft_oai_run", default=None)
GUARD: ContextVar[str | None] = ContextVar("marft_oai_guard", default=None)
"""The place of the guardrail that the current context is in: input, output or tool."""

_TRIPWIRES = (InputGuardrailTripwireTriggered, OutputGuardrailTripwireTriggered)
_TOOL_ERROR = "An error occurred while running the tool"


class Run:
    """From ``Runner.run`` to its result."""

    def __init__(
        self, binding: Binding, starting_agent: Any, task: Any, parent: Run | None
    ) -> None:
        recorder = binding.recorder
        self.binding, self.parent = binding, parent
        self.safety = recorder.core.safety
        self.agent = speaker_of(starting_agent, task)
        self.kind: TurnKind = "act"
        self.parent_agent: str | None = None
        self.parent_turn: str | None = None
        self.turns: list[str] = []
        self.selected_by: str | None = None
        self.calls: dict[str, tuple[str, Any]] = {}
        """Tool calls of the last reply: call id → name, arguments."""
        self.tools: dict[str, str] = {}
        """Tools at work: key → name."""
        self.agent_tools: set[str] = set()
        """Keys of tools at work inside which an agent ran."""
        self.consumed = False
        """Whether the app reads the stream, which then tells how the run ends."""
        if parent is not None:
            self._serve(parent)
        episode = recorder.current()
        self._own = episode is None
        if episode is None:
            episode = recorder.open_episode(task_of(task), binding.runtime)
        elif parent is None and episode.turn_ids():
            self._heard(episode, task)
        self.episode: LiveEpisode = episode
        self._over = False

    def _serve(self, parent: Run) -> None:
        place = GUARD.get()
        guarding = place is not None or parent.kind == "guard"
        self.kind = "guard" if guarding else "act"
        self.parent_agent = parent.agent
        if place != "input" and parent.turns:
            self.parent_turn = parent.turns[-1]
        if place is None and len(parent.tools) == 1:
            parent.agent_tools |= parent.tools.keys()

    def _heard(self, episode: LiveEpisode, task: Any) -> None:
        """A later run in the app's episode brings words: a human's, when no agent said them."""
        words = last_words(task)
        if not words:
            return
        with episode.lock:
            said = episode.ledger.link([{"role": "user", "content": words}])
        if not said:
            episode.human(None, words)

    @property
    def open(self) -> bool:
        return self.binding.open and not self._over and not self.episode.closed

    @contextmanager
    def entered(self) -> Generator[None]:
        """Everything started inside belongs to this run."""
        run, guard = RUN.set(self), GUARD.set(None)
        try:
            with self.episode.active():
                yield
        finally:
            GUARD.reset(guard)
            RUN.reset(run)

    def begin_call(self) -> Call:
        return Call(
            self.episode,
            self.agent,
            self.kind,
            selected_by=self.selected_by,
            parent_agent=self.parent_agent,
            parent_turn=self.parent_turn,
        )

    # -- how it goes --------------------------------------------------------------------------

    def tool_ended(self, key: str, name: str, result: Any, is_agent: bool) -> None:
        call_name, arguments = self.calls.get(key, (name, None))
        self.tools.pop(key, None)
        ran_agent = key in self.agent_tools
        self.agent_tools.discard(key)
        text = result if isinstance(result, str) else ""
        self.episode.tool(
            call_name,
            agent=self.agent,
            call_id=key if key in self.calls else None,
            arguments=arguments,
            result=result,
            ok=not text.startswith(_TOOL_ERROR),
            environment=not (is_agent or ran_agent),
        )

    def handed_off(self, names: set[str], to_agent: str) -> None:
        """The agent has chosen its successor by one of its handoff tools."""
        self.selected_by = self.turns[-1] if self.turns else None
        for key, (name, arguments) in self.calls.items():
            if name in names:
                self.episode.tool(
                    name,
                    agent=self.agent,
                    call_id=key,
                    arguments=arguments,
                    result=to_agent,
                    environment=False,
                )
                break
        self.agent = to_agent

    # -- how it ends --------------------------------------------------------------------------

    def close(self, result: Any = None, error: BaseException | None = None) -> None:
        """The run is over, by its result or an exception. The first time counts."""
        if self._over:
            return
        self._over = True
        if self.binding.open:
            with self.safety.guard("end a run"):
                self._close(result, error)

    def _close(self, result: Any, error: BaseException | None) -> None:
        for key, name in list(self.tools.items()):
            call_name, arguments = self.calls.get(key, (name, None))
            self.episode.tool(
                call_name,
                agent=self.agent,
                call_id=key if key in self.calls else None,
                arguments=arguments,
                result=describe_error(error) if error else None,
                ok=False,
                environment=key not in self.agent_tools,
            )
        self.tools.clear()
        if self.parent is not None and not self._own:
            return
        reason, detail = self._outcome(result, error)
        if not self._own:
            self.episode.report(reason, detail)
            return
        seen = result if error is None else error
        on_end = self.binding.on_end if reason != "failed" else None
        end_run(self.episode, reason, detail, on_end, seen)

    def _outcome(self, result: Any, error: BaseException | None) -> tuple[EndReason, str | None]:
        if isinstance(error, MaxTurnsExceeded):
            designed = self.binding.end == "terminated"
            return ("terminated" if designed else "truncated"), describe_error(error)
        if isinstance(error, _TRIPWIRES):
            return "terminated", describe_error(error)
        if error is not None:
            return "failed", describe_error(error)
        waiting = getattr(result, "interruptions", None)
        if waiting:
            names = ", ".join(sorted({str(getattr(i, "name", "tool")) for i in waiting}))
            self.safety.warn_once(
                "interrupted",
                f"marft-agents: a run stopped to have tools approved ({names}); put it and the run"
                " that resumes it into one `with recorder.episode():` to record one episode",
            )
            return "truncated", f"stopped to have tools approved: {names}"
        if result is None or getattr(result, "is_complete", True) is False:
            return "failed", "the run was left before its result"
        return "terminated", None


def speaker_of(starting_agent: Any, task: Any) -> str:
    """Who speaks first; a resumed run goes on with the agent that it had stopped at."""
    resumed = getattr(task, "_current_agent", None)
    return str((resumed if resumed is not None else starting_agent).name)


def task_of(task: Any) -> Any:
    if isinstance(task, str | list):
        return jsonable(cast("Any", task))
    return jsonable(getattr(task, "_original_input", None))
