"""The example team as an app for online training, with a reward that a random model can earn."""

from __future__ import annotations

import os

from examples.support_triage import app
from marft_agents import MarftRecorder

AGENTS = ("router", "writer")


async def run(task: str, recorder: MarftRecorder) -> float:
    """The fewer characters the duo says, the better."""
    models = app.make_models(os.environ["APP_SERVER"] + "/v1", temperature=1.0)
    try:
        result = await recorder.wrap(app.make_team(models)).run(task=task)
    finally:
        await models.close()
    said = sum(len(m.to_text()) for m in result.messages if m.source in AGENTS)  # pyright: ignore[reportAttributeAccessIssue] every message of this team is a chat message
    return 1.0 / (1.0 + said / 20.0)
