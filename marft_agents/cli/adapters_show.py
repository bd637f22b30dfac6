"""``marft-agents adapters show``: everything about one version."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import click

from marft_agents.cli._adapters import one_version, require_registry, size_text
from marft_agents.cli._amounts import percent
from marft_agents.cli._moving import adapters_option
from marft_agents.cli._text import say, table
from marft_agents.registry import CanaryPlan, Registry
from marft_agents.registry.verify import file_states
from marft_agents.schema import AdapterManifest


@click.command("show")
@click.argument("version", metavar="AGENT[@vN]")
@adapters_option
@click.option("--json", "as_json", is_flag=True, help="The same as one JSON object.")
def command(version: str, adapters: Path, as_json: bool) -> None:
    """Show a version (default: the one in use): what it was trained on, its probe, its files
    compared with their checksums, and its lines in the audit trail."""
    registry = require_registry(adapters)
    agent, number = one_version(registry, version)
    manifest = registry.manifest(agent, number)
    folder = registry.path(agent, number)
    files = [
        {"file": name, "bytes": _size(folder / name), "problem": problem or None}
        for name, problem in file_states(folder, manifest)
    ]
    trail = [e for e in registry.audit(agent) if number in (e.get("from"), e.get("to"))]
    canary = registry.canary(agent)
    if canary is not None and canary.version != number:
        canary = None
    if as_json:
        told: dict[str, Any] = {"folder": str(folder), "current": registry.current(agent)}
        told |= {"pinned": registry.pinned(agent), "files": files, "audit": trail}
        told["canary"] = None if canary is None else canary.model_dump(mode="json")
        say(json.dumps({"manifest": manifest.model_dump(mode="json"), **told}, indent=2))
        return
    for line in _lines(registry, (agent, number), manifest, canary, files, trail):
        say(line)


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


def _lines(
    registry: Registry,
    name: tuple[str, int],
    manifest: AdapterManifest,
    canary: CanaryPlan | None,
    files: list[dict[str, Any]],
    trail: list[dict[str, Any]],
) -> Iterator[str]:
    agent, number = name
    marks = {
        "in use": registry.current(agent) == number,
        "pinned": registry.pinned(agent) == number,
        f"canary, {percent(canary.share if canary else 0)}": canary is not None,
        "untrained": manifest.untrained,
    }
    states = ", ".join(mark for mark, holds in marks.items() if holds)
    yield f"{manifest.served_name}{f' ({states})' if states else ''}"
    yield f"  folder   {registry.path(agent, number)}"
    yield f"  created  {manifest.created.isoformat(timespec='seconds')}"
    yield f"  parent   {'-' if manifest.parent is None else f'v{manifest.parent}'}"
    yield f"  base     {manifest.base.name} (fingerprint {manifest.base.fingerprint[:12]})"
    yield f"  LoRA     rank {manifest.rank} on {', '.join(manifest.target_modules)}"
    yield f"  probe    {_probe(manifest)}"
    yield from ("", "training" if manifest.training else "training: no record")
    yield from (f"  {name}: {_value(value)}" for name, value in manifest.training.items())
    yield from ("", "files")
    rows = [
        (f["file"], "-" if f["bytes"] is None else size_text(f["bytes"]), f["problem"] or "ok")
        for f in files
    ]
    yield from (f"  {line}" for line in table(("file", "size", "state"), rows, right=(1,)))
    yield from ("", "audit trail")
    yield from (f"  {_trail_line(entry)}" for entry in trail)


def _probe(manifest: AdapterManifest) -> str:
    probe = manifest.probe
    if probe is None:
        return "none: a server compares it with the base only"
    pairs = zip(probe.logprobs, probe.base_logprobs, strict=False)
    effect = max((abs(ours - base) for ours, base in pairs), default=0.0)
    return f"{len(probe.token_ids)} tokens; differs from the base by {effect:.3g}"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(_rounded(value), ensure_ascii=False, default=str)


def _rounded(value: Any) -> Any:
    """``value`` with four digits of every number in it; ``--json`` has all of them."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in cast("list[Any]", value)]
    return value


def _trail_line(entry: Mapping[str, Any]) -> str:
    origin, target = (_version(entry.get(end)) for end in ("from", "to"))
    words = [str(entry.get("time", ""))[:19], str(entry.get("who")), str(entry.get("action"))]
    words.append(f"{origin} -> {target}")
    if entry.get("command"):
        words.append(f"by {entry['command']}")
    if entry.get("evidence"):
        words.append(_value(entry["evidence"]))
    if entry.get("result", "done") != "done":
        words.append(f"FAILED: {entry['result']}")
    return "  ".join(words)


def _version(version: Any) -> str:
    return f"v{version}" if isinstance(version, int) else "-"
