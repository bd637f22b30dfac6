"""What is said before anything is trained: what will be learned from, and why not from the rest.

Invariant: every recorded agent and every published adapter is on the page, trained or not, and
every episode and turn left out is counted under a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from marft_agents.errors import ConfigError, TrainingError
from marft_agents.log import LogReader
from marft_agents.rewards import ScoreTally
from marft_agents.schema import parse_served_name, served_name
from marft_agents.training.config import MarftConfig
from marft_agents.training.dataset import TrainingSet
from marft_agents.training.plan import Plan, reward_line
from marft_agents.training.signal import flat_tasks
from marft_agents.training.stored import Picked


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned columns; the first one is the header."""
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in counter.most_common())


def require_sense(config: MarftConfig, *, online: bool) -> None:
    """Refuse settings that cannot go together.

    Raises:
        ConfigError: naming them.
    """
    if config.offline == "none" and not online:
        raise ConfigError("offline: none leaves nothing to do without the online stage")
    if config.offline == "ppo" and config.schedule == "alternate" and not online:
        raise ConfigError(
            "schedule: alternate updates one agent an iteration; on logs alone it would train one"
            " agent only. Use sequential, or go on online"
        )


def reading_lines(reader: LogReader, tally: ScoreTally | None) -> Iterator[str]:
    """What reading the logs and asking the reward function gave."""
    if reader.skipped_count:
        first = f"; first: {reader.skipped[0]}" if reader.skipped else ""
        yield f"skipped {reader.skipped_count} unreadable lines{first}"
    if reader.duplicates:
        yield f"dropped {reader.duplicates} duplicate turns"
    if tally is not None:
        yield (
            f"reward function: {tally.scored} episodes scored, {tally.already_scored} had a"
            f" reward, {tally.unscored} not scored, {tally.failed} failed; the scores are for this"
            " run, the logs stay as they are"
        )
        yield from (f"  {example}" for example in tally.examples)


def plan_lines(plan: Plan) -> Iterator[str]:
    """The plan, for people."""
    data = plan.data
    yield f"base model: {plan.base.name} ({plan.base.fingerprint[:12]})"
    used = len(data.episodes)
    yield f"episodes: {used} of {data.episodes_read} usable"
    if data.left_out_episodes:
        yield f"  left out: {_counted(data.left_out_episodes)}"
    if data.notes:
        yield f"  note: {_counted(data.notes)}"
    yield f"reward: {reward_line([e.total_reward for e in data.episodes])}"
    repeated, flat = flat_tasks(data.episodes)
    if flat:
        yield f"  {flat} of {repeated} repeated tasks always earned the same"
    yield ""
    yield from table(list(_adapter_rows(plan)))
    yield from (f"  {u.name}: {u.why}; untouched" for u in plan.untouched)
    partly = Counter[str]()
    trained = {agent for adapter in plan.adapters for agent in adapter.agents}
    for (agent, why), n in sorted(data.left_out_turns.items()):
        if agent in trained:
            partly[f"of {agent}: {why}"] += n
    if partly:
        yield f"  turns left out: {_counted(partly)}"
    yield from (f"note: {note}" for note in plan.notes)
    yield from _foreign_answers(plan)


def answered_by(
    data: TrainingSet, by_adapter: Mapping[str, Sequence[int]]
) -> Counter[tuple[str, str, str]]:
    """(agent, its adapter, what answered it) to turns, for the rows of each adapter."""
    return Counter(
        (row.agent, adapter, row.adapter or "the base model")
        for adapter, rows in by_adapter.items()
        for row in Picked(data.rows, rows)
    )


def _foreign_answers(plan: Plan) -> Iterator[str]:
    """Agents answered by another agent's adapter: mostly a wrong model name in the app."""
    answered = answered_by(plan.data, {a.adapter: a.rows for a in plan.adapters})
    for (agent, adapter, version), turns in sorted(answered.items()):
        named = parse_served_name(version)
        if named is not None and named[0] != adapter:
            yield (
                f"WARNING: {turns} turns of agent {agent!r} were answered by {version}: the app"
                f" calls model={named[0]!r} for it. Give it model={adapter!r}, or what is trained"
                f" here for {adapter} will not answer it (or let them share: agents:"
                f" {{{agent}: {named[0]}}})"
            )


def require_own_answers(data: TrainingSet, by_adapter: Mapping[str, Sequence[int]]) -> None:
    """Online, what is trained must be what answers, or nothing that is learned is ever played.

    Raises:
        TrainingError: no turn of an adapter's agents was answered by that adapter.
    """
    answered = answered_by(data, by_adapter)
    for adapter in by_adapter:
        of = {(a, version): n for (a, own, version), n in answered.items() if own == adapter}
        names = [parse_served_name(version) for _, version in of]
        if not any(name is not None and name[0] == adapter for name in names):
            agent, version = next(iter(of))
            raise TrainingError(
                f"none of {sum(of.values())} turns trained for adapter {adapter!r} was answered by"
                f" it; agent {agent!r} was answered by {version}. What is learned would never be"
                f" played: give the agent model={adapter!r} in the app, or map it to the adapter"
                " that answers it under `agents:`"
            )


def _adapter_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    yield "agent", "adapter", "rank", "episodes", "turns", "tokens", "recorded under"
    for adapter in plan.adapters:
        rows = plan.rows_of(adapter)
        start = f"from {served_name(adapter.adapter, adapter.start)}" if adapter.start else "new"
        yield (
            ", ".join(adapter.agents),
            f"{adapter.adapter} ({start})",
            str(adapter.rank),
            str(len({row.episode for row in rows})),
            str(len(rows)),
            str(sum(len(row.token_ids) for row in rows)),
            ", ".join(f"{name} x{n}" for name, n in adapter.behaviour.most_common(3)),
        )
