"""``marft-agents swap``: one line when it works, one line when it does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from marft_agents.cli import main
from marft_agents.serving import free_port
from tests.serving.stage import OPERATOR_KEY, House, make_house, running_stage


@pytest.fixture
def house(tmp_path: Path) -> House:
    house = make_house(tmp_path)
    house.publish("router", untrained=True)
    house.publish("router")
    key = house.registry.root / ".operator-key"
    key.write_text(OPERATOR_KEY)
    return house


@pytest.fixture
def swap(house: House, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Swap:
    return Swap(house, monkeypatch, capsys)


class Swap:
    """Run the command; gives exit code, stdout, stderr."""

    def __init__(
        self, house: House, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.house, self._monkeypatch, self._capsys = house, monkeypatch, capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        words = ["marft-agents", "swap", *map(str, arguments)]
        if "--adapters" not in words:
            words += ["--adapters", str(self.house.registry.root)]
        self._monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        done = self._capsys.readouterr()
        return caught.value.code, done.out, done.err


def _one_line(result: tuple[int, str, str], *parts: str) -> None:
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.count("\n") == 1, err
    for part in parts:
        assert part in err


def test_the_highest_version_by_default(swap: Swap) -> None:
    with running_stage(swap.house) as stage:
        code, out, err = swap("Router", "--server", f"{stage.url}/v1")
        assert (code, err) == (0, "")
        assert out == (
            "router: v1 -> v2; served log-probabilities equal the trainer's to 0.0e+00;"
            " it differs from the base's by 0.2\n"
        )
        assert stage.chat("router").headers["X-Marft-Adapter"] == "router@v2"
        code, out, _ = swap("router", "--version", 1, "--server", stage.url)
        assert code == 0 and out.startswith("router: v2 -> v1;")
        code, out, _ = swap("router", "--version", 1, "--server", stage.url)
        assert code == 0 and out.startswith("router: v1 serves already and was probed again;")
    assert swap.house.registry.audit()[-1]["who"] != "serve"


def test_a_swap_that_fails(swap: Swap) -> None:
    with running_stage(swap.house) as stage:
        stage.engine.faults.load_status = 500
        result = swap("router", "--server", stage.url)
        _one_line(result, "step load of router@v2", "refused", "router@v1 still serves")
        assert swap.house.registry.current("router") == 1


def test_a_wrong_operator_key(swap: Swap) -> None:
    with running_stage(swap.house) as stage:
        (swap.house.registry.root / ".operator-key").write_text("other")
        _one_line(swap("router", "--server", stage.url), "operator key")
        (swap.house.registry.root / ".operator-key").unlink()
        _one_line(swap("router", "--server", stage.url), ".operator-key", "--adapters")


def test_server_down(swap: Swap) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    _one_line(swap("router", "--server", url), f"cannot reach {url}", "--offline")
    assert swap.house.registry.current("router") == 1


def test_offline(swap: Swap) -> None:
    code, out, _ = swap("router", "--offline")
    assert code == 0 and out.startswith("router: v1 -> v2 in ")
    assert swap.house.registry.current("router") == 2
    assert swap.house.registry.audit()[-1]["evidence"] == {"offline": True}


def test_unknown_names(swap: Swap, tmp_path: Path) -> None:
    _one_line(swap("nobody"), "no agent 'nobody'", "it has router")
    _one_line(swap("router", "--version", 9), "no version 9", "it has 1, 2")
    _one_line(swap("base"), "reserved")
    _one_line(swap("router", "--adapters", tmp_path / "empty"), "no agent at all")


def test_a_damaged_version_is_not_offered(swap: Swap) -> None:
    weights = swap.house.registry.path("router", 2) / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(b"")
    _one_line(swap("router", "--offline"), "checksum")
    assert swap.house.registry.current("router") == 1
