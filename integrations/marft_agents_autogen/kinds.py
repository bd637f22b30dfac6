"""What an object of the app is to AutoGen: a model client, an agent, a team.

Invariant: the same answers as ``isinstance`` gives. They are asked per class: AutoGen's classes are
abstract ones, which are slow to ask, and before each run every attribute of every agent is looked
at.
"""

from __future__ import annotations

import functools
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import Any

from autogen_agentchat.base import ChatAgent, Team
from autogen_core.models import ChatCompletionClient

NEITHER: frozenset[type[Any]] = frozenset(
    {
        FunctionType, BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType,
        GetSetDescriptorType, MemberDescriptorType, property, staticmethod, classmethod,
        str, bytes, bool, int, float, dict, list, tuple, set, frozenset, type(None),
    }
)  # fmt: skip
"""Classes of most attributes of objects and classes: no clients, agents or teams."""


def is_client(obj: Any) -> bool:
    """Whether it is a model client, or stands for one."""
    kind = type(obj)
    if kind in NEITHER:
        return False
    shown = obj.__class__
    return _is(kind, ChatCompletionClient) or (
        shown is not kind and _is(shown, ChatCompletionClient)
    )


def is_member(obj: Any) -> bool:
    """Whether it is an agent or a team, or stands for one."""
    kind = type(obj)
    if kind in NEITHER:
        return False
    shown = obj.__class__
    if _is(kind, ChatAgent) or _is(kind, Team):
        return True
    return shown is not kind and (_is(shown, ChatAgent) or _is(shown, Team))


@functools.lru_cache(maxsize=4096)
def _is(kind: type[Any], of: type[Any]) -> bool:
    return issubclass(kind, of)
