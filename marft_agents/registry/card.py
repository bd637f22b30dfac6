"""The README of one adapter version, readable by people and by model hubs.

Invariant: it says only what the manifest says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from marft_agents.schema import AdapterManifest


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


def _training_lines(manifest: AdapterManifest) -> Iterator[str]:
    if not manifest.training:
        yield "No record of training."
        return
    yield "| what | value |"
    yield "|---|---|"
    for name, value in manifest.training.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        cell = text.replace("|", "\\|").replace("\n", " ")
        yield f"| {name} | {cell} |"


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
        f"- written {manifest.created.isoformat(timespec='seconds')}",
        "",
        "## Training",
        "",
        *_training_lines(manifest),
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
