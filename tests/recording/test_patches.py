"""Replaced attributes are put back, and do not pile up for objects that are gone."""

from __future__ import annotations

from typing import Any

from marft_agents.recording import Patches


class Thing:
    def said(self) -> str:
        return "mine"


def ours() -> str:
    return "ours"


def test_objects_that_are_gone_are_forgotten() -> None:
    patches, kept = Patches(), Thing()
    patches.set(kept, "said", ours)
    for _ in range(1000):
        patches.set(Thing(), "said", ours)
    held: list[Any] = vars(patches)["_done"]
    assert len(held) < 600
    patches.undo()
    assert kept.said() == "mine" and vars(kept) == {}


def test_what_somebody_else_replaced_since_stays() -> None:
    patches, thing = Patches(), Thing()
    patches.set(thing, "said", ours)

    def theirs() -> str:
        return "theirs"

    thing.said = theirs
    patches.undo()
    assert thing.said() == "theirs"
