"""What redaction costs: ``python -m benchmarks.recorder.redacting``.

Prints, for a turn with a prompt of a few sizes, processor time of one thread (the log's, never the
app's): its first redaction, the same history once more (as each later turn of a chat sends it), and
for comparison its encoding. Best of ``REPEATS``, because the machine is shared.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from marft_agents.log.encode import encode_line
from marft_agents.recording.redact import Redactor
from marft_agents.recording.safety import Safety
from marft_agents.schema import Turn

KILOBYTES = (5, 50, 500)
REPEATS = 7
MESSAGES = 10


def _turn(kilobytes: int, words: list[str]) -> Turn:
    draw = random.Random(kilobytes)
    length = kilobytes * 1000 // MESSAGES
    texts = [" ".join(draw.choices(words, k=length))[:length] for _ in range(MESSAGES)]
    return Turn(
        episode_id="e",
        turn_id="t",
        agent="planner",
        messages=[{"role": "user", "content": text} for text in texts],
        text=texts[0][:500],
        prompt_token_ids=list(range(kilobytes * 250)),
        token_ids=list(range(120)),
        logprobs=[-0.5] * 120,
    )


def _milliseconds(work: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(REPEATS):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return min(times) * 1e3


def main() -> None:
    words = Path("README.md").read_text(encoding="utf-8").split()
    print(f"{'prompt':>8} {'first':>20} {'history again':>22} {'encoding':>10}")
    for kilobytes in KILOBYTES:
        turn = _turn(kilobytes, words)
        seen = Redactor(safety=Safety(False))
        seen(turn)
        line = encode_line(turn)
        copies = iter([Turn.model_validate_json(line) for _ in range(REPEATS)])
        first = _milliseconds(lambda turn=turn: Redactor(safety=Safety(False))(turn))
        again = _milliseconds(lambda copies=copies, seen=seen: seen(next(copies)))
        encoding = _milliseconds(lambda turn=turn: encode_line(turn))
        rates = [f"{ms:8.2f} ms {kilobytes / ms:5.0f} MB/s" for ms in (first, again)]
        print(f"{kilobytes:5} kB {rates[0]:>20} {rates[1]:>22} {encoding:7.2f} ms")


if __name__ == "__main__":
    main()
