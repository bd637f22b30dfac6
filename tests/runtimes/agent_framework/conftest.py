"""Agent Framework warns of its own experimental parts when it is imported; that is not ours."""

from __future__ import annotations

import importlib
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in ("agent_framework.openai", "agent_framework.orchestrations"):
        importlib.import_module(name)
