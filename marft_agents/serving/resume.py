"""What an earlier gateway recorded lately, so that its episodes go on after a restart.

Invariant: only episodes that a gateway recorded, from segments that were written within the idle
timeout; what cannot be read is left out, and said.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from marft_agents.errors import MarftError
from marft_agents.log import LogReader
from marft_agents.recording.newest import MOST_NAMES, MOST_TURNS
from marft_agents.schema import Episode, Turn
from marft_agents.serving.episodes import RUNTIME

_log = logging.getLogger(__name__)


def recent_episodes(log_dir: Path, within_s: float) -> dict[str, Episode]:
    """Episodes by id: their newest turns, without token ids."""
    oldest = time.time() - within_s
    try:
        files = [f for f in sorted(log_dir.glob("*.jsonl")) if f.stat().st_mtime >= oldest]
        if not files:
            return {}
        return {
            episode.episode_id: _newest(episode)
            for episode in LogReader(*files).episodes()
            if episode.started is not None and episode.started.runtime == RUNTIME
        }
    except (MarftError, OSError) as error:
        _log.warning("episodes of an earlier server cannot be gone on with: %s", error)
        return {}


def _newest(episode: Episode) -> Episode:
    """What a gateway holds of an episode, however long it is."""
    return episode.model_copy(
        update={
            "turns": [_light(turn) for turn in episode.turns[-MOST_TURNS:]],
            "tools": episode.tools[-MOST_NAMES:],
            "humans": [],
            "rewards": [],
        }
    )


def _light(turn: Turn) -> Turn:
    return turn.model_copy(
        update={"messages": [], "prompt_token_ids": None, "token_ids": None, "logprobs": None}
    )
