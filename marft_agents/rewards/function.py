"""Functions of the user's, named ``package.module:function``.

Invariant: whatever is wrong with the name is a ``ConfigError`` that says which part of it; the
user's module is imported once, with the working directory on the path as ``python`` would have it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import cast

from marft_agents.errors import ConfigError
from marft_agents.schema import Episode

RewardFunction = Callable[[Episode], float | bool | Mapping[str, float] | None]
"""Episode to the team's reward, to rewards per agent, or to ``None`` (not scored)."""


def load_reward_function(spec: str) -> RewardFunction:
    """The reward function that ``spec`` names.

    Raises:
        ConfigError: when the spec, the module or the function is wrong.
    """
    found = load_function(spec, "--reward")
    return cast(RewardFunction, found)  # its answers are judged one by one when it is used


def load_function(spec: str, option: str) -> Callable[..., object]:
    """The function that ``package.module:function`` names; ``option`` is where it was given.

    Raises:
        ConfigError: when the spec, the module or the function is wrong.
    """
    module_name, colon, path = spec.partition(":")
    if not colon or not module_name or not path:
        raise ConfigError(f"{option} takes package.module:function, not {spec!r}")
    found = _imported(module_name, f"{option} {spec}")
    for part in path.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{option} {spec}: {module_name} has no {part!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{option} {spec}: {path} is a {type(found).__name__}, not a function")
    return found


def _imported(name: str, where: str) -> object:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{where}: no module {error.name!r} (looked in {folder} and the installed packages)"
        ) from error
    except SystemExit as error:
        raise ConfigError(
            f"{where}: importing {name} ended the program (exit code {error.code});"
            ' put what it runs under `if __name__ == "__main__":`'
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{where}: importing {name} failed: {type(error).__name__}: {error}"
        ) from error
