"""Held-out comparison of two teams on the same tasks.

Invariant: a difference is reported with an interval, computed over *paired* tasks, and "better"
means that the whole interval lies above zero.
"""

from marft_agents.evaluation.compare import Comparison, Proportion, compare, proportion

__all__ = ["Comparison", "Proportion", "compare", "proportion"]
