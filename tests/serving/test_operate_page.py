"""The page for operators speaks of metrics, events and verdicts that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from marft_agents.serving.canary_swap import Verdict
from marft_agents.serving.metrics import ERRORS, described

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operate.md").read_text(encoding="utf-8")


def test_every_metric_that_is_named_exists() -> None:
    known = {name for name, *_ in described()}
    named = {re.sub(r"_(bucket|sum|count)$", "", n) for n in re.findall(r"marft_[a-z_]+", PAGE)}
    assert named == known


def test_alerts_ask_for_labels_and_values_that_exist() -> None:
    labels = {name: set(names) for name, _, names, _ in described()}
    selected = re.findall(r"(marft_[a-z_]+)\{(\w+)!?=~?\"([^\"]+)\"", PAGE)
    assert len(selected) >= 4
    for metric, label, value in selected:
        assert label in labels[metric], (metric, label)
        for word in value.replace("\\", "").split("|"):
            if label == "kind":
                assert word in ERRORS
            if label == "verdict":
                assert word in get_args(Verdict)


def test_every_alert_has_its_chapter() -> None:
    anchors = set(re.findall(r"\]\(#([a-z0-9-]+)\)", PAGE))
    headings = re.findall(r"^### (.+)$", PAGE, re.M)
    assert anchors == {heading.lower().replace(" ", "-") for heading in headings}
