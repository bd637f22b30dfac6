"""The pages of the commands are what the commands say of themselves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from marft_agents.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]


def test_no_page_is_stale() -> None:
    done = subprocess.run(
        [sys.executable, "tools/write_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_command_has_a_page_that_the_readme_names() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"(docs/{name}.md)" in readme
        assert (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").count("## Help") == 1


def test_no_link_between_pages_is_broken() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    broken = [
        f"{page.name} -> {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert broken == []
