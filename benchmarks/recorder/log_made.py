"""A log of any size, the same at any time: what the reader is measured on.

Invariant: a function of its arguments. Three agents speak in turn; a turn holds ``PROMPT`` prompt
ids, ``REPLY`` sampled ones with their log-probabilities, and the chat as it was sent. ``apart``
writes one episode after the other; ``mixed`` writes ``AT_ONCE`` episodes at a time, event by event,
as an app does that runs as many.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from marft_agents.log.encode import encode_line
from marft_agents.schema import EpisodeEnded, EpisodeStarted, RewardEvent, Sampling, Turn

AGENTS = ("planner", "coder", "tester")
LAYOUTS = ("apart", "mixed")
PROMPT, REPLY = 44, 16
TURNS = 10
"""Turns of an episode."""
AT_ONCE = 64
_PATTERNS = 97
_EPISODE, _TURN, _BEFORE = b"@episode@", b"@turn@", b"@before@"
_TIME = datetime(2026, 1, 1, tzinfo=UTC)
_WORDS = (
    "plan", "the", "next", "step", "then", "write", "code", "run", "tests", "read", "what",
    "failed", "fix", "it", "and", "say", "so",
)  # fmt: skip


def write_log(path: Path, turns: int, layout: str) -> None:
    """Write ``turns`` turns to ``path``, in episodes of ``TURNS``."""
    draw = random.Random(0)
    patterns = [_pattern(draw, n) for n in range(_PATTERNS)]
    border = [_start(), *_end()]
    with path.open("wb", buffering=2**20) as file:
        for first in range(0, turns // TURNS, 1 if layout == "apart" else AT_ONCE):
            last = min(turns // TURNS, first + (1 if layout == "apart" else AT_ONCE))
            chats = [_lines(n, patterns, border) for n in range(first, last)]
            for lines in zip(*chats, strict=True):
                file.writelines(lines)


def _lines(number: int, patterns: Sequence[bytes], border: Sequence[bytes]) -> Iterator[bytes]:
    name = b"episode-%08d" % number
    yield border[0].replace(_EPISODE, name)
    for k in range(TURNS):
        pattern = patterns[(number * TURNS + k) % _PATTERNS]
        before = b'"%s-%d"' % (name, k - 1) if k else b""
        line = pattern.replace(b'"%s"' % _BEFORE, before).replace(_EPISODE, name)
        yield line.replace(_TURN, b"%s-%d" % (name, k)).replace(b'"index":0', b'"index":%d' % k)
    for line in border[1:]:
        yield line.replace(_EPISODE, name)


def _pattern(draw: random.Random, number: int) -> bytes:
    agent = AGENTS[number % len(AGENTS)]
    said = " ".join(draw.choices(_WORDS, k=PROMPT - 20))
    return encode_line(
        Turn(
            time=_TIME,
            episode_id=_EPISODE.decode(),
            turn_id=_TURN.decode(),
            agent=agent,
            messages=[
                {"role": "system", "content": f"You are the {agent} of a team of three."},
                {"role": "user", "content": said, "name": AGENTS[number % 2]},
            ],
            text=" ".join(draw.choices(_WORDS, k=REPLY)),
            sampling=Sampling(temperature=1.0, max_tokens=64),
            prompt_token_ids=[draw.randrange(49_152) for _ in range(PROMPT)],
            token_ids=[draw.randrange(49_152) for _ in range(REPLY)],
            logprobs=[-draw.expovariate(1.0) for _ in range(REPLY)],
            logprob_mode="processed",
            finish_reason="stop",
            model=agent,
            adapter_start=f"{agent}@v1",
            adapter_end=f"{agent}@v1",
            response_id=f"chatcmpl-{_TURN.decode()}",
            depends_on=[_BEFORE.decode()],
            latency_s=0.25,
        )
    )


def _start() -> bytes:
    return encode_line(
        EpisodeStarted(
            time=_TIME, episode_id=_EPISODE.decode(), task="make the tests pass", runtime="made"
        )
    )


def _end() -> tuple[bytes, bytes]:
    name = _EPISODE.decode()
    reward = RewardEvent(time=_TIME, episode_id=name, value=1.0)
    return encode_line(reward), encode_line(EpisodeEnded(time=_TIME, episode_id=name))
