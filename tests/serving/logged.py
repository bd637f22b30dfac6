"""What a stage logged of its requests."""

from __future__ import annotations

from typing import Any

import pytest

from marft_agents.serving.log_lines import Told
from tests.serving.stage import Stage


def told(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    """The fields of every line of one kind."""
    messages: list[Any] = [record.msg for record in caplog.records]
    fields = [dict(m.fields) for m in messages if isinstance(m, Told)]
    return [f for f in fields if f["event"] == event]


def logged_requests(
    stage: Stage, caplog: pytest.LogCaptureFixture, count: int
) -> list[dict[str, Any]]:
    """The first ``count`` requests' fields; a line comes just after its client's last byte."""
    stage.wait(lambda: len(told(caplog, "request")) >= count)
    return told(caplog, "request")[:count]
