"""The page from made-up results: what is worse is called worse, and nothing is made up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.report import learning, logs_first, tuned
from benchmarks.learning.summary import rows
from benchmarks.recorder.latency_report import adding
from benchmarks.records import Results, machine
from benchmarks.report import page
from benchmarks.trainer.measure import KEY as TRAINER_KEY
from benchmarks.trainer.measure import schedule
from benchmarks.trainer.report import trainer

PLAN = {
    "iterations": 2, "episodes": 10, "group_size": 2, "block": 4, "epochs": 2, "held_out": 20,
    "final_tasks": 40, "logged": 0,
}  # fmt: skip


def run(method: str, seed: int, final: float, size: str = "duo", **changes: Any) -> dict[str, Any]:
    record: dict[str, Any] = {
        "size": size,
        "method": method,
        "seed": seed,
        "plan": PLAN,
        "learning_rate": 1e-3,
        "settings": {},
        "untrained": 0.25,
        "episodes": [0, 10, 20],
        "success": [0.25, (0.25 + final) / 2, final],
        "final": final,
        "optimizer_steps": 12,
        "cpu_seconds": 3.0,
        "load": 1.0,
        "machine": machine(),
    }
    return record | changes


def runs(size: str = "duo") -> list[dict[str, Any]]:
    finals = {"ippo": (0.6, 0.64, 0.62), "marft-a": (0.8, 0.84, 0.82), "single": (0.2, 0.9, 0.8)}
    return [run(m, s, f, size) for m, values in finals.items() for s, f in enumerate(values)]


def measurement(variant: str, agents: int, repeat: int, seconds: float) -> dict[str, Any]:
    return {
        "model": "a model", "variant": variant, "agents": agents, "repeat": repeat, "tokens": 100,
        "seconds": seconds, "step_seconds": seconds / 2, "peak_mib": 900, "libraries_mib": 500,
        "process_seconds": 9.0, "load": 1.5, "machine": machine(),
    }  # fmt: skip


def test_a_method_is_called_worse_where_the_interval_says_so() -> None:
    table = {row.label: row.cells() for row in rows(runs(), "duo")}
    assert table["IPPO"][2] == "-20 (-20 to -20): worse"
    assert table["single-agent PPO"][2].endswith("no difference shown")
    assert table["IPPO"][3] == "-10 (-10 to -10): worse"
    assert table["MARFT-A"][2:4] == ["-", "-"]


def test_collapses_and_the_way_to_the_mark_are_counted() -> None:
    table = {row.label: row.cells() for row in rows(runs(), "duo")}
    assert table["single-agent PPO"][4] == "1 of 3"
    assert table["MARFT-A"][5] == "20, 3 of 3"
    assert table["IPPO"][5] == "never, 0 of 3"


def test_the_chapter_names_what_was_run(tmp_path: Path) -> None:
    text = "\n".join(learning(runs() + runs("trio"), [run("ippo", 100, 0.5)], tmp_path))
    assert "2 iterations of 10 episodes (20 in all)" in text
    assert "### duo: 2 agents" in text and "### trio: 3 agents" in text
    assert "on seeds that are not reported (100)" in text
    assert "- duo: ends worse: IPPO; learns later: IPPO." in text
    assert (tmp_path / "learning.svg").exists()


def test_the_best_step_size_is_judged_where_all_were_tried_and_sizes_weigh_alike() -> None:
    tried = [
        run("ippo", 100, 0.9, learning_rate=1e-3),
        run("ippo", 101, 0.9, learning_rate=1e-3),
        run("ippo", 100, 0.1, "trio", learning_rate=1e-3),
        run("ippo", 100, 0.6, learning_rate=2e-3),
        run("ippo", 100, 0.6, "trio", learning_rate=2e-3),
        run("ippo", 100, 1.0, "quad", learning_rate=1e-3),
        run("group", 100, 1.0, "quad", learning_rate=1e-3),
    ]
    assert tuned(tried) == {"ippo": 2e-3}


def test_logs_first_is_compared_at_equal_episodes_in_all_and_online(tmp_path: Path) -> None:
    plan = PLAN | {"iterations": 1, "logged": 10}
    first = [
        run("marft-a", s, f, plan=plan, success=[0.25, 0.3, f])
        for s, f in enumerate((0.7, 0.74, 0.72))
    ]
    text = "\n".join(logs_first(first, runs(), tmp_path))
    assert "| duo | 30% (30% to 30%) | 72%" in text
    assert "-10 (-10 to -10): worse" in text  # 20 episodes in all
    assert "+19 (+16 to +21): better" in text  # 10 episodes online: 0.72 against 0.535


def test_the_trainer_is_compared_repeat_by_repeat(tmp_path: Path) -> None:
    seconds = {"ours-ppo": 1.0, "ours-awr": 1.0, "grpo": 2.0, "copies": 4.0}
    measured = [
        measurement(v, n, r, s * (1 + r))
        for v, s in seconds.items()
        for n in (1, 2)
        for r in (0, 1)
    ]
    text = "\n".join(trainer(measured, tmp_path))
    assert "| 1 | TRL's GRPO, one adapter | 2.00 (2.00 to 2.00) | 2.00 (2.00 to 2.00) |" in text
    assert "| 2 | this trainer, ppo | 75 (50 to 100) | 150 (100 to 200) | 400" in text


def test_ratios_pair_measurements_of_one_repeat_and_counts_are_said(tmp_path: Path) -> None:
    measured = [
        measurement("ours-ppo", 1, 1, 9.0),
        measurement("grpo", 1, 0, 1.0),
        measurement("grpo", 1, 1, 18.0),
    ]
    text = "\n".join(trainer(measured, tmp_path))
    assert "| 1 | TRL's GRPO, one adapter | 2.00 (2.00 to 2.00) |" in text
    assert "in turn, 1 to 2 times" in text


def test_being_slower_is_said(tmp_path: Path) -> None:
    measured = [measurement("ours-ppo", 8, 0, 2.0), measurement("grpo", 8, 0, 1.0)]
    text = "\n".join(trainer(measured, tmp_path))
    assert "Slower over the whole update than: TRL's GRPO, one adapter with 8 agents." in text


def test_a_method_whose_tuned_step_size_was_not_used_is_marked(tmp_path: Path) -> None:
    tried = [run("ippo", 100, f, learning_rate=r) for r, f in ((1e-3, 0.5), (2e-3, 0.9))]
    text = "\n".join(learning(runs(), tried, tmp_path))
    assert "**Not settled:**" in text and "IPPO (0.002)" in text
    assert "Not settled" not in "\n".join(learning(runs(), [], tmp_path))


def test_variants_take_turns() -> None:
    order = schedule(3, (1, 2))
    assert len(order) == 3 * 2 * 4
    firsts = [variant for _, n, variant in order[::4] if n == 1]
    assert len(set(firsts)) == 3


def test_a_page_without_results_claims_nothing(tmp_path: Path) -> None:
    none = tmp_path / "none.jsonl"
    text = page(tmp_path / "none", none, tmp_path / "none", tmp_path / "figures", none, none)
    assert "##" in text and "|" not in text


def test_the_page_has_a_chapter_per_benchmark(tmp_path: Path) -> None:
    results = Results(tmp_path / "online.jsonl", ("method", "seed"))
    for record in runs():
        results.add(record)
    Results(tmp_path / "t.jsonl", TRAINER_KEY).add(measurement("ours-ppo", 1, 0, 1.0))
    none = tmp_path / "none.jsonl"
    text = page(tmp_path, tmp_path / "t.jsonl", tmp_path, tmp_path / "figures", none, none)
    heads = [line for line in text.splitlines() if line.startswith("## ")]
    assert heads == ["## Does it learn, and against what?", "## What does it cost?",
                     "## What was run"]  # fmt: skip


def test_a_later_record_replaces_an_earlier_one_of_the_same_key(tmp_path: Path) -> None:
    results = Results(tmp_path / "r.jsonl", ("method", "seed"))
    results.add({"method": "a", "seed": 1, "final": 0.1})
    results.add({"method": "a", "seed": 1, "final": 0.2})
    assert [r["final"] for r in results.read()] == [0.2]
    assert results.has({"method": "a", "seed": 1})
    assert not results.has({"method": "a", "seed": 2})


def test_the_committed_page_is_the_one_that_the_results_give(tmp_path: Path) -> None:
    """docs/evidence.md is written, never edited."""
    root = Path(__file__).parents[2]
    written = root / "docs/evidence.md"
    text = page(
        root / "benchmarks/learning/results",
        root / "benchmarks/trainer/results/runs.jsonl",
        root / "benchmarks/recorder/results",
        tmp_path / "figures",
        root / "benchmarks/gateway/results/runs.jsonl",
        root / "benchmarks/swap/results/runs.jsonl",
    )
    assert text == written.read_text(encoding="utf-8")
    for figure in (tmp_path / "figures").iterdir():
        committed = root / "docs/figures" / figure.name
        assert figure.read_text(encoding="utf-8") == committed.read_text(encoding="utf-8")


def test_what_a_tool_adds_is_the_difference_to_the_block_beside_it() -> None:
    def run(tool: str, repeat: int, added: Sequence[float]) -> dict[str, Any]:
        def block(p50: float) -> dict[str, float]:
            return {"p50_ms": p50, "mean_ms": 2 * p50, "cpu_ms": 4 * p50}

        kind = {"tool": tool, "stream": False, "repeat": repeat, "pairs": 2, "chats": 2}
        kind |= {"delay_ms": 20, "written_bytes": 50_000, "calls": 20, "noted": 5}
        plain = [repeat + 1.0, repeat + 5.0]
        with_it = [block(p50 + more) for p50, more in zip(plain, added, strict=True)]
        kind |= {"p99_ms": [9.0 + repeat, 8.0]}
        return kind | {"with": with_it, "without": [block(p50) for p50 in plain]}

    records = [run("mlflow", 0, (0.5, 1.0)), run("mlflow", 1, (1.5, 2.5))]
    lines = adding(records)
    (row,) = [line for line in lines if line.startswith("| MLflow")]
    assert "| whole, after 20 ms | +1.25 (+0.50 to +2.50) | +2.50 (+1.00 to +5.00) |" in row
    assert "| +1.50 (+1.00 to +2.00) | +5.00 (+2.00 to +10.00) | 25% | 2.5 | 4 |" in row
    (plain,) = [line for line in lines if line.startswith("| (the plain")]
    assert "| 3.50 | 7.00 | 8.00 | 14.00 |" in plain
