"""The SDK's default runner: ``Runner.run``, ``run_sync`` and ``run_streamed`` all come through it.

Invariant: a run whose starting agent is not recorded, and that is not inside a recorded run, goes
through untouched. A recorded one gets the same arguments, with hooks before the app's own, and the
models of its configuration are seen.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

from agents import MaxTurnsExceeded, ModelProvider, RunConfig
from agents.lifecycle import RunHooksBase
from agents.run import get_default_agent_runner

from marft_agents_openai_agents.binding import Binding, binding_of
from marft_agents_openai_agents.doors import DOORS
from marft_agents_openai_agents.guards import watch_guardrails
from marft_agents_openai_agents.hooks import RecordingHooks
from marft_agents_openai_agents.models import adopt_model, adopt_provider
from marft_agents_openai_agents.runs import RUN, Run


def open_runner() -> None:
    """Let recorded runs be seen, whoever starts them."""
    runner: Any = get_default_agent_runner()
    DOORS.replace(runner, "run", _run)
    DOORS.replace(runner, "run_streamed", _run_streamed)


def _run(original: Any) -> Any:
    @functools.wraps(original)
    async def run(starting_agent: Any, input: Any, **kwargs: Any) -> Any:
        going = _begin(starting_agent, input)
        if going is None:
            return await original(starting_agent, input, **kwargs)
        result, problem = None, None
        kwargs, provider = _seen(going, starting_agent, kwargs)
        try:
            with going.entered():
                result = await original(starting_agent, input, **kwargs)
            return result
        except BaseException as error:
            problem = error
            raise
        finally:
            going.close(result, problem)
            if provider is not None:
                await asyncio.shield(_close_provider(going, provider))

    return run


def _run_streamed(original: Any) -> Any:
    @functools.wraps(original)
    def run_streamed(starting_agent: Any, input: Any, **kwargs: Any) -> Any:
        going = _begin(starting_agent, input)
        if going is None:
            return original(starting_agent, input, **kwargs)
        kwargs, provider = _seen(going, starting_agent, kwargs)
        try:
            with going.entered():  # the task that the SDK starts here inherits it
                result = original(starting_agent, input, **kwargs)
        except BaseException as error:
            going.close(error=error)
            raise
        with going.safety.guard("follow a streamed run"):
            _follow(going, result, provider)
        return result

    return run_streamed


def _begin(starting_agent: Any, task: Any) -> Run | None:
    binding, parent = binding_of(starting_agent), RUN.get()
    if parent is not None and not (parent.open and parent.binding.open):
        parent = None
    if parent is not None and (binding is None or binding.recorder is parent.binding.recorder):
        binding = binding or parent.binding
    else:
        parent = None
    if binding is None:
        _say_copy(starting_agent)
        return None
    chosen: Binding = binding
    safety = chosen.recorder.core.safety
    return safety.attempt("begin a run", lambda: Run(chosen, starting_agent, task, parent))


def _say_copy(agent: Any) -> None:
    """An unrecorded agent with a recorded one's name is mostly a copy of it."""
    name = str(getattr(agent, "name", ""))
    for user in DOORS.users():
        recorder = user.recorder()
        if recorder is not None and name in user.names:
            recorder.core.safety.warn_once(
                ("copy", name),
                f"marft-agents: an agent {name!r} was run that is not the recorded one of that"
                " name (a clone or copy?), and the run is not recorded; wrap that agent as well",
            )


def _seen(
    run: Run, starting_agent: Any, kwargs: dict[str, Any]
) -> tuple[dict[str, Any], ModelProvider | None]:
    """``kwargs`` of a recorded run; and the provider that the SDK would have made and closed."""
    made = run.safety.attempt("see a run", lambda: _watched(run, starting_agent, kwargs))
    return (kwargs, None) if made is None else made


def _watched(
    run: Run, starting_agent: Any, kwargs: dict[str, Any]
) -> tuple[dict[str, Any], ModelProvider | None]:
    kwargs, own = dict(kwargs), None
    hooks, config = kwargs.get("hooks"), kwargs.get("run_config")
    if hooks is None or isinstance(hooks, RunHooksBase):
        kwargs["hooks"] = RecordingHooks(run, hooks)
    if config is None:
        config = kwargs["run_config"] = RunConfig()
        own = config.model_provider
    elif isinstance(config, dict) and "model_provider" not in config:  # newer versions take one
        own = RunConfig().model_provider
        config = kwargs["run_config"] = {**cast("dict[str, Any]", config), "model_provider": own}
    settings = cast("dict[str, Any]", config) if isinstance(config, dict) else vars(config)
    adopt_provider(settings.get("model_provider"))
    adopt_model(settings.get("model"))
    for holder in (SimpleNamespace(**settings), starting_agent):
        watch_guardrails(holder)
    return kwargs, own


async def _close_provider(run: Run, provider: ModelProvider) -> None:
    """As the SDK does with a provider that it made for one run."""
    close = getattr(provider, "aclose", None)
    if close is None:
        return
    try:
        await close()
    except Exception as error:
        run.safety.warn_once("provider", f"closing a model provider failed: {error!r}")


def _follow(run: Run, result: Any, provider: ModelProvider | None) -> None:
    """End ``run`` with its stream, or with its task where nobody reads the stream."""
    task = getattr(result, "run_loop_task", None) or getattr(result, "_run_impl_task", None)
    original = result.stream_events

    @functools.wraps(original)
    async def stream_events(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        run.consumed = True
        stream = original(*args, **kwargs)
        try:
            async for event in stream:
                yield event
        except GeneratorExit:
            run.consumed = False
            if task is None or task.done():
                _finished(run, result, task)
            raise
        except BaseException as error:
            run.close(result, error)
            raise
        finally:
            await stream.aclose()
        _finished(run, result, task)

    def done(ended: asyncio.Task[Any]) -> None:
        if provider is not None:
            closing = asyncio.ensure_future(_close_provider(run, provider))
            _CLOSING.add(closing)
            closing.add_done_callback(_CLOSING.discard)
        if not run.consumed:
            _finished(run, result, ended)

    result.stream_events = stream_events
    if task is not None:
        task.add_done_callback(done)


_CLOSING: set[asyncio.Future[None]] = set()


def _finished(run: Run, result: Any, task: asyncio.Task[Any] | None) -> None:
    """The run's task is over, or the app has read everything."""
    problem: BaseException | None = getattr(result, "_stored_exception", None)
    if problem is None and task is not None and task.done():
        problem = asyncio.CancelledError() if task.cancelled() else task.exception()
    turns, limit = result.current_turn, getattr(result, "max_turns", None)
    if problem is None and result.final_output is None and limit is not None and turns > limit:
        problem = MaxTurnsExceeded(f"Max turns ({limit}) exceeded")
    left = problem is None and result.final_output is None and task is not None and not task.done()
    run.close(None if left else result, problem)
