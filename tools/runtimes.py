"""Run the recorder's tests on each agent runtime, each in an environment of its own.

``python tools/runtimes.py [NAME ...] [--setup-only | --types]``; without a name, all of them.

Runtimes cannot share an environment: some own the same import package, some need openai below 3,
others from 3 on. The project's own environment has the newest AutoGen AgentChat and openai SDK; the
others are set up here, under ``.venv-runtimes``. An environment in which no test ran has failed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-runtimes"
TOOLS = ("pytest>=8.3", "pytest-asyncio>=0.25", "hypothesis>=6.100")


@dataclass(frozen=True)
class Runtime:
    """Packages of an environment, what is tested in it, and what is type-checked with it."""

    packages: tuple[str, ...]
    tests: tuple[str, ...]
    types: tuple[str, ...] = ()


RECORDER = ("tests/recording", "tests/integrations", "tests/test_testing.py")
AGENTCHAT = ("tests/integrations",)
CLASSIC = ("tests/runtimes/classic",)
AGENT_FRAMEWORK = ("tests/runtimes/agent_framework",)
AG2 = ("tests/runtimes/ag2",)
OPENAI_AGENTS = ("tests/runtimes/openai_agents",)
INSPECT_AI = ("tests/runtimes/inspect_ai",)

RUNTIMES: dict[str, Runtime] = {
    # The SDK changed its HTTP client at 3.0; the recorder works on both sides.
    "openai-1": Runtime(
        ("openai==1.109.1", "autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"), RECORDER
    ),
    "openai-2": Runtime(
        ("openai==2.30.0", "autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"),
        ("tests/recording",),
    ),
    "agentchat-oldest": Runtime(
        ("autogen-agentchat==0.4.9", "autogen-ext[openai]==0.4.9"), AGENTCHAT
    ),
    "classic": Runtime(
        ("autogen[openai]==0.14.1", "diskcache", "pillow"),
        CLASSIC,
        ("integrations/marft_agents_classic", *CLASSIC),
    ),
    "classic-ag2": Runtime(("ag2[openai]==0.14.0", "diskcache", "pillow"), CLASSIC),
    "classic-pyautogen09": Runtime(("pyautogen[openai]==0.9", "pillow"), CLASSIC),
    "classic-pyautogen02": Runtime(("pyautogen==0.2.35", "pillow"), CLASSIC),
    "classic-agentchat02": Runtime(("autogen-agentchat==0.2.40", "pillow"), CLASSIC),
    "agent-framework": Runtime(
        (
            "agent-framework-core==1.23.0",
            "agent-framework-openai==1.17.0",
            "agent-framework-orchestrations==1.4.0",
        ),
        AGENT_FRAMEWORK,
        ("integrations/marft_agents_agent_framework", *AGENT_FRAMEWORK),
    ),
    "agent-framework-oldest": Runtime(
        (
            "agent-framework-core==1.9.0",
            "agent-framework-openai==1.0.0",
            "agent-framework-orchestrations==1.0.0",
        ),
        AGENT_FRAMEWORK,
    ),
    "ag2": Runtime(("ag2[openai]==1.2.1",), AG2, ("integrations/marft_agents_ag2", *AG2)),
    "ag2-oldest": Runtime(("ag2[openai]==1.0.0",), AG2),
    "openai-agents": Runtime(
        ("openai-agents==0.24.0",),
        OPENAI_AGENTS,
        ("integrations/marft_agents_openai_agents", *OPENAI_AGENTS),
    ),
    "openai-agents-oldest": Runtime(("openai-agents==0.2.11",), OPENAI_AGENTS),
    # No runtime: reads what the log is exported to.
    "inspect-ai": Runtime(("inspect-ai==0.3.285",), INSPECT_AI, INSPECT_AI),
}
BENCHMARKS: dict[str, Runtime] = {
    "bench-recorder": Runtime(
        (
            "autogen-agentchat==0.7.5",
            "autogen-ext[openai]==0.7.5",
            "mlflow==3.17.2",
            "opentelemetry-sdk==1.45.2",
            "opentelemetry-instrumentation-openai==0.62.4",
        ),
        (),
    ),
    "bench-gateway": Runtime(("litellm[proxy]==1.106.12",), ()),
}
"""Set up by the benchmarks that need them, and by nothing else."""


def environment(name: str) -> Path:
    """The interpreter of the runtime's environment, set up when it is missing or has changed.

    Two programs may ask for it at once; one of them sets it up and the other waits.
    """
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _environment(name)


def _environment(name: str) -> Path:
    folder, runtime = FOLDER / name, (RUNTIMES | BENCHMARKS)[name]
    python, mark = folder / "bin" / "python", folder / ".ready"
    wanted = hashlib.sha256(
        repr((runtime.packages, TOOLS, sys.version_info[:3])).encode()
        + (ROOT / "pyproject.toml").read_bytes()
    ).hexdigest()
    if python.exists() and mark.exists() and mark.read_text() == wanted:
        return python
    started = time.monotonic()
    command = [sys.executable, "-m", "venv", "--without-pip"]
    subprocess.run(
        [*command, *(["--clear"] if not python.exists() else []), str(folder)], check=True
    )
    _install(python, [*runtime.packages, *TOOLS, "--editable", str(ROOT)])
    mark.write_text(wanted)
    print(f"{name}: set up in {time.monotonic() - started:.0f} s", flush=True)
    return python


def _install(python: Path, packages: list[str]) -> None:
    """With uv, which takes a tenth of pip's time; with pip where uv is missing or fails."""
    uv = Path(sys.executable).with_name("uv")
    command = [str(uv), "pip", "install", "--quiet", "--python", str(python), *packages]
    if uv.exists() and subprocess.run(command).returncode == 0:
        return
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--disable-pip-version-check", *packages], check=True)


def test(name: str) -> bool:
    """Run the runtime's tests; no test at all is a failure (pytest's exit code 5)."""
    print(f"recorder on {name}: {', '.join(RUNTIMES[name].packages)}", flush=True)
    python = environment(name)
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # Agents that run code look for a `python`, which not every machine has.
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
    variables = {**os.environ, "MARFT_RUNTIME": name, "PATH": path}
    done = subprocess.run([*command, *RUNTIMES[name].tests], cwd=ROOT, env=variables)
    return done.returncode == 0


def check_types(name: str) -> bool:
    """Run pyright over an integration with the packages of its runtime."""
    paths = RUNTIMES[name].types
    if not paths:
        return True
    print(f"types of {name}", flush=True)
    python = environment(name)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    for key in ("venvPath", "venv", "exclude"):
        del settings[key]
    settings |= {
        "include": [f"../../{path}" for path in paths],  # seen from the file below
        "extraPaths": ["../..", "../../integrations"],
    }
    config = FOLDER / name / "pyrightconfig.json"
    config.write_text(json.dumps(settings, indent=1))
    pyright = str(Path(sys.executable).with_name("pyright"))
    command = [pyright, "--project", str(config), "--pythonpath", str(python)]
    return subprocess.run(command, cwd=ROOT).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RUNTIMES))
    parser.add_argument("--setup-only", action="store_true")
    parser.add_argument("--types", action="store_true", help="run pyright instead of the tests")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in RUNTIMES]
    if unknown:
        parser.error(f"unknown runtime {', '.join(unknown)}; known: {', '.join(RUNTIMES)}")
    names = args.names or list(RUNTIMES)
    if args.setup_only:
        for name in names:
            environment(name)
        return 0
    failed = [name for name in names if not (check_types if args.types else test)(name)]
    if failed:
        print(f"failed on {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
