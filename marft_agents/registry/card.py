"""The README of one adapter version, readable by people and by model hubs.

Invariant: it says only what the manifest says, and all that the manifest says of the training. What
came from outside (names, reasons) cannot break out of its table cell.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from marft_agents.schema import AdapterManifest

_SHOWN_APART = ("settings", "metrics", "effect")
_LABELS = {
    "method": "method",
    "estimator": "estimator",
    "level": "level",
    "objective": "objective",
    "iteration": "iteration",
    "agents": "agents",
    "episodes": "episodes",
    "turns": "turns",
    "tokens": "sampled tokens",
    "mean_reward": "mean reward of the episodes",
    "recorded_under": "turns by the version that sampled them",
    "critic_explained_variance": "variance of unseen returns that the critic explains",
    "logs": "logs",
    "program": "program",
}
"""In this order; what else there is comes behind, under its own name."""


def _front_matter(manifest: AdapterManifest) -> Iterator[str]:
    yield "---"
    yield f"base_model: {json.dumps(manifest.base.name)}"
    yield "library_name: peft"
    yield "pipeline_tag: text-generation"
    yield "tags:"
    for tag in ("lora", "marft-agents", "multi-agent", "reinforcement-learning"):
        yield f"- {tag}"
    yield "---"


def _story(manifest: AdapterManifest) -> str:
    agent, base = manifest.agent, manifest.base.name
    if manifest.untrained:
        return (
            f"Starting point of the agent `{agent}`: an untrained LoRA (B = 0). It answers exactly"
            f" as the base model `{base}` does."
        )
    origin = f"continued from version {manifest.parent}" if manifest.parent else "from scratch"
    return (
        f"LoRA adapter of the agent `{agent}` of a multi-agent application, trained on"
        f" `{base}`, {origin}."
    )


def _cell(value: Any) -> str:
    """A value as text that stays in its cell."""
    if isinstance(value, float):
        text = f"{value:.4g}"
    elif isinstance(value, str):
        text = value
    elif isinstance(value, list):
        text = ", ".join(_cell(item) for item in cast("list[Any]", value))
    elif isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        text = ", ".join(f"{name}: {_cell(item)}" for name, item in pairs)
    else:
        text = json.dumps(value, default=str)
    return " ".join(text.replace("|", "\\|").split()) or "-"


def _table(header: Sequence[str], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _facts(training: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    known = [name for name in _LABELS if name in training]
    others = [name for name in training if name not in _LABELS and name not in _SHOWN_APART]
    for name in (*known, *others):
        value = training[name]
        if name == "iteration" and value == 0:
            value = "0: the stage on logs"
        yield _LABELS.get(name, _cell(name)), _cell(value)


def _effect(effect: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name in ("good", "bad"):
        before, after = effect[f"{name}_before"], effect[f"{name}_after"]
        label = "best" if name == "good" else "worst"
        yield label, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}"


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    yield from ("", f"## {title}", "", *lines)


def _training(training: Mapping[str, Any]) -> Iterator[str]:
    if not training:
        yield from ("## Training", "", "No record of training.")
        return
    yield from ("## Training", "", *_table(("what", "value"), _facts(training)))
    settings: Any = training.get("settings")
    if isinstance(settings, dict):
        pairs = cast("dict[str, Any]", settings).items()
        rows = ((f"`{_cell(name)}`", _cell(value)) for name, value in pairs)
        yield from _section(
            "Settings that differ from the defaults", _table(("setting", "value"), rows)
        )
    effect: Any = training.get("effect")
    if isinstance(effect, dict) and {"good_before", "good_after", "bad_before", "bad_after"} <= set(
        cast("dict[str, Any]", effect)
    ):
        header = ("turns by advantage", "before", "after", "change")
        yield from _section(
            "Effect: mean log-probability per token", _table(header, _effect(effect))
        )
    metrics: Any = training.get("metrics")
    if isinstance(metrics, dict) and metrics:
        pairs = cast("dict[str, Any]", metrics).items()
        rows = ((f"`{_cell(name)}`", _cell(value)) for name, value in pairs)
        yield from _section("Metrics of the update", _table(("metric", "mean"), rows))


def model_card(manifest: AdapterManifest) -> str:
    """Markdown with the front matter that PEFT and model hubs read."""
    name, base = manifest.served_name, manifest.base.name
    modules = ", ".join(manifest.target_modules)
    lines = [
        *_front_matter(manifest),
        "",
        f"# {name}",
        "",
        _story(manifest),
        "",
        f"- rank {manifest.rank} on {modules}",
        f"- base fingerprint `{manifest.base.fingerprint}`",
        f"- parent: {'none' if manifest.parent is None else f'version {manifest.parent}'}",
        f"- written {manifest.created.isoformat(timespec='seconds')}",
        "",
        *_training(manifest.training),
        "",
        "## Use",
        "",
        "With PEFT:",
        "",
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f"base = AutoModelForCausalLM.from_pretrained({json.dumps(base)})",
        'model = PeftModel.from_pretrained(base, "path/to/this/folder")',
        "```",
        "",
        "With vLLM:",
        "",
        "```sh",
        f"vllm serve {base} --enable-lora --max-lora-rank {max(8, manifest.rank)} \\",
        f"  --lora-modules {manifest.agent}=path/to/this/folder",
        "```",
        "",
    ]
    return "\n".join(lines)
