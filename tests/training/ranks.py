"""Runs of two processes on gloo, each forked from this one so that it need not import anything.

``python -m tests.training.ranks FOLDER`` runs every scenario and prints, as JSON, what each process
of it ended with. A process that hangs is killed and reported as such.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from marft_agents.errors import ServerError
from marft_agents.log import LogReader
from marft_agents.registry import Registry
from marft_agents.training import MarftConfig, finetune
from marft_agents.training import trainer as trainer_module
from marft_agents.training._quiet import quiet, set_environment
from marft_agents.training.adapters import adapter_state
from marft_agents.training.dataset import TrainingSet, read_training_set
from marft_agents.training.loop import Learner
from marft_agents.training.stages import Online
from tests.tiny_model import make_tiny_model
from tests.training.synthetic import Team, TinyModel, publish_trained, publish_untrained

AGENTS = ("router", "writer")
PATIENCE_S = 300.0
Report = dict[str, Any]
COMMON: dict[str, Any] = {
    "use_cpu": True, "learning_rate": 1e-2, "adam_epsilon": 1e-2, "num_train_epochs": 2.0,
    "critic_epochs": 4, "awr_skip_share": 0.0, "report_to": "none", "target_kl": 100.0,
    "save_steps": 2,
}  # fmt: skip
PPO: dict[str, Any] = {"offline": "ppo", "beta": 0.05, "entropy_coef": 0.01, "weight_decay": 0.1}
ONLINE: dict[str, Any] = {"offline": "none", "iterations": 2, "update_epochs": 1}


class Interrupted(BaseException):
    """The plug is pulled."""


class Hall:
    """Where everything lies: model, logs, and a registry a scenario."""

    def __init__(self, root: Path) -> None:
        self.root, self.model = root, make_tiny_model(root / "tiny")
        (root / "reports").mkdir()
        self.tiny = TinyModel(self.model)
        Team(self.tiny, root / "logs", chained=True).write(9, seed=2)

    def logs(self, name: str, **fields: Any) -> Path:
        """Logs of their own kind."""
        folder = self.root / name
        if not folder.exists():
            team = Team(self.tiny, folder, shift=fields.pop("shift", 0.0))
            team.write(6, seed=2, **fields)
        return folder

    def registry(self, name: str) -> Registry:
        """Adapters that are not the base, the same for every name."""
        root = self.root / name / "adapters"
        if not root.exists():
            registry = publish_untrained(root, self.model)
            for seed, agent in enumerate(AGENTS):
                version = publish_trained(registry, self.model, agent, seed=seed)
                registry.promote(agent, version, by="test", evidence={})
        return Registry(root)


def run(
    hall: Hall, name: str, values: dict[str, Any], *, logs: Path | None = None, **options: Any
) -> Report:
    """One run in this process; its adapters as they are in memory at the end."""
    said: list[str] = []
    learners: list[Learner] = []
    make = Learner.__init__

    def remember(self: Learner, *args: Any, **kw: Any) -> None:
        learners.append(self)
        make(self, *args, **kw)

    Learner.__init__ = remember
    report: Report = {"error": None}
    try:
        finetune(
            [logs or hall.root / "logs"],
            model=str(hall.model),
            output=hall.registry(name).root,
            config=MarftConfig(**{**COMMON, **values}),
            say=said.append,
            **options,
        )
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
    return report | {"said": said} | ({} if not learners else _end(learners[0]))


def _end(learner: Learner) -> Report:
    sums: dict[str, str] = {}
    for adapter in learner.session.adapters:
        digest = hashlib.sha256()
        for name, tensor in sorted(adapter_state(learner.session.model, adapter).items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        sums[adapter] = digest.hexdigest()
    return {
        "checksums": sums,
        "steps": learner.steps_taken,
        "nonfinite": dict(learner.trainer.nonfinite),
    }


class Recorded:
    """The same episodes every iteration, for the first process only."""

    def __init__(self, logs: Path, rank: int, *, broken: bool) -> None:
        self.logs, self.rank, self.broken, self.signal = logs, rank, broken, True

    def collect(self, iteration: int, current: Mapping[str, int]) -> TrainingSet:
        if self.rank > 0:
            raise AssertionError("only the first process runs the app")
        if self.broken:
            raise ServerError("the server went away")
        return read_training_set(LogReader(self.logs).episodes())

    def lines(self) -> list[str]:
        return ["collected"]

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        raise AssertionError("nothing is resumed here")


# -- what goes wrong on purpose ------------------------------------------------------------------


def forbid_writes(root: Path) -> None:
    """From now on this process may not write below a folder."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).startswith(str(root)):
            flags = args[2] if isinstance(args[2], int) else 0
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                raise AssertionError(f"a silent process writes {args[0]}")
        elif event in ("os.rename", "os.mkdir", "os.remove") and str(args[0]).startswith(str(root)):
            raise AssertionError(f"a silent process changes {args[0]}")

    sys.addaudithook(hook)


def spoil_a_loss() -> None:
    """The first loss of this process is none."""
    real, first = trainer_module.awr_pack, iter([True])

    def spoiled(*args: Any) -> Any:
        part = real(*args)
        if next(first, False):
            part.loss = part.loss * float("nan")
        return part

    trainer_module.awr_pack = spoiled


def full_disk() -> None:
    def publish(*args: Any, **kw: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    Registry.publish = publish


def unplug(after: int) -> None:
    real, taken = trainer_module.MarftTrainer.advance, iter(range(99))

    def advance(self: Any) -> bool:
        going_on = real(self)
        if next(taken) == after:
            raise Interrupted
        return going_on

    trainer_module.MarftTrainer.advance = advance


def interrupted(hall: Hall, name: str, values: dict[str, Any], after: int) -> Report:
    unplug(after)
    try:
        return run(hall, name, values)
    except Interrupted:
        return {"error": "interrupted"}


def command_line(root: Path, *arguments: str) -> Report:
    """The command itself; what it prints goes to files."""
    from marft_agents.cli import main

    rank = os.environ["RANK"]
    for number, name in ((1, "out"), (2, "err")):
        handle = os.open(root / f"{name}{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, number)
    sys.argv = ["marft-agents", "finetune", *arguments]
    code: Any = None
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    sys.stdout.flush()
    printed = {name: (root / f"{name}{rank}").read_text() for name in ("out", "err")}
    return {"error": None, "code": code, **printed}


# -- processes -----------------------------------------------------------------------------------


def launch(root: Path, name: str, work: Callable[[int], Report], world: int) -> list[Report]:
    """What every process of a scenario reports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [_start(root, name, work, rank, world, port) for rank in range(world)]
    until = time.monotonic() + PATIENCE_S
    reports: list[Report] = []
    for rank, child in enumerate(children):
        path = root / "reports" / f"{name}-{world}-{rank}.json"
        if _ended(child, until):
            reports.append(json.loads(path.read_text()))
        else:
            reports.append({"error": "hangs"})
    return reports


def _start(
    root: Path, name: str, work: Callable[[int], Report], rank: int, world: int, port: int
) -> int:
    child = os.fork()
    if child:
        return child
    try:
        if world > 1:
            os.environ |= {
                "ACCELERATE_USE_CPU": "true", "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
        try:
            report = work(rank)
        except BaseException:
            report = {"error": traceback.format_exc()}
        (root / "reports" / f"{name}-{world}-{rank}.json").write_text(json.dumps(report))
    finally:
        os._exit(0)


def _ended(child: int, until: float) -> bool:
    while time.monotonic() < until:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def scenarios(hall: Hall) -> dict[str, list[Report]]:
    out: dict[str, list[Report]] = {}
    full = {"per_device_train_batch_size": 4}
    half = {"per_device_train_batch_size": 2}

    def both(name: str, work: Callable[[int], Report]) -> None:
        out[name] = launch(hall.root, name, work, 2)

    def watched(name: str, values: dict[str, Any], rank: int, **options: Any) -> Report:
        hall.registry(name)
        if rank > 0:
            forbid_writes(hall.root / name)
        return run(hall, name, values, **options)

    for kind, values in (("awr", {"offline": "awr"}), ("ppo", PPO)):
        for name in (f"{kind}-one", f"{kind}-two", f"{kind}-resumed"):
            hall.registry(name)
        one = f"{kind}-one"
        out[one] = launch(hall.root, one, lambda rank, n=one, v=values: run(hall, n, v | full), 1)
        both(f"{kind}-two", lambda rank, k=kind, v=values: watched(f"{k}-two", v | half, rank))
    both("ppo-cut", lambda rank: interrupted(hall, "ppo-resumed", PPO | half, 5))
    both("ppo-resumed", lambda rank: watched("ppo-resumed", PPO | half, rank, resume=True))

    def sick(rank: int) -> Report:
        if rank == 1:
            spoil_a_loss()
        return run(hall, "sick", half)

    def no_room(rank: int) -> Report:
        if rank == 0:
            full_disk()
        return run(hall, "no-room", half | {"num_train_epochs": 0.1})

    def online(rank: int) -> Report:
        source = Recorded(hall.root / "logs", rank, broken=False)
        registry = hall.registry("online")
        swap = Online(source, lambda a, v: registry.promote(a, v, by="test", evidence={}))
        return watched("online", half | ONLINE, rank, online=swap)

    def broken(rank: int) -> Report:
        source = Recorded(hall.root / "logs", rank, broken=True)
        return run(hall, "errors", half | ONLINE, online=Online(source, lambda a, v: None))

    for name in ("sick", "no-room", "online", "errors"):
        hall.registry(name)
    both("online", online)
    both("broken", broken)
    both("sick", sick)
    both("no-room", no_room)
    shifted, flat = hall.logs("shifted", shift=-0.4), hall.logs("flat", reward=_always_one)
    both("replay", lambda rank: run(hall, "errors", half, logs=shifted))
    both("flat", lambda rank: run(hall, "errors", half, logs=flat))
    arguments = [str(hall.root / "logs"), "--model", str(hall.model), "--set"]
    both("mistake", lambda rank: command_line(hall.root, *arguments, "gama=0.9"))
    return out


def _always_one(router: bool, writer: bool) -> float:
    return 1.0


def main(arguments: Sequence[str]) -> None:
    set_environment()
    gc.freeze()  # what was imported is no garbage, and the loop looks for that at every start
    tempfile.tempdir = arguments[0]
    with quiet():
        hall = Hall(Path(arguments[0]))
    print(json.dumps(scenarios(hall)))
    gc.unfreeze()


if __name__ == "__main__":
    main(sys.argv[1:])
