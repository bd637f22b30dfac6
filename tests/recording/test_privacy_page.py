"""The page on privacy: its programs run, and what it says of them holds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from marft_agents.log import LogReader

PAGE = Path(__file__).resolve().parents[2] / "docs" / "privacy.md"
BLOCK = re.compile(r"<!-- run: privacy -->\n```python\n(.*?)```", re.DOTALL)
USE = """
with recorder.episode(id="e", metadata={"user_id": "ann", "id": "EMP-123456"}):
    recorder.current().human("ann", "mail me: ann@example.invalid")
    recorder.current().human("ann", "and my key is sk-test-1234")
recorder.close()
"""


def test_the_programs_of_the_page_run(tmp_path: Path) -> None:
    first, second = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    code = f"{first}\n{USE}\n{second}\nrecorder.close()"
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, check=True)
    episode = LogReader(tmp_path / "logs").episode("e")
    assert re.fullmatch(r"\[hash:[0-9a-f]{24}\]", episode.metadata["user_id"])
    assert episode.metadata["id"] == "[redacted:pattern]"
    assert [h.text for h in episode.humans] == [
        "[a message with an address]",
        "and my key is [redacted:openai-key]",
    ]
