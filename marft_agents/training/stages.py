"""The two stages of a run: on logs, then online, as one program of optimizer steps.

Invariant: a version is published only after its update was trained and measured as a whole, and
swapped in only after it was published; a round that a guard gave back publishes nothing. Between
two steps the run's state can be written and read again (``facts``, ``Learner``).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers.trainer_utils import SaveStrategy

from marft_agents.errors import NothingToLearn, RegistryError, TrainingError
from marft_agents.registry import Registry
from marft_agents.schema import BaseModelInfo, adapter_slug, served_name
from marft_agents.training import checkpoint
from marft_agents.training.advantages import Credits, credit_by_agent
from marft_agents.training.config import MarftConfig
from marft_agents.training.dataset import TrainingSet
from marft_agents.training.loop import Learner, UpdateReport, Work, rows_by_adapter
from marft_agents.training.naming import method_name
from marft_agents.training.plan import Plan
from marft_agents.training.preflight import require_own_answers, table
from marft_agents.training.publish import (
    Trained,
    program,
    publish_all,
    write_lines,
)
from marft_agents.training.rates import block_size
from marft_agents.training.replay import Replayer, replay_lines
from marft_agents.training.results import AdapterResult, adapter_result, credit_lines
from marft_agents.training.schedule import Block

Say = Callable[[str], None]
SINGLE_ADAPTER = "team"
"""The one adapter of estimator ``single``."""
SCARCE_TURNS = 20
"""Fewer turns than this teach an adapter little but their own words."""
IDLE_ROUNDS = 3
"""So many rounds in a row without signal end a run."""


class Source(Protocol):
    """Where online episodes come from (see ``online.OnlineSource``)."""

    def collect(self, iteration: int, current: Mapping[str, int]) -> TrainingSet: ...
    def lines(self) -> list[str]: ...
    def metrics(self) -> dict[str, float]: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: Mapping[str, Any]) -> None: ...
    @property
    def signal(self) -> bool:
        """Whether the latest iteration has something to learn from."""
        ...


@dataclass(frozen=True)
class Online:
    """What the online stage needs of its caller."""

    source: Source
    swap: Callable[[str, int], object]
    """Moves a server's alias to a new version; raises when it cannot."""
    prepare: Callable[[Mapping[str, int]], str | None] | None = None
    """Gets the new versions that are swapped next ready; gives what is to be said, or raises when
    one of them could not be swapped."""


class Stages:
    """What a run does between and around its steps."""

    def __init__(
        self,
        learner: Learner,
        registry: Registry,
        base: BaseModelInfo,
        config: MarftConfig,
        scratch: Path,
        *,
        settings: Mapping[str, Any],
        plan: Plan | None,
        online: Online | None,
        logs: list[str],
        say: Say,
    ) -> None:
        self.learner, self.registry, self.base, self.config = learner, registry, base, config
        self.plan, self.online, self.say = plan, online, say
        self.scratch, self._logs, self._settings = scratch, logs, dict(settings)
        self.offline_done = plan is None
        self.iteration = 1
        self.idle = 0
        self.rounds: list[dict[str, float]] = []
        self._round_facts: dict[str, float] = {}
        self.results: dict[str, AdapterResult] = {}
        self.untouched: dict[str, str] = {}
        """Adapters that the stage on logs did not train, and why."""
        self.explained: float | None = None
        self.credit_file: Path | None = None
        self.roles: dict[str, str] = {} if plan is None else dict(plan.roles)

    # -- the program -----------------------------------------------------------------------

    def program(self) -> Generator[Block, None, None]:
        """Every step of the run, from where it is."""
        if not self.offline_done:
            yield from self._offline()
        if self.online is None:
            return
        while self.iteration <= self.config.iterations:
            yield from self._round(self.online)

    def _offline(self) -> Generator[Block, None, None]:
        work = self.learner.work or self.prepare_offline()
        report = yield from self.learner.train(work)
        self.finish_offline(work, report)

    def prepare_offline(self) -> Work:
        """Credit of the logs, and the batch made of it."""
        plan, config = self._plan, self.config
        objective = config.offline
        by_adapter = {a.adapter: a.rows for a in plan.adapters}
        work = self.learner.prepare(
            plan.data, by_adapter, self.roles, objective=objective, iteration=0
        )
        self._say_credit(work)
        return work

    @property
    def _plan(self) -> Plan:
        if self.plan is None:
            raise TrainingError("there is no plan for a stage on logs")
        return self.plan

    def finish_offline(self, work: Work, report: UpdateReport) -> None:
        """Publish what the logs taught.

        Raises:
            TrainingError: when a guard gave it back.
        """
        if report.restored is not None:
            raise TrainingError(f"nothing was published: {report.restored}")
        self._warn_nonfinite()
        credits = work.credits
        if credits is not None and credits.actions:
            self._write_credit(credits, work)
        self.explained = report.explained_variance
        planned = [a.adapter for a in self._plan.adapters]
        self.untouched = {a: self._why(work, a) for a in planned if a not in report.effects}
        self._publish(work, report, self._logs)
        self.offline_done = True
        if self.online is not None:
            self._swap(self.online, work.batch.adapters)
            self.save()

    def _why(self, work: Work, adapter: str) -> str:
        """Why an update left an adapter alone."""
        if work.credits is not None and adapter in work.credits.flat:
            return "no signal: its turns do not differ"
        if work.batch.objective != "ppo":
            return "none of its turns was picked"
        rows = () if self.plan is None else self.plan.data.rows
        ratio = any(r.off_policy is None for r in rows if self.roles.get(r.agent) == adapter)
        if self.config.schedule == "alternate" and ratio:
            return "it was not its turn (schedule: alternate)"
        return "none of its turns allows a ratio with the policy that sampled it"

    def _round(self, online: Online) -> Generator[Block, None, None]:
        """Collect, train, publish, swap."""
        session, iteration = self.learner.session, self.iteration
        work = self.learner.work
        if work is None:
            self.say("")
            self.say(f"iteration {iteration} of {self.config.iterations}")
            work = self._collect(online, iteration)
        facts: dict[str, float] = {}
        if work is not None:
            report = yield from self.learner.train(work)
            facts = {**self._round_facts, "reward": work.mean_reward, **report.metrics}
            self.explained = report.explained_variance
            if report.restored is None:
                self._publish(work, report, [])
                self._swap(online, work.batch.adapters)
                facts |= {f"{a}/version": float(v) for a, v in self._published.items()}
        self.rounds.append({**self._round_facts, **facts})
        if session.is_main and self.rounds[-1]:
            self.learner.trainer.log(dict(self.rounds[-1]))
        self.iteration = iteration + 1
        self.save()

    def _collect(self, online: Online, iteration: int) -> Work | None:
        """Fresh episodes as a batch; ``None`` when they teach nothing.

        Raises:
            NothingToLearn: after several rounds that taught nothing.
        """
        session = self.learner.session
        data, signal, self._round_facts = session.on_main(lambda: self._fresh(online, iteration))
        self._add_roles(data)
        why = "no signal in the rewards"
        if signal:
            by_adapter = rows_by_adapter(data, self.roles, session.adapters)
            try:
                if not by_adapter:
                    raise NothingToLearn("no trainable turn of an agent that is trained")
                require_own_answers(data, by_adapter)
                session.try_sharing(data.picked(by_adapter))
                self.replay(data, by_adapter)
                work = self.learner.prepare(
                    data, by_adapter, self.roles, objective="ppo", iteration=iteration
                )
            except NothingToLearn as error:
                why = str(error)
            else:
                self.idle = 0
                self._say_credit(work)
                return work
        self.idle += 1
        if self.idle >= IDLE_ROUNDS:
            raise NothingToLearn(
                f"{self.idle} iterations in a row taught nothing, last: {why}. The versions"
                " published so far stay. Give tasks of mixed outcome, or a higher temperature"
            )
        self.say(f"nothing to learn in iteration {iteration}: {why}; going on")
        return None

    def _fresh(self, online: Online, iteration: int) -> tuple[TrainingSet, bool, dict[str, float]]:
        source = online.source
        data = source.collect(iteration, self._current())
        for line in source.lines():
            self.say(line)
        return data, source.signal, source.metrics()

    def _add_roles(self, data: TrainingSet) -> None:
        """Agents that were not in the logs: by the configuration, or by their own name."""
        for agent in sorted(set(data.agents) - set(self.roles)):
            role = self.config.agents.get(agent)
            if role is None:
                role = SINGLE_ADAPTER if self.config.estimator == "single" else adapter_slug(agent)
            self.roles[agent] = role
            trained = role in self.learner.session.adapters
            if not trained and role not in ("frozen", "external"):
                self.say(
                    f"WARNING: agent {agent!r} has no adapter {role!r} in this run; its turns are"
                    " not trained"
                )

    # -- checks and words ------------------------------------------------------------------

    def replay(self, data: TrainingSet, by_adapter: Mapping[str, Sequence[int]]) -> None:
        """Check that recorded log-probabilities are this model's.

        Raises:
            ReplayError: when they are not.
        """
        config, session = self.config, self.learner.session
        if config.replay_turns == 0:
            self.say("WARNING: the replay check is switched off (replay_turns: 0)")
            return
        rows = data.picked(by_adapter)
        checked = session.on_main(lambda: self._replayer().check(
            rows, turns=config.replay_turns, tolerance=config.replay_tolerance, seed=config.seed
        ))  # fmt: skip
        replay_lines(checked, self.say)

    def _replayer(self) -> Replayer:
        config, session = self.config, self.learner.session
        current = self._current()
        return Replayer(
            session.model,
            self.base,
            self.registry,
            {(a, current.get(a)): a for a in session.adapters},
            pack_tokens=config.pack_tokens,
            share=session.share,
        )

    def _say_credit(self, work: Work) -> None:
        credits = work.credits
        if credits is None or not credits.actions:
            return
        rows = [("agent", "actions", "mean credit per action")]
        rows += [
            (agent, str(count), f"{mean:+.4f}")
            for agent, (count, mean) in credit_by_agent(credits).items()
        ]
        for line in ["", *table(rows)]:
            self.say(line)
        if credits.flat_groups:
            self.say(f"{credits.flat_groups} tasks whose episodes earned the same say nothing")
        for adapter in credits.flat:
            self.say(f"{adapter}: no signal, its turns do not differ in advantage; untouched")
        for adapter, count in credits.skipped.items():
            if count:
                self.say(
                    f"{adapter}: {count} turns of little weight are skipped (together at most"
                    f" {self.config.awr_skip_share:.0%} of it)"
                )
        for adapter, reasons in work.report.left_out.items():
            if reasons:
                counted = ", ".join(f"{n} {why}" for why, n in reasons.items())
                self.say(f"{adapter}: turns without a ratio are left out: {counted}")
        if work.batch.objective not in ("awr", "ppo"):
            return  # the method says itself what it picks
        for adapter, count in work.report.rows.items():
            if count < SCARCE_TURNS and not self.offline_done:
                self.say(
                    f"WARNING: only {count} turns carry what {adapter} learns; record more"
                    " episodes, with good and bad ends, before trusting its new version"
                )
        self.say("")
        self.say(
            f"training: {len(work.batch.rows)} turns,"
            f" {' then '.join(', '.join(group) for group in work.batch.order)}"
        )

    def _warn_nonfinite(self) -> None:
        for adapter, count in self.learner.trainer.nonfinite.items():
            self.say(f"WARNING: {adapter}: {count} steps were not finite and were skipped")

    # -- publishing ------------------------------------------------------------------------

    def _current(self) -> dict[str, int]:
        found = {a: self.registry.current(a) for a in self.learner.session.adapters}
        return {adapter: version for adapter, version in found.items() if version is not None}

    def _publish(self, work: Work, report: UpdateReport, logs: list[str]) -> None:
        self._published: dict[str, int] = self.learner.session.on_main(
            lambda: self._publish_all(work, report, logs)
        )
        if self.online is not None:
            names = ", ".join(served_name(a, v) for a, v in self._published.items())
            self.say(f"published {names}")

    def _publish_all(self, work: Work, report: UpdateReport, logs: list[str]) -> dict[str, int]:
        trained = [self._trained(work, report, adapter, logs) for adapter in report.effects]
        folder = self.scratch / f"staged-{work.batch.iteration}"
        session = self.learner.session
        versions = publish_all(session, self.registry, self.base, trained, folder)
        for one in trained:
            self.results[one.adapter] = adapter_result(
                one,
                work,
                method=self._short_method(work.batch.iteration),
                version=versions[one.adapter],
                before=self.results.get(one.adapter),
            )
        return versions

    def _trained(self, work: Work, report: UpdateReport, adapter: str, logs: list[str]) -> Trained:
        batch = work.batch
        rows = [batch.rows[i] for i in batch.rows_of(adapter)]
        agents = sorted(agent for agent, role in self.roles.items() if role == adapter)
        prefix = f"{adapter}/"
        facts = {
            "method": method_name(self.config, self._short_method(batch.iteration)),
            "estimator": self.config.estimator,
            "level": self.config.level,
            "objective": self._short_method(batch.iteration),
            "agents": agents,
            **report.seen[adapter],
            "mean_reward": work.mean_reward,
            "recorded_under": dict(Counter(row.version or "no adapter" for row in rows)),
            "critic_explained_variance": report.explained_variance,
            "metrics": {
                name.removeprefix(prefix): value
                for name, value in report.metrics.items()
                if name.startswith(prefix)
            },
            "program": program(),
            "settings": self._settings,
            "logs": logs,
            "iteration": batch.iteration,
        }
        meter = work.meters[adapter]
        parent = self.registry.current(adapter)
        return Trained(adapter, agents, parent, report.effects[adapter], meter.probe(), facts)

    def _short_method(self, iteration: int) -> str:
        return self.config.offline if iteration == 0 else "ppo"

    def _swap(self, online: Online, adapters: Sequence[str]) -> None:
        """The server takes the new versions; the next round is recorded under them."""
        mine = {a: self._published[a] for a in adapters if a in self._published}

        def swap_all() -> None:
            told = None if online.prepare is None else online.prepare(mine)
            if told is not None:
                self.say(told)
            for adapter, version in mine.items():
                online.swap(adapter, version)

        self.learner.session.on_main(swap_all)

    def _write_credit(self, credits: Credits, work: Work) -> None:
        path = self.registry.root / "credit.jsonl"
        weights = {(row.episode, row.k): row.weight for row in work.batch.rows}

        def write() -> None:
            try:
                write_lines(path, credit_lines(credits, weights))
            except OSError as error:
                raise RegistryError(f"cannot write {path}: {error}") from error

        self.learner.session.on_main(write)
        self.credit_file = path

    # -- state -----------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint, where they are asked for; a full disk stops no training."""
        if self.config.save_strategy == SaveStrategy.NO or not self.learner.session.is_main:
            return
        parent, keep = self.registry.root / checkpoint.CHECKPOINTS, self.config.save_total_limit
        try:
            checkpoint.write(parent, self.learner, self.facts(), keep=keep)
        except OSError as error:
            self.say(
                f"WARNING: cannot write a checkpoint ({error}); the one before it stays, and"
                " training goes on"
            )

    def facts(self) -> dict[str, Any]:
        """Where the run is, as JSON."""
        return {
            "base": {"name": self.base.name, "fingerprint": self.base.fingerprint},
            "settings": self._settings,
            "block": block_size(self.config),
            "offline_done": self.offline_done,
            "iteration": self.iteration,
            "idle": self.idle,
            "rounds": self.rounds,
            "results": [dataclasses.asdict(result) for result in self.results.values()],
            "round_facts": self._round_facts,
            "roles": self.roles,
            "logs": self._logs,
            "source": None if self.online is None else self.online.source.state(),
            "episodes": None if self.plan is None else len(self.plan.data.episodes),
        }

    def load_facts(self, facts: Mapping[str, Any]) -> None:
        for name in ("offline_done", "iteration", "idle", "rounds", "roles"):
            setattr(self, name, facts[name])
        self.results = {r["adapter"]: AdapterResult.from_json(r) for r in facts["results"]}
        self._round_facts = facts["round_facts"]
        if self.online is not None and facts["source"] is not None:
            self.online.source.load_state(facts["source"])
