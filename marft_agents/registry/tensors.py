"""Safetensors files without torch: read what a header promises, check it, write float32.

Invariant: a file is trusted only as far as its header fits its length. Every tensor that
:func:`read_header` returns lies wholly inside the file, so a half-written file is an error here
and not in the engine.
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from marft_agents.errors import AdapterError

_MAX_HEADER = 100 * 1024 * 1024
_ITEM_SIZE = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
FLOAT_TYPES = frozenset({"F64", "F32", "F16", "BF16"})
_EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file; ``start`` and ``end`` are offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def _damaged(path: Path, what: str) -> AdapterError:
    return AdapterError(f"{path} is damaged ({what}); write it again and publish anew")


def _parse_entry(path: Path, name: str, entry: Any, data_start: int, size: int) -> TensorInfo:
    try:
        dtype = str(entry["dtype"])
        shape = tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"header entry of {name!r} is unreadable") from error
    item = _ITEM_SIZE.get(dtype)
    if begin < 0 or end < begin or min(shape, default=0) < 0:
        raise _damaged(path, f"header entry of {name!r} has impossible offsets")
    if item is not None and end - begin != item * math.prod(shape):
        raise _damaged(path, f"{name!r} holds {end - begin} bytes, its shape needs another number")
    if data_start + end > size:
        raise _damaged(path, f"it ends after {size} bytes, {name!r} reaches to {data_start + end}")
    return TensorInfo(name, dtype, shape, data_start + begin, data_start + end)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensors by name, in the file's order; the weights themselves are not read.

    Raises:
        AdapterError: when the file is missing, empty, cut short or no safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 10 or not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise _damaged(path, f"no safetensors header in its {size} bytes")
            text = file.read(length)
    except OSError as error:
        raise AdapterError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        header: Any = json.loads(text)
    except ValueError as error:
        raise _damaged(path, "its header is no JSON") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no JSON object")
    entries = cast("dict[str, Any]", header)
    return {
        name: _parse_entry(path, name, entry, 8 + length, size)
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def read_bytes(path: Path, tensor: TensorInfo, limit: int | None = None) -> bytes:
    """The tensor's raw little-endian bytes, at most ``limit`` of them."""
    length = tensor.end - tensor.start
    with path.open("rb") as file:
        file.seek(tensor.start)
        return file.read(length if limit is None else min(limit, length))


def _values(data: bytes, typecode: str) -> array[Any]:
    values: array[Any] = array(typecode)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def is_finite(path: Path, tensor: TensorInfo) -> bool:
    """Whether every value of a float tensor is finite."""
    data = read_bytes(path, tensor)
    if tensor.dtype in _EXPONENT:
        mask = _EXPONENT[tensor.dtype]
        return all(bits & mask != mask for bits in set(_values(data, "H")))
    # A NaN or an infinity survives summing, and float32 cannot overflow a Python float.
    values = _values(data, "d" if tensor.dtype == "F64" else "f")
    return math.isfinite(sum(values))


def is_zero(path: Path, tensor: TensorInfo) -> bool:
    """Whether every value of a tensor is (positive) zero."""
    data = read_bytes(path, tensor)
    return data.count(0) == len(data)


def write_float32(path: Path, tensors: Mapping[str, tuple[tuple[int, ...], array[float]]]) -> None:
    """Write ``name -> (shape, values)`` as one float32 safetensors file, names sorted."""

    def header_entries() -> Iterator[tuple[str, Any]]:
        yield "__metadata__", {"format": "pt"}
        offset = 0
        for name in sorted(tensors):
            shape, values = tensors[name]
            end = offset + 4 * len(values)
            yield name, {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
            offset = end

    header = json.dumps(dict(header_entries()), separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for name in sorted(tensors):
            values = tensors[name][1]
            if sys.byteorder == "big":
                values = values[:]
                values.byteswap()
            file.write(values.tobytes())
