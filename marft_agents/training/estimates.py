"""What a run will need, roughly: memory, time, and slots for adapters in the engine.

Invariant: arithmetic on what is known before the run (the plan, the model's shape, the speed of one
product measured on this device). The figures are for choosing settings and machines: memory is
meant to be within a quarter, time within a factor of two, and what they leave out is said.

    FLOPs of a token   forward 2 P + 4 N H layers (N: tokens of its pass), head 2 H V where a token
                       was sampled; backward through a frozen base as much again
    bytes of a pass    layers · N · (a H + b I) + 4 copies of the logits (S, V) in float32
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_NF4 = 0.5 + 4 / 64
"""Bytes of a weight in 4 bits, with its block's scale."""
_STATES = 6
"""Copies of an adapter: weights, two moments, and all three once more for the guards."""
_WIDE, _INNER = 14, 5
"""Numbers of width H and of the MLP's width that a layer keeps per token for the backward pass."""
_LOGIT_COPIES = 4
_REACHED = 0.5
"""Share of a plain product's speed that whole passes reach."""
_OPS_FORWARD, _OPS_BACKWARD = 250, 250
"""Operations of a layer, each of which costs a start."""


@dataclass(frozen=True)
class Shape:
    """What the figures need to know of the base."""

    parameters: int
    stored: int
    """Bytes on disk."""
    matrices: int
    """Parameters of the layers' matrices; the rest is embeddings, norms and the head."""
    hidden: int
    layers: int
    inner: int
    vocab: int


@dataclass(frozen=True)
class Device:
    """Where the run is, measured."""

    kind: str
    flops: float
    """Of one product of the model's size, per second."""
    start: float
    """Seconds that any operation costs at least."""
    free: int | None
    """Bytes of memory; ``None``: not known."""


@dataclass(frozen=True)
class Load:
    """Tokens to go through, over all passes; sampled ones go through the head too."""

    tokens: int = 0
    sampled: int = 0
    passes: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(
            self.tokens + other.tokens, self.sampled + other.sampled, self.passes + other.passes
        )

    def times(self, factor: float) -> Load:
        return Load(
            round(self.tokens * factor), round(self.sampled * factor), round(self.passes * factor)
        )


@dataclass(frozen=True)
class Memory:
    """Bytes, by what holds them."""

    base: float
    adapters: float
    one_pass: float
    critic: float

    @property
    def total(self) -> float:
        return self.base + self.adapters + self.one_pass + self.critic


def base_bytes(shape: Shape, *, width: int | None, four_bit: bool) -> float:
    """The base in memory; ``width``: bytes of a number, ``None``: as on disk."""
    if not four_bit:
        return float(shape.stored if width is None else shape.parameters * width)
    rest = shape.parameters - shape.matrices
    kept = width or max(shape.stored // max(shape.parameters, 1), 1)
    return shape.matrices * _NF4 + rest * kept


def adapter_parameters(rank: int, modules: Mapping[str, tuple[int, int]]) -> int:
    """Of A (rank, in) and B (out, rank) on every module; ``modules`` has (out, in)."""
    return sum(rank * (out + width) for out, width in modules.values())


def adapters_bytes(parameters: Sequence[int]) -> float:
    """Adapters, Adam and what guards keep, all float32; one adapter at a time has a gradient."""
    return 4.0 * (_STATES * sum(parameters) + max(parameters, default=0))


def pass_bytes(
    shape: Shape, *, tokens: int, sampled: float, width: int, checkpointing: bool
) -> float:
    """What one pass keeps for its backward pass; ``sampled`` of its ``tokens`` have logits."""
    layer = tokens * (_WIDE * shape.hidden + _INNER * shape.inner) * max(width, 2)
    kept = layer * shape.layers
    if checkpointing:
        kept = layer + tokens * shape.hidden * width * shape.layers
    return kept + _LOGIT_COPIES * 4.0 * sampled * shape.vocab


def seconds(
    shape: Shape,
    load: Load,
    device: Device,
    *,
    adapter: int,
    trained: bool,
    checkpointing: bool = False,
) -> float:
    """Time of going through a load once; ``adapter``: parameters of the active adapter."""
    if not load.tokens:
        return 0.0
    context = load.tokens / max(load.passes, 1)
    forward = load.tokens * (
        2.0 * (shape.matrices + adapter) + 4.0 * context * shape.hidden * shape.layers
    )
    head = 2.0 * load.sampled * shape.hidden * shape.vocab
    times = 1 + trained * (1 + checkpointing)
    operations = _OPS_FORWARD * (1 + trained * checkpointing) + _OPS_BACKWARD * trained
    starts = load.passes * shape.layers * operations * device.start
    return times * (forward + head) / (_REACHED * device.flops) + starts


def slots(adapters: int) -> int:
    """Versions in use at once: each adapter's old and new one while it is swapped."""
    return max(2, 2 * adapters)


@dataclass(frozen=True)
class Estimate:
    """The figures of one run."""

    memory: Memory
    device: Device
    steps: Mapping[str, float]
    """Seconds by what takes them."""
    tokens: int
    """Trained, over all passes."""
    processes: int = 1
    left_out: str = ""

    @property
    def seconds(self) -> float:
        return sum(self.steps.values())

    def lines(self) -> Iterator[str]:
        """For people."""
        m = self.memory
        free = "" if self.device.free is None else f"; {size_text(self.device.free)} are free"
        each = " in each process" if self.processes > 1 else ""
        yield (
            f"  memory: about {size_text(m.total)}{each} (base {size_text(m.base)}, adapters with"
            f" Adam {size_text(m.adapters)}, one pass {size_text(m.one_pass)}, critic"
            f" {size_text(m.critic)}){free}"
        )
        if self.steps:
            parts = ", ".join(f"{name} {time_text(s)}" for name, s in self.steps.items())
            yield (
                f"  time: about {time_text(self.seconds)} ({parts}), {self.tokens} trained tokens"
                f" at {self.device.flops / 1e9:.0f} GFLOP/s, as measured now on"
                f" {self.device.kind}{self.left_out}"
            )

    def warning(self) -> str | None:
        """When the memory is not there."""
        free = self.device.free
        if free is None or self.memory.total <= free:
            return None
        return (
            f"WARNING: this run needs about {size_text(self.memory.total)} and {size_text(free)}"
            f" are free on {self.device.kind}: {self._remedy()}"
        )

    def _remedy(self) -> str:
        m = self.memory
        if m.one_pass > m.base:
            return "lower pack_tokens or max_length, or set gradient_checkpointing: true"
        if self.device.kind == "cuda":
            return "set load_in_4bit: true, or train on a larger device"
        return "set dtype: bfloat16, or train on a larger machine"


def slot_line(adapters: int, rank: int, *, given: int | None, server: bool) -> str:
    """What the engine must hold; ``given``: the slots of the server, where it says."""
    needed = slots(adapters)
    text = f"  engine: {adapters} adapters, {needed} versions in use while they are swapped"
    if not server:
        return (
            f"{text}; `marft-agents serve` makes room for them (an engine of your own:"
            f" --max-loras {needed} --max-lora-rank {rank})"
        )
    if given is None:
        return f"{text}; how many the server's engine holds is not known (--max-loras)"
    if given >= needed:
        return f"{text}; the server holds {given}"
    return (
        f"{text}; WARNING: the server holds {given}, so requests will wait for each other: restart"
        " `marft-agents serve`"
    )


def size_text(size: float) -> str:
    """``1.4 GB``, ``55 MB``."""
    if size >= 1e9:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else "below 1 MB"


def time_text(duration: float) -> str:
    """``40 s``, ``7 min``, ``2.5 h``."""
    if duration < 1:
        return "below 1 s"
    if duration < 100:
        return f"{duration:.0f} s"
    if duration < 6000:
        return f"{duration / 60:.0f} min"
    return f"{duration / 3600:.1f} h"
