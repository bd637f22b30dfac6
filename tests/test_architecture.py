"""The house rules that a machine can check: who imports whom, what may be loaded, file sizes."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "marft_agents"
EVERYTHING = frozenset({"*"})
MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "schema": frozenset({"errors"}),
    "log": frozenset({"schema"}),
    "recording": frozenset({"log", "schema"}),
    "rewards": frozenset({"schema", "log"}),
    "credit": frozenset({"schema"}),
    "training": frozenset({"credit", "rewards", "log", "registry", "schema"}),
    "registry": frozenset({"schema"}),
    "serving": frozenset({"registry", "log", "schema", "recording"}),
    "evaluation": frozenset({"rewards", "registry"}),
    "cli": EVERYTHING,
    "testing": frozenset({"recording", "log", "schema"}),
    "__main__": frozenset({"cli"}),
    "__init__": frozenset({"recording", "log"}),
}
HEAVY = (
    "torch", "transformers", "peft", "trl", "datasets", "vllm", "numpy",
    "autogen_agentchat", "autogen_core", "autogen_ext", "autogen", "ag2", "agent_framework",
    "agents", "openai",
)  # fmt: skip


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            module = node.module or ""
            yield node.lineno, module
            if module == "marft_agents":
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def test_rooms_import_only_what_the_design_allows() -> None:
    offences: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = _room(path)
        allowed = MAY_IMPORT[room]
        for line, name in _imports(path):
            parts = name.split(".")
            if parts[0] != "marft_agents" or len(parts) == 1 or allowed == EVERYTHING:
                continue
            if parts[1] not in allowed | {room, "errors"}:
                offences.append(f"{path.relative_to(ROOT)}:{line} {room} imports {name}")
    assert not offences, "\n".join(offences)


def test_every_room_is_in_the_table() -> None:
    rooms = {_room(p) for p in PACKAGE.rglob("*.py")}
    assert rooms <= set(MAY_IMPORT), rooms - set(MAY_IMPORT)


def test_integrations_import_the_recording_room_only() -> None:
    offences = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / "integrations").rglob("*.py"))
        for line, name in _imports(path)
        if name.startswith("marft_agents.")
        and name.split(".")[1] not in {"recording", "errors", "schema"}
    ]
    assert not offences, "\n".join(offences)


@pytest.mark.parametrize(
    "statement", ["import marft_agents", "import marft_agents.cli, marft_agents.testing"]
)
def test_the_core_loads_no_framework(statement: str) -> None:
    code = f"{statement}; import sys, json; print(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in json.loads(out.stdout)}
    assert not loaded & set(HEAVY)


def test_serving_and_registry_need_no_torch() -> None:
    code = (
        "import marft_agents.serving, marft_agents.registry, marft_agents.log, sys;"
        "print(sorted(m for m in ('torch', 'transformers', 'peft', 'vllm') if m in sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "room",
    ["marft_agents", "credit", "evaluation", "log", "recording", "registry", "rewards", "serving"],
)
def test_all_names_what_exists(room: str) -> None:
    name = room if room == "marft_agents" else f"marft_agents.{room}"
    module = importlib.import_module(name)
    exported: list[str] = module.__all__
    assert len(exported) == len(set(exported)) > 0
    assert [n for n in exported if not hasattr(module, n)] == []


def test_files_stay_small() -> None:
    roots = ("marft_agents", "integrations", "examples", "tests", "tools")
    sizes = {
        path: len(path.read_text(encoding="utf-8").splitlines())
        for root in roots
        for path in (ROOT / root).rglob("*.py")
    }
    assert len(sizes) > 20
    assert {str(p.relative_to(ROOT)): n for p, n in sizes.items() if n > 500} == {}


def test_only_one_module_reaches_into_trl() -> None:
    offences = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, name in _imports(path)
        if name.split(".")[0] == "trl" and path.name != "_trl.py"
    ]
    assert not offences, "\n".join(offences)
