"""Run the recorder's tests on older versions of the openai SDK, each in an environment of its own.

The SDK changed its HTTP client at 3.0; the recorder claims to work on both sides. The project's own
environment has the newest version, so only the older ones are set up here, under ``.venv-sdks``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("1.109.1", "2.30.0")
TESTS = ("tests/recording", "tests/integrations", "tests/test_testing.py")


def environment(version: str) -> Path:
    """The interpreter of an environment that holds this version of the SDK."""
    folder = ROOT / ".venv-sdks" / version
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        print(f"setting up openai {version}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        tools = ["pytest>=8.3", "pytest-asyncio>=0.25", "hypothesis>=6.100"]
        subprocess.run(
            [*pip, f"openai=={version}", *tools, "--editable", f"{ROOT}[agentchat]"], check=True
        )
        ready.touch()
    return python


def main() -> int:
    failed: list[str] = []
    for version in VERSIONS:
        print(f"recorder on openai {version}", flush=True)
        command = [str(environment(version)), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        if subprocess.run([*command, *TESTS], cwd=ROOT).returncode != 0:
            failed.append(version)
    if failed:
        print(f"failed on openai {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
