"""Who earned what: the estimator of the MARFT paper (arXiv 2504.16129) as pure functions.

Invariant: nothing here reads a file, knows a model or keeps state; lists of floats go in and come
out. Axis suffixes: ``_K`` actions of one episode in order, ``_B`` rows of one batch.
"""

from __future__ import annotations

from marft_agents.credit.gae import Credit, action_gae
from marft_agents.credit.group import GroupAdvantages, group_advantages
from marft_agents.credit.normalise import NORMALISATIONS, normalise
from marft_agents.credit.order import dependency_order, is_action
from marft_agents.credit.placement import PlacedRewards, place_rewards
from marft_agents.credit.report import CreditReport, credit_report
from marft_agents.credit.weights import awr_weights

__all__ = [
    "NORMALISATIONS",
    "Credit",
    "CreditReport",
    "GroupAdvantages",
    "PlacedRewards",
    "action_gae",
    "awr_weights",
    "credit_report",
    "dependency_order",
    "group_advantages",
    "is_action",
    "normalise",
    "place_rewards",
]
