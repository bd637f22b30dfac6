"""``marft-agents adapters``: one command a question or change, one line a mistake."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from marft_agents.cli import main
from marft_agents.cli.adapters import SUBCOMMANDS
from marft_agents.registry import Change, Registry, locks
from marft_agents.registry.export import export
from marft_agents.serving import free_port
from tests.serving.stage import OPERATOR_KEY, House, Stage, make_house, running_stage

if TYPE_CHECKING:
    from tests.cli.shop import Shop


@pytest.fixture
def house(tmp_path: Path) -> House:
    """Five versions of router, the first untrained and in use."""
    house = make_house(tmp_path)
    house.publish("router", untrained=True)
    for _ in range(4):
        house.publish("router")
    (house.registry.root / ".operator-key").write_text(OPERATOR_KEY)
    return house


class Program:
    """Run ``marft-agents adapters``; gives what it printed."""

    def __init__(
        self, house: House, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.house, self._monkeypatch, self._capsys = house, monkeypatch, capsys

    def _run(self, arguments: tuple[object, ...]) -> tuple[int, str, str]:
        words = [str(a) for a in arguments]
        folder = [str(self.house.registry.root)]
        if "--adapters" not in words and not (words[0] == "list" and words[1:2] == folder):
            words += folder if words[0] == "list" else ["--adapters", *folder]
        self._monkeypatch.setattr(sys, "argv", ["marft-agents", "adapters", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        done = self._capsys.readouterr()
        return caught.value.code, done.out, done.err

    def __call__(self, *arguments: object, code: int = 0) -> str:
        got, out, err = self._run(arguments)
        assert (got, err) == (code, ""), (out, err)
        return out

    def refuses(self, *arguments: object) -> str:
        code, out, err = self._run(arguments)
        assert (code, out, err.count("\n")) == (2, "", 1), (out, err)
        return err

    def usage(self, *arguments: object) -> str:
        """What click says of an option."""
        code, out, err = self._run(arguments)
        assert (code, out) == (2, ""), (out, err)
        return err

    @contextmanager
    def serving(self) -> Generator[Stage]:
        with running_stage(self.house) as stage, locks.serving(self.house.registry.root, stage.url):
            yield stage


@pytest.fixture
def adapters(
    house: House, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Program:
    return Program(house, monkeypatch, capsys)


def trail(house: House) -> dict[str, Any]:
    return house.registry.audit()[-1]


# --- list and show --------------------------------------------------------------------------------


def test_list(adapters: Program, house: House) -> None:
    house.registry.promote("router", 3, by="me", evidence={})
    house.registry.pin("router")
    lines = adapters("list").splitlines()
    assert lines[0].split() == [
        "agent",
        "version",
        "state",
        "created",
        "parent",
        "episodes",
        "size",
    ]
    assert [line.split()[1] for line in lines[1:]] == ["v1", "v2", "v3", "v4", "v5"]
    assert "previous, untrained" in lines[1] and "current, pinned" in lines[3]
    told = json.loads(adapters("list", house.registry.root, "--json"))
    rows = told["agents"][0]["versions"]
    assert [r["version"] for r in rows if r["current"]] == [3]
    assert [r["version"] for r in rows if r["previous"]] == [1]
    assert [r["version"] for r in rows if r["pinned"]] == [3]
    assert all(r["loaded"] is None and r["bytes"] > 1000 for r in rows)


def test_list_with_a_server(adapters: Program, house: House) -> None:
    with adapters.serving() as stage:
        assert "served by process" in adapters("list")
        lines = adapters("list", "--server", stage.url).splitlines()
        assert "current, untrained, served" in lines[1] and len(lines) == 6
        house.registry.promote("router", 3, by="me", evidence={})
        out = adapters("list", "--server", stage.url)
        assert "NOTE router: version 3 is in use on disk, the server answers from 1" in out
        told = json.loads(adapters("list", "--json", "--server", stage.url))["agents"][0]
        assert (told["current"], told["served"]) == (3, 1)
        assert [r["version"] for r in told["versions"] if r["loaded"]] == [1]


def test_list_says_what_is_broken_and_lists_the_rest(adapters: Program, house: House) -> None:
    (house.registry.root / "router" / "CURRENT").write_text("v0099\n")
    manifest = house.registry.path("router", 2) / "manifest.json"
    manifest.chmod(0o644)
    manifest.write_text("{")
    out = adapters("list")
    assert out.count("NOTE ") == 2 and "CURRENT says 'v0099'" in out
    assert "unreadable" in out.splitlines()[2] and "v5" in out


def test_show(adapters: Program, house: House) -> None:
    house.registry.move("router", 2, Change("me@here", "swap", evidence={"reason": "better"}))
    out = adapters("show", "router")
    for part in (
        "router@v2 (in use)", "rank 2 on q_proj", "3 tokens; differs from the base by 0.2",
        "adapter_model.safetensors", 'me@here  promote  v1 -> v2  by swap  {"reason": "better"}',
    ):  # fmt: skip
        assert part in out
    assert "router@v1 (untrained)" in adapters("show", "Router@v1")
    told = json.loads(adapters("show", "router@2", "--json"))
    assert told["manifest"]["version"] == told["current"] == 2
    assert {f["problem"] for f in told["files"]} == {None}
    weights = house.registry.path("router", 2) / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(b"")
    assert "is not the file that was published" in adapters("show", "router")


# --- promote, rollback, pin -----------------------------------------------------------------------


def test_promote_and_rollback_without_a_server(
    adapters: Program, house: House, tmp_path: Path
) -> None:
    evaluation = tmp_path / "eval.json"
    evaluation.write_text('{"gain": 0.2}')
    out = adapters("promote", "router", 3, "--reason", "won", "--evaluation", evaluation)
    assert out == f"router: v1 -> v3 in {house.registry.root}; no server was told\n"
    digest = hashlib.sha256(evaluation.read_bytes()).hexdigest()
    assert trail(house)["evidence"] == {
        "reason": "won", "evaluation": {"file": "eval.json", "sha256": digest}, "offline": True,
    }  # fmt: skip
    assert trail(house)["command"] == "adapters promote" and "@" in trail(house)["who"]
    assert "is in use already" in adapters("promote", "router", 3)
    adapters("promote", "router", 5)
    assert adapters("rollback", "router").startswith("router: v5 -> v3 in ")
    assert (trail(house)["action"], trail(house)["command"]) == ("rollback", "adapters rollback")
    adapters("promote", "router", 4)
    assert adapters("rollback", "router", "--to", 1).startswith("router: v4 -> v1 in ")
    assert "nothing came before it, says the audit trail" in adapters.refuses("rollback", "router")
    assert "version 2 was never in use" in adapters.refuses("rollback", "router", "--to", 2)


def test_a_running_server_that_is_not_told_is_named(adapters: Program) -> None:
    with adapters.serving() as stage:
        out = adapters("promote", "router", 2)
        assert f"at {stage.url} was not told (--server URL)" in out
        # The server is brought to what is in use on disk, and the other way round.
        adapters("promote", "router", 1, "--server", stage.url)
        assert adapters.house.registry.current("router") == 1


def test_promote_and_rollback_in_a_server(adapters: Program, house: House) -> None:
    with adapters.serving() as stage:
        out = adapters("promote", "router", 2, "--server", stage.url, "--reason", "won")
        assert out.startswith("router: v1 -> v2; served log-probabilities equal the trainer's")
        line = trail(house)
        assert (line["action"], line["from"], line["to"]) == ("promote", 1, 2)
        assert line["evidence"]["reason"] == "won" and line["evidence"]["probe"]["effect"] > 0.1
        assert adapters("rollback", "router", "--server", stage.url).startswith("router: v2 -> v1;")
        assert (trail(house)["action"], trail(house)["command"]) == (
            "rollback",
            "adapters rollback",
        )
        assert stage.chat("router").headers["X-Marft-Adapter"] == "router@v1"
    moves = [e for e in house.registry.audit() if e["action"] != "publish"]
    assert [e["current"] for e in moves] == [2, 1], "each move is in the trail once"


def test_what_the_probe_refuses_changes_nothing_and_is_in_the_trail(
    adapters: Program, house: House
) -> None:
    with adapters.serving() as stage:
        stage.engine.faults.load_status = 500
        line = adapters.refuses("promote", "router", 2, "--server", stage.url)
    assert "step load of router@v2" in line and "router@v1 still serves" in line
    assert house.registry.current("router") == 1
    assert trail(house)["result"].startswith("step load of router@v2")
    assert trail(house)["current"] == 1
    url = f"http://127.0.0.1:{free_port()}"
    assert f"cannot reach {url}" in adapters.refuses("promote", "router", 2, "--server", url)
    assert house.registry.history("router") == [1]


def test_a_server_of_another_folder(adapters: Program, house: House, tmp_path: Path) -> None:
    other = make_house(tmp_path / "other")
    for untrained in (True, False):
        other.publish("router", untrained=untrained)
    with running_stage(other) as stage:
        (other.registry.root / ".operator-key").write_text(OPERATOR_KEY)
        line = adapters.refuses("promote", "router", 2, "--server", stage.url)
    assert "started with another folder" in line
    assert house.registry.current("router") == 1


def test_pin(adapters: Program, house: House) -> None:
    assert adapters("pin", "router", 3).endswith("router: v3 is pinned\n")
    assert (house.registry.current("router"), house.registry.pinned("router")) == (3, 3)
    for words in (("promote", "router", 2), ("rollback", "router")):
        assert "pinned to version 3" in adapters.refuses(*words)
    with adapters.serving() as stage:
        line = adapters.refuses("promote", "router", 2, "--server", stage.url)
        assert "pinned to version 3" in line and "router@v3 still serves" in line
        assert "load router@v2" not in stage.engine.events
        adapters("promote", "router", 2, "--server", stage.url, "--force")
    assert (house.registry.current("router"), house.registry.pinned("router")) == (2, None)
    assert trail(house)["evidence"]["unpinned"] == 3
    assert "was not pinned" in adapters("pin", "router", "--remove")
    adapters("pin", "router", 2)
    assert "v2 is no longer pinned" in adapters("pin", "router", "--remove")
    actions = [e["action"] for e in house.registry.audit()[5:] if e["result"] == "done"]
    assert actions == ["promote", "pin", "promote", "pin", "unpin"]
    for words in (("pin", "router"), ("pin", "router", 2, "--remove")):
        assert "pin takes a version, or --remove" in adapters.refuses(*words)
    assert adapters.refuses("pin", "router").endswith("; v2 is in use\n")


def test_a_version_as_the_commands_print_it(adapters: Program, house: House) -> None:
    adapters("promote", "router", "v2")
    assert house.registry.current("router") == 2
    adapters("pin", "router", "v1")
    assert house.registry.pinned("router") == 1


# --- canary --------------------------------------------------------------------------------------


def converse(stage: Stage, version: int, count: int) -> None:
    """Requests of as many episodes that get a version."""
    split = stage.gateway.aliases.split("router")
    names = (f"e{n}" for n in range(10_000))
    for name in names:
        takes = split is not None and split.takes("router", name)
        if takes == (split is not None and split.version == version):
            headers = {"X-Marft-Episode": name}
            body = {"model": "router", "messages": [{"role": "user", "content": "?"}]}
            stage.http.post(f"{stage.url}/v1/chat/completions", json=body, headers=headers)
            count -= 1
        if not count:
            return


def test_canary_from_start_to_stop(adapters: Program, house: House) -> None:
    with adapters.serving() as stage:
        server = ("--server", stage.url)
        out = adapters("canary", "router", 2, "--share", "30%", *server, "--reason", "new data")
        assert out == (
            "router: v2 gets 30% of the episodes that begin from now on, v1 stays in use; compared"
            " with it for 30 min\n"
        )
        assert trail(house)["action"] == "canary" and trail(house)["current"] == 1
        assert trail(house)["evidence"]["reason"] == "new data"
        out = adapters("canary", "router", 2, "--share", "0.3", *server)
        assert "already; nothing was changed" in out
        converse(stage, 2, 3)
        out = adapters("canary", "router", "--status", *server)
        assert "router: the canary v2 has 30% of the episodes; 30 min to go" in out
        assert "  v2: 3 requests, 0 failed, " in out and "  v1: 0 requests, 0 failed" in out
        assert "too few requests to judge" in out
        out = adapters("canary", "router", "--status")
        assert out == "router: v2 has 30% of the episodes; --server URL says how it does\n"
        assert "canary 30%" in adapters("list") and "canary 30%, loaded" in adapters(
            "list", *server
        )
        listed = json.loads(adapters("list", "--json"))["agents"][0]["versions"]
        assert [row["canary"] for row in listed] == [None, 0.3, None, None, None]
        assert "router@v2 (canary, 30%)" in adapters("show", "router@v2")
        assert json.loads(adapters("show", "router@v2", "--json"))["canary"]["share"] == 0.3
        assert "is a canary" in adapters.refuses("promote", "router", 3, *server)
        assert "stays: a canary" in adapters("prune", "--keep", 1, *server)
        assert "name it: --server URL" in adapters.refuses("canary", "router", "--stop")
        out = adapters("canary", "router", "--stop", *server)
        assert "v2 was stopped; 3 episodes keep it until they end" in out
        assert "stays: loaded in the server" in adapters("prune", "--keep", 1, *server)
        assert "has no canary" in adapters("canary", "router", "--stop", *server)
        out = adapters("canary", "router", "--status", *server)
        first, second = out.splitlines()[:2]
        assert first == "router: has no canary; v1 is in use"
        assert second == "router: the last canary or watch, of v2: stopped"


def test_a_canary_of_a_server_that_has_stopped(adapters: Program, house: House) -> None:
    with adapters.serving() as stage:
        adapters("canary", "router", 2, "--share", "5%", "--server", stage.url)
    out = adapters("canary", "router", "--status")
    assert out == "router: v2 has 5% of the episodes; no server runs; the next one goes on\n"
    assert adapters("canary", "router", "--stop") == "router: the canary v2 was stopped\n"
    assert trail(house)["action"] == "canary-stop"
    assert adapters("canary", "router", "--status") == "router: has no canary\n"


def test_promote_with_a_watch_and_episodes_that_keep_the_old_version(adapters: Program) -> None:
    with adapters.serving() as stage:
        server = ("--server", stage.url)
        converse(stage, 1, 25)
        out = adapters("promote", "router", 2, *server, "--watch", "10m", "--min-requests", 20)
        assert "; 25 episodes keep v1 until they end (--now moves them over)\n" in out
        assert "compared for 10 min with 25 requests that v1 answered before" in out
        assert "too few" not in out
        assert "v2 is watched" in adapters("canary", "router", "--status", *server)
        out = adapters("promote", "router", 3, *server, "--now", "--watch", "10m")
        assert "; 25 episodes move over at their next call" in out and "too few to judge" in out
        out = adapters("rollback", "router", *server)
        assert out.startswith("router: v3 -> v2; ")


def test_mistakes_with_a_canary(adapters: Program, house: House) -> None:
    for words in (("router",), ("router", 2, "--stop"), ("router", "--stop", "--status")):
        assert "a version with --share, or --stop" in adapters.refuses("canary", *words)
    assert "--share 10%" in adapters.refuses("canary", "router", 2)
    assert "--share 10%" in adapters.refuses("canary", "router", "--stop", "--share", "10%")
    assert "--server URL" in adapters.refuses("canary", "router", 2, "--share", "10%")
    now = ("canary", "router", 2, "--share", "10%", "--now")
    assert "--now goes with --stop" in adapters.refuses(*now)
    assert "--watch is for a running server" in adapters.refuses(
        "promote", "router", 2, "--watch", "10m"
    )
    url = f"http://127.0.0.1:{free_port()}"
    line = adapters.refuses("canary", "router", 2, "--share", "10%", "--server", url)
    assert f"cannot reach {url}" in line
    for option in (("--share", "150%"), ("--share", "x"), ("--share", "1%", "--for", "1w")):
        with adapters.serving() as stage:
            words = ("canary", "router", 2, *option, "--server", stage.url)
            assert "write it as" in adapters.usage(*words)
    assert house.registry.canary("router") is None


def test_a_canary_in_a_server_of_another_folder(
    adapters: Program, house: House, tmp_path: Path
) -> None:
    other = make_house(tmp_path / "other")
    for untrained in (True, False):
        other.publish("router", untrained=untrained)
    with running_stage(other) as stage:
        words = ("canary", "router", 2, "--share", "10%", "--server", stage.url)
        assert "started with another folder" in adapters.refuses(*words)
    assert house.registry.canary("router") is None


# --- prune, verify, export ------------------------------------------------------------------------


def test_prune(adapters: Program, house: House) -> None:
    house.registry.promote("router", 4, by="me", evidence={})
    out = adapters("prune", "--keep", 1)
    assert "router@v1" in out and "stays: in use before" in out
    assert out.count("would be deleted") == 2 and "to free with --yes" in out
    assert house.registry.versions("router") == [1, 2, 3, 4, 5]
    out = adapters("prune", "router", "--keep", 1, "--yes", "--reason", "room")
    assert out.count("is deleted") == 2 and "freed" in out
    assert house.registry.versions("router") == [1, 4, 5]
    assert trail(house)["evidence"] == {"reason": "room"}
    assert "no agent 'writer'" in adapters.refuses("prune", "writer")


def test_prune_asks_the_server(adapters: Program, house: House) -> None:
    with adapters.serving() as stage:
        house.registry.promote("router", 4, by="me", evidence={})
        house.registry.promote("router", 5, by="me", evidence={})
        line = adapters.refuses("prune", "--keep", 1, "--yes")
        assert f"at {stage.url}" in line and "--server URL" in line
        out = adapters("prune", "--keep", 1, "--yes", "--server", stage.url)
        assert "stays: loaded in the server" in out
        assert house.registry.versions("router") == [1, 4, 5]
        assert stage.chat("router").headers["X-Marft-Adapter"] == "router@v1"


def test_prune_with_a_server_of_another_folder(adapters: Program, house: House) -> None:
    house.registry.promote("router", 5, by="me", evidence={})
    with running_stage(house) as stage:
        line = adapters.refuses("prune", "--keep", 1, "--yes", "--server", stage.url)
    assert "no server serves from" in line and "serves another folder" in line
    assert len(house.registry.versions("router")) == 5


def test_verify(adapters: Program, house: House) -> None:
    assert adapters("verify") == "no findings in 5 versions\n"
    assert adapters("verify", "--model", house.base_dir, "router@v2").endswith("in 1 version\n")
    weights = house.registry.path("router", 3) / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-8])
    lines = adapters("verify", "router", code=1).splitlines()
    assert all(line.startswith("router@v3: ") for line in lines[:-1])
    assert "checksum" in lines[0] and "is damaged" in lines[1]
    assert lines[-1] == "2 findings in 5 versions"
    assert adapters("verify", "router@v2").startswith("no findings")


def test_export(adapters: Program, house: House, tmp_path: Path) -> None:
    out = adapters("export", "router@v2", tmp_path / "out")
    assert out == f"{tmp_path / 'out'}: router@v2, a LoRA of rank 2 on base-model\n"
    assert len(list((tmp_path / "out").iterdir())) == 3
    assert "exists already" in adapters.refuses("export", "router", tmp_path / "out")


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../router", "router/v0001", "..\\router", "/etc", "..", "."])
@pytest.mark.parametrize("command", sorted({*SUBCOMMANDS} - {"list"}))
def test_names_that_are_paths_are_refused(
    adapters: Program, tmp_path: Path, command: str, name: str
) -> None:
    more = {
        "promote": [2],
        "pin": [2],
        "export": [tmp_path / "out"],
        "canary": ["--status"],
    }.get(command, [])
    assert "is no agent's name" in adapters.refuses(command, name, *more)
    assert not (tmp_path / "out").exists()


def test_other_mistakes(adapters: Program, tmp_path: Path) -> None:
    nowhere = ("--adapters", tmp_path / "nowhere")
    for words in (("verify",), ("prune",), ("show", "router"), ("export", "router", "x")):
        assert "is no folder" in adapters.refuses(*words, *nowhere)
    assert "no agent at all" in adapters.refuses("promote", "router", 1, *nowhere)
    assert not (tmp_path / "nowhere").exists()
    assert "names no version" in adapters.refuses("show", "router@latest")
    assert "no version 9" in adapters.refuses("show", "router@v9")
    assert "reserved" in adapters.refuses("rollback", "base")


# --- what other programs make of it ---------------------------------------------------------------


def test_peft_loads_an_export_of_what_finetune_published(shop: Shop) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    registry = Registry(shop.root / "adapters")
    export(registry, "router", 1, shop.root / "out")
    model: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(shop.model), str(shop.root / "out")
    )
    names = [name for name, _ in model.named_parameters() if "lora_A" in name]
    config = json.loads((registry.path("router", 1) / "adapter_config.json").read_text())
    assert names and len(names) % len(config["target_modules"]) == 0
