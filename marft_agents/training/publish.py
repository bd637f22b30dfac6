"""Publishing what was trained.

Invariant: nothing is published before every adapter was trained, measured and staged; each version
then appears whole or not at all, and files of the run (credit, critic) are written beside them in
one step each.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from marft_agents.schema import BaseModelInfo, Probe
from marft_agents.training.adapters import stage_adapter
from marft_agents.training.advantages import Credits
from marft_agents.training.config import MarftConfig
from marft_agents.training.critic import FittedCritic
from marft_agents.training.effect import Effect
from marft_agents.training.plan import AdapterPlan
from marft_agents.training.results import AdapterResult
from marft_agents.training.session import Session


@dataclass(frozen=True)
class Trained:
    """One adapter that was trained and measured, not yet published."""

    plan: AdapterPlan
    effect: Effect
    probe: Probe
    metrics: Mapping[str, float]
    """Last logged metrics of all adapters, ``<adapter>/<name>``."""


def publish_all(
    session: Session,
    trained: Sequence[Trained],
    credits: Credits,
    critic: FittedCritic,
    folder: Path,
    logs: list[str],
) -> list[AdapterResult]:
    """Stage every adapter, then publish one after another."""
    staged = [
        stage_adapter(session.model, t.plan.adapter, folder / t.plan.adapter) for t in trained
    ]
    results: list[AdapterResult] = []
    for one, path in zip(trained, staged, strict=True):
        facts = _facts(session, one, critic, logs)
        manifest = session.registry.publish(
            one.plan.adapter,
            path,
            base=session.plan.base,
            parent=one.plan.start,
            probe=one.probe,
            training=facts,
            by="marft-agents finetune",
        )
        results.append(
            AdapterResult(
                adapter=one.plan.adapter,
                agents=one.plan.agents,
                episodes=facts["episodes"],
                turns=facts["turns"],
                tokens=facts["tokens"],
                mean_weight=credits.mean_weight[one.plan.adapter],
                skipped=credits.skipped[one.plan.adapter],
                effect=one.effect,
                parent=one.plan.start,
                version=manifest.version,
            )
        )
    return results


def _facts(session: Session, one: Trained, critic: FittedCritic, logs: list[str]) -> dict[str, Any]:
    """What the manifest says about the training."""
    data, rows = session.plan.data, session.plan.rows_of(one.plan)
    episodes = {row.episode for row in rows}
    prefix = f"{one.plan.adapter}/"
    return {
        "method": "MARFT, action level, advantage-weighted regression",
        "agents": one.plan.agents,
        "episodes": len(episodes),
        "turns": len(rows),
        "tokens": sum(len(row.token_ids) for row in rows),
        "mean_reward": math.fsum(data.episodes[e].total_reward for e in episodes) / len(episodes),
        "recorded_under": dict(one.plan.behaviour),
        "effect": dataclasses.asdict(one.effect),
        "critic_explained_variance": critic.explained_variance,
        "metrics": {k.removeprefix(prefix): v for k, v in one.metrics.items() if prefix in k},
        "program": f"marft-agents {version('marft-agents')}",
        "settings": changed_settings(session.config),
        "logs": logs,
    }


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace ``path`` by these lines in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def save_critic(root: Path, critic: FittedCritic, base: BaseModelInfo, config: MarftConfig) -> Path:
    """The value head, where a later run can start from it: ``<root>/.critic/<utc>/``."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
    folder = root / ".critic" / stamp
    folder.mkdir(parents=True)
    state = {name: tensor.contiguous() for name, tensor in critic.head.state_dict().items()}
    save_file(state, folder / "critic.safetensors")
    facts = {
        "base_fingerprint": base.fingerprint,
        "hidden": config.critic_hidden,
        "gamma": config.gamma,
        "lam": config.lam,
        "explained_variance": critic.explained_variance,
        "shrinkage": critic.shrinkage,
    }
    write_lines(folder / "critic.json", [json.dumps(facts, indent=2)])
    return folder


def changed_settings(config: MarftConfig) -> dict[str, Any]:
    """What repeats a run of this version: the seed, and what differs from the defaults."""
    default = MarftConfig(use_cpu=config.use_cpu)
    names = {f.name for f in dataclasses.fields(MarftConfig)} - {"output_dir", "use_cpu", "seed"}
    changed = {
        name: getattr(config, name)
        for name in sorted(names)
        if getattr(config, name) != getattr(default, name)
    }
    return json.loads(json.dumps({"seed": config.seed, **changed}, default=str))
