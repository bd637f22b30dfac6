"""One variant with one number of agents, in a process of its own; prints one JSON object.

Invariant: peak memory is this process's, with nothing else in it. What the libraries take before a
model is loaded is told apart.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import resource
import sys
import tempfile
from pathlib import Path

from marft_agents.training._quiet import quiet, set_environment


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(variant: str, model_dir: Path, agents: int, threads: int) -> None:
    set_environment()
    with quiet(), tempfile.TemporaryDirectory(prefix="marft-bench-") as scratch:
        import torch

        torch.set_num_threads(threads)
        module, _, objective = variant.partition("-")
        runner = importlib.import_module(f"benchmarks.trainer.{module}")
        libraries = _peak_mib()
        extra = (objective,) if objective else ()
        timed = runner.run(model_dir, agents, Path(scratch), *extra)
    peak = _peak_mib()
    sys.stdout.write(
        json.dumps(
            dataclasses.asdict(timed) | {"peak_mib": round(peak), "libraries_mib": round(libraries)}
        )
        + "\n"
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
