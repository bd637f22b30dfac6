"""The learner: from episodes to optimizer steps, the same for logs and for fresh rollouts.

    values ← critic(episodes)            never from a head that saw the episode
    Â      ← credit(rewards, values)     one recursion through all agents
    for agent m in order:
        π_old ← π_m;  M ← compound factors of the agents before m
        for pass, block:  step on min(rho M Â, clip(rho) M Â)     until the passes or the KL end
        log π_new/π_old of m's turns ← for the agents after m

Invariant: what an update does is a function of its batch and of the state at its start; both are
in a checkpoint, so a resumed run takes the same steps. A guard that trips gives that state back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from torch import Tensor

from marft_agents.credit import compound_factors
from marft_agents.errors import NothingToLearn
from marft_agents.training.adam import give_back, snapshot
from marft_agents.training.adapters import adapter_state, load_adapter_state
from marft_agents.training.advantages import add_awr_weights, assign_credit, reward_credits
from marft_agents.training.batch import TrainRow, make_batch
from marft_agents.training.config import MarftConfig
from marft_agents.training.critics import Critics
from marft_agents.training.dataset import TrainingSet
from marft_agents.training.effect import best_and_worst
from marft_agents.training.guards import Guards, Tripped
from marft_agents.training.progress import Progress
from marft_agents.training.rates import block_size, epochs_of, rate_factor
from marft_agents.training.schedule import (
    Block,
    depth_in_team,
    passes,
    schedule_of,
    steps_of,
    update_order,
)
from marft_agents.training.session import Session
from marft_agents.training.trainer import MarftTrainer
from marft_agents.training.work import UpdateReport, Work

Say = Callable[[str], None]
Steps = Generator[Block, None, UpdateReport]


class Learner:
    """A session with its trainer, its critic and its guards.

    Iteration 0 is the stage on logs (``num_train_epochs``, ``learning_rate``); rounds online count
    from 1 (``update_epochs``, ``online_learning_rate``).

    Args:
        session: the models.
        config: settings.
        say: receives lines for people.
    """

    def __init__(self, session: Session, config: MarftConfig, say: Say = print) -> None:
        self.session, self.config = session, config
        self.say: Say = say if session.is_main else _silent
        self.trainer = MarftTrainer(session.model, config, session.adapters)
        self.trainer.create_optimizer()
        self.critics = Critics(session, config)
        self.guards = Guards(config)
        self.work: Work | None = None
        self.steps_taken = 0
        self.after_step: Callable[[], None] = _nothing
        """Called after every optimizer step; writes checkpoints."""
        self._progress = Progress(self.say)
        self._told_reference = False
        self.references: dict[str, dict[str, Tensor]] = {}
        """Tensors of the adapters that the KL term pulls to, where it does."""
        if config.beta and config.kl_reference == "start":
            self.references = {a: adapter_state(session.model, a) for a in session.adapters}

    def run(self, program: Generator[Block, None, Any]) -> None:
        """Take every step that a program asks for."""
        self.trainer.steps_before = self.steps_taken
        self.trainer.run(program)
        self.session.model.eval()

    def update(
        self, data: TrainingSet, roles: Mapping[str, str], *, objective: str, iteration: int
    ) -> Steps:
        """One update of all agents on these episodes."""
        by_adapter = rows_by_adapter(data, roles, self.session.adapters)
        work = self.prepare(data, by_adapter, roles, objective=objective, iteration=iteration)
        return (yield from self.train(work))

    # -- credit ----------------------------------------------------------------------------

    def prepare(
        self,
        data: TrainingSet,
        by_adapter: Mapping[str, Sequence[int]],
        roles: Mapping[str, str],
        *,
        objective: str,
        iteration: int,
    ) -> Work:
        """Values, advantages and the batch; ``sft`` goes by the reward alone.

        Raises:
            NothingToLearn: when no adapter has turns that differ in advantage, or none whose
                recorded log-probabilities allow a ratio.
        """
        config = self.config
        trained = _with_ratio(data, by_adapter) if objective == "ppo" else by_adapter
        self.session.try_sharing(data.picked(by_adapter))
        report = UpdateReport(iteration, objective)
        mean_reward = math.fsum(e.total_reward for e in data.episodes) / len(data.episodes)
        self.guards.see_rewards(mean_reward)
        if objective == "sft":
            credits = reward_credits(data, by_adapter)
        else:
            values = self._values(data, iteration, report)
            credits = assign_credit(data, trained, values, config)
        if objective == "awr":
            add_awr_weights(credits, by_adapter, config)
        kept = [a for a in trained if a not in credits.flat]
        order = update_order(
            depth_in_team(data, roles, kept),
            schedule=schedule_of(config, objective),
            order=config.order,
            seed=config.seed,
            iteration=iteration,
        )
        batch = make_batch(
            data, by_adapter, credits, objective=objective, iteration=iteration, order=order
        )
        present = {row.adapter for row in batch.rows}
        batch.order = [
            group for group in ([a for a in g if a in present] for g in batch.order) if group
        ]
        report.rows = {a: len(batch.rows_of(a)) for a in batch.adapters}
        report.seen = {a: _seen(data, by_adapter[a]) for a in batch.adapters}
        if objective == "ppo":
            report.left_out = {
                a: _left_out(data, rows) for a, rows in by_adapter.items() if a not in credits.flat
            }
        return Work(batch, credits, report, mean_reward)

    def _values(self, data: TrainingSet, iteration: int, report: UpdateReport) -> Any:
        if self.config.estimator == "group":
            return None
        seed = self.config.seed + iteration
        found = self.session.on_main(
            lambda: self.critics.evaluate(data.episodes, data.rows, seed=seed)
        )
        for line in found.lines:
            self.say(line)
        report.explained_variance = found.explained_variance
        report.metrics["critic/explained_variance"] = found.explained_variance
        report.metrics["critic/loss"] = found.loss
        returns = max(math.fsum(map(abs, e.reward_K)) for e in data.episodes)
        try:
            self.guards.check_values(found.largest_value, returns)
        except Tripped as error:
            self.critics.restore()
            report.restored = str(error)
        return found.values

    # -- steps -----------------------------------------------------------------------------

    def train(self, work: Work) -> Steps:
        """The steps of one update; goes on where ``work`` says."""
        self.work, self.trainer.batch = work, work.batch
        self.trainer.clip_scale = self.guards.clip_scale
        self.trainer.share_prefixes = self.session.share
        self._progress.start()
        if not work.good:
            work.good = snapshot(self.trainer, work.batch.adapters)
        try:
            if work.report.restored is not None:
                raise Tripped(work.report.restored)
            self.open(work)
            while work.position < len(work.batch.adapters):
                yield from self._update_adapter(work)
                work.position, work.step = work.position + 1, 0
        except Tripped as error:
            give_back(self.trainer, work.batch.adapters, work.good)
            work.report.restored = str(error)
            self.say(self.guards.trip(str(error)))
        else:
            work.report.effects = {a: meter.finish() for a, meter in work.meters.items()}
        work.report.metrics |= {n: math.fsum(v) / len(v) for n, v in work.sums.items() if v}
        self.work = None
        return work.report

    def open(self, work: Work) -> None:
        """Measure what each adapter does before it is trained."""
        batch = work.batch
        for adapter in batch.adapters:
            if adapter in work.meters:
                continue
            mean = {i: batch.rows[i].advantage for i in batch.rows_of(adapter)}
            good, bad = best_and_worst(mean, self.config.effect_turns)
            work.meters[adapter] = self.session.meter(
                adapter, [batch.rows[i] for i in good], [batch.rows[i] for i in bad]
            )

    def _update_adapter(self, work: Work) -> Generator[Block, None, None]:
        batch, adapter, config = work.batch, work.adapter, self.config
        if work.step == 0 and batch.objective == "ppo":
            self._begin(work)
        rows, size, epochs = batch.rows_of(adapter), block_size(config), epochs_of(config, batch)
        blocks = passes(
            rows,
            {i: batch.rows[i].length for i in rows},
            block=size,
            epochs=epochs,
            key=f"passes {config.seed} {batch.iteration} {adapter}",
        )
        while work.step < len(blocks):
            self._set_rates(work)
            block = Block(adapter, blocks[work.step], size, work.step + 1, len(blocks))
            yield block
            work.step += 1
            self.steps_taken += 1
            means = self.trainer.last.means if self.trainer.last.finite else {}
            for name, value in means.items():
                work.sums.setdefault(f"{adapter}/{name}", []).append(value)
            self._progress.step(block, means)
            why = self.guards.ends_passes(means) if batch.objective == "ppo" else None
            if why is not None:
                work.report.stopped[adapter] = f"step {work.step} of {len(blocks)}: {why}"
                self.say(f"  {adapter}: passes end at {work.report.stopped[adapter]}")
                work.step = len(blocks)
            self.after_step()
        self._end(work)

    def _begin(self, work: Work) -> None:
        """Proximal and reference log-probabilities, and the compound factors."""
        batch, adapter = work.batch, work.adapter
        rows = batch.rows_of(adapter)
        turns = [batch.rows[i] for i in rows]
        batch.old |= dict(zip(rows, self.session.score(turns, adapter), strict=True))
        differences = [
            abs(o - m)
            for i in rows
            for o, m in zip(batch.old[i], batch.rows[i].behaviour_L, strict=True)
        ]
        work.report.metrics[f"{adapter}/sampling/sampling_logp_difference/mean"] = math.fsum(
            differences
        ) / len(differences)
        work.report.metrics[f"{adapter}/sampling/sampling_logp_difference/max"] = max(differences)
        if self.config.beta:
            self._say_reference()
            batch.reference |= dict(zip(rows, self._reference(turns, adapter), strict=True))
        batch.factor |= self._factors(work)

    def _reference(self, turns: Sequence[TrainRow], adapter: str) -> list[list[float]]:
        if self.config.kl_reference == "base":
            return self.session.score(turns, None)
        now = adapter_state(self.session.model, adapter)
        load_adapter_state(self.session.model, adapter, self.references[adapter])
        try:
            return self.session.score(turns, adapter)
        finally:
            load_adapter_state(self.session.model, adapter, now)

    def _say_reference(self) -> None:
        """What the KL term pulls to, once."""
        if not self._told_reference:
            base = self.config.kl_reference == "base"
            to = "the base model" if base else "the adapters this run started from"
            self.say(f"KL term: weight {self.config.beta:g}, to {to}")
        self._told_reference = True

    def _factors(self, work: Work) -> dict[int, float]:
        """M_k of the adapter's rows, from the adapters of the groups before it."""
        batch, adapter = work.batch, work.adapter
        done: set[str] = set()
        for group in batch.order:
            if adapter in group:
                break
            done |= set(group)
        moved: dict[int, dict[int, float]] = {}
        for i, log_ratio in batch.log_ratio.items():
            if batch.rows[i].adapter in done:
                moved.setdefault(batch.rows[i].episode, {})[batch.rows[i].k] = log_ratio
        factors: dict[int, list[float]] = {}
        for episode, ratios in moved.items():
            depends, steps = batch.depends[episode], batch.steps[episode]
            factors[episode] = compound_factors(
                [ratios.get(k) for k in range(len(steps))],
                depends,
                steps,
                limit=self.config.compound_clip,
            )
        return {
            i: factors[batch.rows[i].episode][batch.rows[i].k]
            for i in batch.rows_of(adapter)
            if batch.rows[i].episode in factors
        }

    def _end(self, work: Work) -> None:
        """After an adapter's last step: its new log-probabilities, and whether it collapsed."""
        batch, adapter = work.batch, work.adapter
        entropies = work.sums.get(f"{adapter}/entropy", [])
        if batch.objective != "ppo":
            return
        self.guards.check_entropy(adapter, entropies[-1] if entropies else None, work.mean_reward)
        group = next(n for n, g in enumerate(batch.order) if adapter in g)
        if group + 1 == len(batch.order):
            return
        rows = batch.rows_of(adapter)
        new = self.session.score([batch.rows[i] for i in rows], adapter)
        for i, new_L in zip(rows, new, strict=True):
            difference = math.fsum(n - o for n, o in zip(new_L, batch.old[i], strict=True))
            batch.log_ratio[i] = difference / _count(batch.rows[i], self.config)

    # -- state -----------------------------------------------------------------------------

    def _set_rates(self, work: Work) -> None:
        """Step size of every adapter: the schedule runs over steps offline, over rounds online."""
        config, batch = self.config, work.batch
        online = batch.iteration > 0
        base = "online_learning_rate" if online else "learning_rate"
        self.trainer.rates = {
            a: config.adapters.get(a, {}).get("learning_rate", getattr(config, base))
            for a in self.session.adapters
        }
        if online:
            at, total = batch.iteration - 1, config.iterations
        else:
            sizes = {a: len(batch.rows_of(a)) for a in batch.adapters}
            each = [
                steps_of(sizes[a], block=block_size(config), epochs=epochs_of(config, batch))
                for a in batch.adapters
            ]
            at, total = sum(each[: work.position]) + work.step, sum(each)
        factor = rate_factor(config, at, total, getattr(config, base))
        if online and factor == 0:  # a warm-up begins at 0, and a round that moves nothing is lost
            factor = rate_factor(config, at + 1, total, getattr(config, base))
        self.trainer.rate_factor = factor


def _seen(data: TrainingSet, rows: Sequence[int]) -> dict[str, int]:
    return {
        "episodes": len({data.rows[i].episode for i in rows}),
        "turns": len(rows),
        "tokens": sum(len(data.rows[i].token_ids) for i in rows),
    }


def _silent(_line: str) -> None:
    """Every process but the first keeps quiet."""


def _nothing() -> None:
    """No checkpoint is asked for."""


def _count(row: TrainRow, config: MarftConfig) -> float:
    """n_k of the action's ratio."""
    sizes = {"token": len(row.token_ids), "word": row.words, "sum": 1}
    return float(sizes[config.action_norm])


def _with_ratio(data: TrainingSet, by_adapter: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """The rows that a policy gradient trains on; the others have no say in its baseline either.

    Raises:
        NothingToLearn: when there are none.
    """
    allowed = {
        adapter: [i for i in rows if data.rows[i].off_policy is None]
        for adapter, rows in by_adapter.items()
    }
    found = {adapter: rows for adapter, rows in allowed.items() if rows}
    if not found:
        raise NothingToLearn(_no_ratio(data, by_adapter))
    return found


def _left_out(data: TrainingSet, rows: Sequence[int]) -> dict[str, int]:
    """Turns that allow no ratio, by reason."""
    return dict(Counter(why for i in rows if (why := data.rows[i].off_policy) is not None))


def _no_ratio(data: TrainingSet, by_adapter: Mapping[str, Sequence[int]]) -> str:
    reasons = _left_out(data, [i for rows in by_adapter.values() for i in rows])
    counted = ", ".join(f"{n} {why}" for why, n in reasons.items())
    return (
        f"nothing to learn: no turn allows a ratio with the policy that sampled it ({counted});"
        " nothing was changed. Record at a temperature above 0, without top-p and top-k, from a"
        " server with processed log-probabilities"
    )


def rows_by_adapter(
    data: TrainingSet, roles: Mapping[str, str], adapters: Sequence[str]
) -> dict[str, list[int]]:
    """Row indices of every adapter at hand that has any, in the adapters' order."""
    out: dict[str, list[int]] = {adapter: [] for adapter in adapters}
    for i, row in enumerate(data.rows):
        role = roles.get(row.agent)
        if role in out:
            out[role].append(i)
    return {adapter: rows for adapter, rows in out.items() if rows}
