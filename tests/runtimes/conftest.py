"""Tests here run inside the environment of their runtime: ``python tools/runtimes.py NAME``.

That program names the environment in ``MARFT_RUNTIME``; without it nothing here is collected,
because these runtimes cannot share one environment.
"""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).parent
collect_ignore = (
    [] if os.environ.get("MARFT_RUNTIME") else [p.name for p in HERE.iterdir() if p.is_dir()]
)
