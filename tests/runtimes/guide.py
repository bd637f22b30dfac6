"""A runtime's guide, run as its reader would run it, against a scripted server.

Only the server's address is changed; ``my_project`` stands for the reader's own code.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from marft_agents.log import LogReader
from marft_agents.schema import Episode, adapter_slug
from marft_agents.testing import Script, ScriptedServer, default_reply

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "http://127.0.0.1:8000"
BLOCK = re.compile(r"<!-- run: guide -->\n```python\n(.*?)```", re.DOTALL)
SERVE = re.compile(r"```bash\nmarft-agents serve .* --agents ([\w,]+)")
PROJECT = """
TASKS = [f"ship part {i} on friday?" for i in range(3)]


def score(task, result):
    return 0.5
"""


def program(name: str) -> str:
    """The guide's blocks, one after the other, as one program."""
    blocks = BLOCK.findall((ROOT / "docs" / "runtimes" / f"{name}.md").read_text(encoding="utf-8"))
    assert blocks, f"docs/runtimes/{name}.md has no block tagged `<!-- run: guide -->`"
    text = "\n".join(blocks)
    assert ADDRESS in text, f"the guide {name} names no server at {ADDRESS}"
    return text


def served(name: str) -> tuple[str, ...]:
    """The models that the guide has served, as the gateway lists them."""
    lines = SERVE.findall((ROOT / "docs" / "runtimes" / f"{name}.md").read_text(encoding="utf-8"))
    assert len(lines) == 1, f"docs/runtimes/{name}.md says not once how to serve its agents"
    return tuple(map(adapter_slug, lines[0].split(",")))


def run_guide(name: str, folder: Path, *, script: Script = default_reply) -> list[Episode]:
    """The episodes that the guide's program records, in ``folder``/logs; it must succeed.

    Every call must be one for a model that the guide has served.
    """
    models = served(name)
    (folder / "my_project.py").write_text(PROJECT)
    with ScriptedServer(script, models=models) as server:
        address = server.url.removesuffix("/v1")
        (folder / "app.py").write_text(program(name).replace(ADDRESS, address))
        done = subprocess.run(
            [sys.executable, "app.py"], cwd=folder, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stdout + done.stderr
    episodes = list(LogReader(folder / "logs").episodes())
    asked = {turn.adapter_start for episode in episodes for turn in episode.turns}
    assert asked == set(models), f"the guide {name} serves {models}, and its app asks for {asked}"
    return episodes
