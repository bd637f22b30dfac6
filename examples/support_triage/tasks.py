"""Customer messages with the department that must answer them.

Training and held-out messages share neither the product nor, for a quarter of the held-out ones,
the sentence. The department is known by construction, so a reply can be verified.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

DEPARTMENTS = ("billing", "delivery", "technical")

SEEN = {
    "billing": (
        "I was charged twice for my {}.",
        "Please refund the payment for my {}.",
        "My invoice for the {} shows the wrong amount.",
        "Why did the price on my {} bill go up?",
        "My card was declined when I paid for the {}.",
        "I need a receipt for the {} I bought.",
    ),
    "delivery": (
        "My {} has not arrived yet.",
        "The package with my {} is lost.",
        "Where is the delivery of my {}?",
        "The courier left my {} at the wrong address.",
        "Can I change the delivery address for my {}?",
        "The tracking number of my {} does not work.",
    ),
    "technical": (
        "My {} does not turn on.",
        "The app of my {} crashes at startup.",
        "My {} shows an error on the screen.",
        "I cannot connect my {} to the network.",
        "The update of my {} fails every time.",
        "My {} freezes when I log in.",
    ),
}
UNSEEN = {
    "billing": ("Cancel the monthly fee for my {}.", "The discount is missing from my {} invoice."),
    "delivery": ("My {} parcel came two weeks late.", "When will you send out my {}?"),
    "technical": ("How do I reset the software on my {}?", "The battery of my {} will not charge."),
}
TRAIN_PRODUCTS = ("laptop", "phone", "camera", "printer", "tablet", "headset", "keyboard")
HELD_OUT_PRODUCTS = ("router", "speaker", "watch", "drone", "projector", "scanner", "monitor")


@dataclass(frozen=True)
class Ticket:
    """One customer message and the department that must answer it."""

    message: str
    department: str


def training_tickets(count: int, *, seed: int = 0) -> list[Ticket]:
    """``count`` messages over the training products, every department equally often."""
    return _tickets(count, SEEN, TRAIN_PRODUCTS, random.Random(seed))


def held_out_tickets(count: int, *, seed: int = 1) -> list[Ticket]:
    """``count`` messages over products that no training message names; a quarter also use
    sentences that no training message uses."""
    sentences = {d: SEEN[d] + UNSEEN[d] for d in DEPARTMENTS}
    return _tickets(count, sentences, HELD_OUT_PRODUCTS, random.Random(seed))


def _tickets(
    count: int,
    sentences: dict[str, tuple[str, ...]],
    products: tuple[str, ...],
    rng: random.Random,
) -> list[Ticket]:
    tickets: list[Ticket] = []
    for i in range(count):
        department = DEPARTMENTS[i % len(DEPARTMENTS)]
        message = rng.choice(sentences[department]).format(rng.choice(products))
        tickets.append(Ticket(message, department))
    rng.shuffle(tickets)
    return tickets
