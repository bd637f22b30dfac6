"""Finding the integration for an object.

Invariant: integrations are entry points, loaded at first need, one by one; a broken one is
remembered for the error message and never disturbs another.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, cast

from marft_agents.errors import ConfigError, IntegrationError

GROUP = "marft_agents.integrations"
OPTIONS = frozenset({"end", "on_end"})
ENDS = ("auto", "terminated")


class Integration(Protocol):
    """A module that knows one runtime."""

    def matches(self, obj: Any) -> bool:
        """Whether ``obj`` is from this runtime; must not import it."""
        ...

    def wrap(self, obj: Any, recorder: Any, **options: Any) -> Any:
        """Record ``obj`` from now on; returns the same object."""
        ...


def find_integration(obj: Any) -> Integration:
    """The integration for ``obj``.

    Raises:
        IntegrationError: no installed integration knows it.
    """
    broken: list[str] = []
    for again in (False, True):
        broken.clear()
        found = _matching(obj, broken, again)
        if found is not None:
            return found
    kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
    supported = ", ".join(point.name for point in installed()) or "none installed"
    hint = f"; broken integrations: {', '.join(broken)}" if broken else ""
    raise IntegrationError(
        f"cannot record an object of type {kind}; supported runtimes: {supported}{hint}."
        " For code on the openai SDK use recorder.attach_client(client, agent=...)"
    )


def _matching(obj: Any, broken: list[str], again: bool) -> Integration | None:
    """``again``: something may have been installed since the process began."""
    if again:
        _points.cache_clear()
    for point in installed():
        try:
            module = cast("Integration", point.load())
            if module.matches(obj):
                return module
        except Exception as error:
            broken.append(f"{point.name} ({type(error).__name__}: {error})")
    return None


def check_options(options: Mapping[str, Any], integration: Any = None) -> None:
    """Check the options of ``wrap``; an integration that takes more names them in ``OPTIONS``.

    Raises:
        ConfigError: another option or ``end``, or an ``on_end`` that cannot be called when a run
            is over.
    """
    known = OPTIONS | frozenset(getattr(integration, "OPTIONS", ()))
    unknown = sorted(options.keys() - known)
    if unknown:
        raise ConfigError(
            f"wrap(..., {unknown[0]}=...): unknown option; there are {', '.join(sorted(known))}"
        )
    end, on_end = options.get("end", ENDS[0]), options.get("on_end")
    if end not in ENDS:
        raise ConfigError(f"wrap(..., end={end!r}): end is one of {', '.join(ENDS)}")
    if on_end is not None and not callable(on_end):
        raise ConfigError(f"wrap(..., on_end={on_end!r}): on_end is a function (episode, result)")
    called = getattr(type(on_end), "__call__", None)  # noqa: B004 not a test for callables
    if any(map(inspect.iscoroutinefunction, (on_end, called))):
        raise ConfigError(
            "wrap(..., on_end=...): nobody can await it; use a plain function, or"
            " `async with recorder.episode() as episode:` around the run to await a score there"
        )


def installed() -> tuple[EntryPoint, ...]:
    """Entry points of the group, in a fixed order."""
    return _points(tuple(sys.path))


@functools.lru_cache(maxsize=4)
def _points(_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Looking through all that is installed takes milliseconds, and apps wrap a team a task."""
    return tuple(sorted(entry_points(group=GROUP), key=lambda point: point.name))
