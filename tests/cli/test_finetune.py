"""``finetune``: a user's mistake is one line, exit code 2, and nothing on disk changes."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from marft_agents.log import LogWriter
from marft_agents.registry import Registry
from marft_agents.schema import EpisodeEnded, EpisodeStarted, RewardEvent
from tests.cli.shop import Shop, served
from tests.tiny_model import make_tiny_model
from tests.training.synthetic import (
    AGENTS,
    BAD,
    GOOD,
    publish_untrained,
    snapshot,
)

CASES = Path(__file__).parents[1] / "cases"


def test_logs_in_new_versions_out_and_the_next_commands(shop: Shop) -> None:
    shop.team.write(10)
    code, out = shop.run("--epochs", "1", "--learning-rate", "1e-3", "--seed", "3")
    assert code == 0
    assert Registry(shop.root / "adapters").versions("router") == [1, 2]
    assert "marft-agents swap router --adapters adapters --version 2" in out
    assert f"marft-agents serve adapters --model {shop.model}" in out
    assert "v1 -> v2  no" in out
    manifest = Registry(shop.root / "adapters").manifest("router", 2)
    assert manifest.training["settings"] == {
        "learning_rate": 1e-3,
        "num_train_epochs": 1,
        "seed": 3,
    }


def test_settings_come_from_the_file_then_set_then_flags(shop: Shop) -> None:
    shop.team.write(8)
    (shop.root / "my.yaml").write_text("num_train_epochs: 1\nlora_rank: 24\nagents:\n  x: y\n")
    assert "names 'x'" in shop.refuses("--config", "my.yaml")
    assert "24" not in shop.refuses("--config", "my.yaml", "--set", "lora_rank=4")
    code, _ = shop.run("--config", "my.yaml", "--set", "agents={}", "--rank", "8", "--dry-run")
    assert code == 0


def test_a_dry_run_stops_after_the_preflight(shop: Shop) -> None:
    shop.team.write(8)
    before = snapshot(shop.root)
    code, out = shop.run("--dry-run")
    assert code == 0 and "dry run: nothing was trained" in out and "router@v1 x8" in out
    assert snapshot(shop.root) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "learning_rte=1"], "did you mean 'learning_rate'"),
        (["--set", "gamma=2"], "gamma is 2.0; it must be between 0 and 1"),
        (["--config", "missing.yaml"], "cannot read the config missing.yaml"),
        (["--reward", "nowhere"], "package.module:function"),
        (["--set", "agents={roter: roter}"], "did you mean 'router'"),
        (["--operator-key-env", "MARFT_NO_SUCH", "--server", "http://127.0.0.1:9"],
         "MARFT_NO_SUCH is not set"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_one_line(options: list[str], message: str, shop: Shop) -> None:
    shop.team.write(8)
    assert message in shop.refuses(*options)


def test_case_30_an_empty_log_folder_is_named(shop: Shop) -> None:
    (shop.root / "empty").mkdir()
    assert "empty" in shop.refuses(logs="empty")
    assert "nowhere does not exist" in shop.refuses(logs="nowhere")


def test_case_30_an_agent_that_never_speaks_is_left_alone(shop: Shop) -> None:
    """The planner is trained; the critic's files are the same bytes and are not swapped."""
    config = json.loads((CASES / "30-config.json").read_text())
    shutil.rmtree(shop.root / "adapters")
    publish_untrained(shop.root / "adapters", shop.model, tuple(config["adapters"]))
    records = [json.loads(x) for x in (CASES / "30-silent-agent.jsonl").read_text().splitlines()]
    team = shop.team
    team.adapters = {agent: f"{agent}@v1" for agent in config["adapters"]}
    with LogWriter(team.logs) as log:
        for record in records:
            name = record["episode"]
            if record["kind"] == "reward":
                log.write(RewardEvent(episode_id=name, value=record["value"]))
                log.write(EpisodeEnded(episode_id=name))
                continue
            log.write(EpisodeStarted(episode_id=name))
            said = record["messages"][-1]["content"]
            log.write(team.turn(name, record["agent"], record["seq"], said, record["text"]))
    before = snapshot(shop.root / "adapters" / "critic")
    gateway = served(shop)
    (shop.root / "my.yaml").write_text("agents: {planner: planner, critic: critic}\n")
    code, out = shop.run("--server", "http://127.0.0.1:1", "--config", "my.yaml")
    assert code == 0
    assert gateway.swaps == [("planner", 2)]
    assert out.count("critic: 0 samples") == 2, "before training and after it"
    assert snapshot(shop.root / "adapters" / "critic") == before


def test_shared_frozen_and_external_agents(shop: Shop) -> None:
    team = shop.team
    team.adapters |= {"poet": "router@v1", "judge": None, "clerk": None}
    agents = ("router", "poet", "writer", "judge", "clerk")
    team.write(10, agents=agents)
    (shop.root / "my.yaml").write_text(
        "num_train_epochs: 1\nawr_skip_share: 0\nagents: {poet: router, router: router,"
        " writer: frozen, judge: external}\nadapters: {clerk: {lora_rank: 2, learning_rate: 1e-3}}"
    )
    before = snapshot(shop.root / "adapters" / "writer")
    code, out = shop.run("--config", "my.yaml")
    assert code == 0, shop.error
    registry = Registry(shop.root / "adapters")
    assert registry.manifest("router", 2).training["agents"] == ["poet", "router"]
    assert registry.manifest("router", 2).training["turns"] == 20
    assert registry.manifest("clerk", 1).rank == 2
    assert (registry.agents(), registry.versions("writer")) == (["clerk", "router", "writer"], [1])
    assert "writer: frozen; untouched" in out and "judge: external; untouched" in out
    assert snapshot(shop.root / "adapters" / "writer") == before
    wrong = "adapters={clark: {lora_rank: 2}}"
    assert "did you mean 'clerk'" in shop.refuses("--config", "my.yaml", "--set", wrong)


def test_a_missing_model_is_named(shop: Shop) -> None:
    shop.team.write(2)
    assert "no model folder at 'nowhere'" in shop.refuses(model=Path("nowhere"))


def test_case_15_a_log_without_a_usable_reward_changes_nothing(shop: Shop) -> None:
    values = [json.loads(x)["value"] for x in (CASES / "15-rewards.jsonl").read_text().splitlines()]
    assert len([v for v in values if RewardEvent(episode_id="e", value=v).value is None]) == 4
    team = shop.team
    team.write(3, reward=lambda router, writer: float("nan"))
    team.write(3, prefix="s", reward=lambda router, writer: "0.5")
    team.write(3, prefix="n", reward=lambda router, writer: None)
    message = shop.refuses()
    assert "no usable episode among 9" in message
    assert "6 refused reward" in message and "3 no reward" in message


def test_case_15_bad_rewards_are_counted_and_the_rest_is_trained(shop: Shop) -> None:
    shop.team.write(8)
    shop.team.write(2, prefix="nan", reward=lambda router, writer: float("nan"))
    code, out = shop.run("--epochs", "1")
    assert code == 0
    assert "episodes: 8 of 10 usable" in out and "2 refused reward" in out


def test_case_15_the_rewards_of_the_case_train_the_three_usable_episodes(shop: Shop) -> None:
    """Case 15: null, NaN, Infinity and text are counted and get no credit; the loss is finite."""
    lines = (CASES / "15-rewards.jsonl").read_text().splitlines()
    team, rewards = shop.team, [json.loads(line) for line in lines]
    with LogWriter(team.logs) as log:
        for n, reward in enumerate(rewards):
            name, reply = reward["episode"], GOOD if n % 2 else BAD
            log.write(EpisodeStarted(episode_id=name, task=reward["group"]))
            for index, agent in enumerate(AGENTS):
                log.write(team.turn(name, agent, index, "ticket: billing", reply))
            log.write(EpisodeEnded(episode_id=name))
    in_schema = [
        line.replace('"kind"', '"type"').replace('"episode"', '"episode_id"') for line in lines
    ]
    (team.logs / "rewards.jsonl").write_text("\n".join(in_schema))
    before = snapshot(shop.root / "adapters")
    code, out = shop.run("--epochs", "1")
    assert code == 0
    assert "episodes: 3 of 7 usable" in out
    assert "left out: 3 refused reward, 1 no reward" in out
    credit = [json.loads(x) for x in (shop.root / "adapters/credit.jsonl").read_text().splitlines()]
    assert {x["episode_id"] for x in credit} == {"a", "c", "g"}
    registry = Registry(shop.root / "adapters")
    numbers = [x[name] for x in credit for name in ("value", "advantage", "delta")]
    for agent in AGENTS:
        training = registry.manifest(agent, 2).training
        assert training["turns"] == 3 and "loss" in training["metrics"]
        numbers += training["metrics"].values()
    assert all(map(math.isfinite, numbers))

    (team.logs / "rewards.jsonl").write_text("\n".join([*in_schema[1:2], *in_schema[3:6]]))
    shutil.rmtree(shop.root / "adapters")
    publish_untrained(shop.root / "adapters", shop.model)
    message = shop.refuses("--epochs", "1")
    assert "no usable episode among 7" in message and "3 refused reward" in message
    weights = {k: v for k, v in snapshot(shop.root / "adapters").items() if "safetensors" in k}
    assert weights and weights.items() <= before.items()


def test_case_16_rewards_without_spread_are_no_signal(shop: Shop) -> None:
    shop.team.write(5, reward=lambda router, writer: 0.7)
    assert "no signal" in shop.refuses()


def test_a_failing_reward_function_is_counted_and_named(shop: Shop) -> None:
    shop.team.write(4, reward=lambda router, writer: None)
    (shop.root / "grading_of_mine.py").write_text("def score(episode): return float('nan')\n")
    shop.monkeypatch.setattr(sys, "path", list(sys.path))
    before = snapshot(shop.root)
    code, out = shop.run("--reward", "grading_of_mine:score")
    del sys.modules["grading_of_mine"]
    assert code == 2 and "4 failed" in out and "episode e0: not a finite number: nan" in out
    after = {k: v for k, v in snapshot(shop.root).items() if "__pycache__" not in k}
    assert after == before and "no usable episode" in shop.error


def test_case_12_a_rank_above_the_servers_limit_is_refused(shop: Shop) -> None:
    team = shop.team
    team.adapters["poet"] = None
    team.write(8, agents=("router", "poet"))
    message = shop.refuses("--rank", "24")
    assert "24" in message and "16" in message and "--max-lora-rank" in message


def test_the_wrong_base_model_is_refused(shop: Shop) -> None:
    shop.team.write(8)
    other = make_tiny_model(shop.root / "other", seed=9)
    assert "was trained for the base" in shop.refuses(model=other)


def test_logs_of_another_model_are_refused_by_the_replay(shop: Shop) -> None:
    team = shop.team
    team.shift = -0.5
    team.write(6)
    message = shop.refuses()
    assert "agent 'router', recorded under router@v1" in message and "0.500 on average" in message


def test_a_server_that_is_down_is_one_line_before_training(shop: Shop) -> None:
    shop.team.write(8)
    (shop.root / "adapters" / ".operator-key").write_text("k" * 40 + "\n")
    (shop.root / "adapters" / ".operator-key").chmod(0o600)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert url in shop.refuses("--server", url)


def test_new_versions_are_swapped_into_a_running_server(shop: Shop) -> None:
    shop.team.write(8)
    gateway = served(shop)
    code, out = shop.run("--server", "http://127.0.0.1:1", "--epochs", "1")
    assert code == 0
    assert gateway.swaps == [("router", 2), ("writer", 2)]
    assert gateway.prepared == [(0, {"router": 2, "writer": 2})]
    assert out.count("v1 -> v2  yes") == 2 and "marft-agents swap" not in out


@pytest.mark.parametrize("why", ["unready", "one_by_one"])
def test_versions_that_cannot_be_prepared_are_swapped_as_they_are(shop: Shop, why: str) -> None:
    shop.team.write(8)
    gateway = served(shop)
    setattr(gateway, why, "router")
    code, out = shop.run("--server", "http://127.0.0.1:1", "--epochs", "1")
    assert code == 0 and gateway.swaps == [("router", 2), ("writer", 2)]
    assert ("router; they are swapped one after the other" in out) is (why == "one_by_one")


def test_a_swap_that_fails_keeps_the_version_and_says_how_to_repeat_it(shop: Shop) -> None:
    shop.team.write(8)
    gateway = served(shop, refuse="router")
    code, out = shop.run("--server", "http://127.0.0.1:1", "--epochs", "1")
    assert code == 2 and "router: the engine refused" in shop.error
    assert gateway.swaps == [("writer", 2)]
    assert "v1 -> v2  failed" in out
    assert "marft-agents swap router --adapters adapters --version 2 --server" in out


@pytest.mark.parametrize("server", [(), ("--server", "http://127.0.0.1:1")])
def test_a_pinned_agent_gets_a_new_version_and_keeps_its_old_one(
    shop: Shop, server: tuple[str, ...]
) -> None:
    shop.team.write(8)
    gateway = served(shop)
    registry = Registry(shop.root / "adapters")
    registry.pin("router")
    code, out = shop.run(*server, "--epochs", "1")
    assert code == 0
    assert gateway.swaps == ([("writer", 2)] if server else [])
    assert gateway.prepared == [], "one alone is swapped as it is"
    assert "router is pinned: v2 is published and v1 stays in use" in out
    assert "marft-agents swap router" not in out
    assert (registry.current("router"), registry.versions("router")) == (1, [1, 2])


def test_the_servers_limits_are_checked_before_training(shop: Shop) -> None:
    shop.team.write(8)
    served(shop, limit=1)
    message = shop.refuses("--server", "http://127.0.0.1:1")
    assert "router@v1" in message and "--max-lora-rank" in message
    served(shop, make_tiny_model(shop.root / "other", seed=9))
    assert "serves the base other" in shop.refuses("--server", "http://127.0.0.1:1")


def test_only_the_first_process_speaks_and_swaps(shop: Shop) -> None:
    shop.team.write(8)
    gateway = served(shop)
    shop.monkeypatch.setenv("RANK", "1")
    code, out = shop.run("--server", "http://127.0.0.1:1", "--epochs", "1")
    assert (code, out, gateway.swaps) == (0, "", [])


def test_help_and_plain_mistakes_load_no_training_library() -> None:
    code = (
        "import sys; sys.argv = ['marft-agents', 'finetune', 'nowhere', '--model', 'x'];"
        "from marft_agents.cli import main\n"
        "try: main()\n"
        "except SystemExit as stop: print(stop.code, 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "2 False"


def test_a_missing_extra_names_the_pip_command(shop: Shop) -> None:
    shop.team.write(2)
    for name in [n for n in sys.modules if n.startswith("marft_agents.training.")]:
        if name.rsplit(".", 1)[-1] not in ("_quiet", "options"):
            shop.monkeypatch.delitem(sys.modules, name)
    shop.monkeypatch.setitem(sys.modules, "trl.trainer", None)
    message = shop.refuses()
    assert "pip install 'marft-agents[train]'" in message
