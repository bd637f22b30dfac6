"""Who earned what: the estimator of the MARFT paper (arXiv 2504.16129) as pure functions.

Invariant: nothing here reads a file, knows a model or keeps state; lists of floats go in and come
out. Axis suffixes: ``_K`` actions of one episode in order, ``_KL`` tokens of each of them, ``_B``
rows or episodes of one batch.
"""

from __future__ import annotations

from marft_agents.credit.compound import compound_factors
from marft_agents.credit.gae import Credit, TokenCredit, action_gae, token_gae
from marft_agents.credit.group import (
    AgentGroupAdvantages,
    GroupAdvantages,
    agent_group_advantages,
    agent_returns,
    group_advantages,
)
from marft_agents.credit.ippo import (
    OwnTurns,
    independent_gae,
    independent_token_gae,
    own_turns,
)
from marft_agents.credit.normalise import NORMALISATIONS, normalise
from marft_agents.credit.order import dependency_order, is_action
from marft_agents.credit.placement import PlacedRewards, place_rewards
from marft_agents.credit.report import CreditReport, credit_report
from marft_agents.credit.weights import awr_weights

__all__ = [
    "NORMALISATIONS",
    "AgentGroupAdvantages",
    "Credit",
    "CreditReport",
    "GroupAdvantages",
    "OwnTurns",
    "PlacedRewards",
    "TokenCredit",
    "action_gae",
    "agent_group_advantages",
    "agent_returns",
    "awr_weights",
    "compound_factors",
    "credit_report",
    "dependency_order",
    "group_advantages",
    "independent_gae",
    "independent_token_gae",
    "is_action",
    "normalise",
    "own_turns",
    "place_rewards",
    "token_gae",
]
