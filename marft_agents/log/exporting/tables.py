"""Tables of turns: a Parquet file, or a folder that ``datasets.load_from_disk`` takes.

Invariant: rows are written in batches; memory does not grow with the log.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from marft_agents.errors import MarftError, MissingExtraError
from marft_agents.log.exporting.rows import (
    BOOL,
    COLUMNS,
    FLOAT,
    FLOATS,
    INT,
    INTS,
    MESSAGE_FIELDS,
    MESSAGES,
    TEXT,
    TEXTS,
    TIME,
    turn_rows,
)
from marft_agents.schema import Episode

_BATCH = 500


def write_parquet(episodes: Iterable[Episode], file: BinaryIO) -> int:
    """One row a turn; returns how many.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("train", needed_for="the parquet export (pyarrow)") from error
    schema, rows, count = _schema(pa), turn_rows(episodes), 0
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        while batch := list(islice(rows, _BATCH)):
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


def write_dataset(episodes: Iterable[Episode], folder: Path) -> int:
    """The same rows as a Hugging Face dataset in ``folder``; returns how many.

    Raises:
        MissingExtraError: datasets is not installed.
    """
    try:
        import datasets
        import pyarrow as pa
        from datasets.exceptions import DatasetGenerationError
    except ImportError as error:
        raise MissingExtraError("train", needed_for="the hf export (datasets)") from error

    def generate() -> Iterator[dict[str, Any]]:
        yield from turn_rows(episodes)

    features = datasets.Features.from_arrow_schema(_schema(pa))
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        with tempfile.TemporaryDirectory(prefix=".export.", dir=folder.parent) as cache:
            # A fingerprint of its own: nothing is taken from, or left in, a cache.
            made = datasets.Dataset.from_generator(
                generate, features=features, cache_dir=cache, fingerprint="marft-export"
            )
            made.save_to_disk(str(folder))
            return len(made)
    except DatasetGenerationError as error:
        raise _why(error) from error  # a full disk, or what a reader says of the log
    finally:
        if shown:
            datasets.enable_progress_bars()


def _why(error: BaseException) -> BaseException:
    """The error of the disk or the log behind one of ``datasets``, which names neither."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError | MarftError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return error


def _schema(pa: Any) -> Any:
    message = pa.struct([(name, pa.string()) for name in MESSAGE_FIELDS])
    types = {
        TEXT: pa.string(),
        INT: pa.int64(),
        FLOAT: pa.float64(),
        BOOL: pa.bool_(),
        TIME: pa.timestamp("us", tz="UTC"),
        INTS: pa.list_(pa.int64()),
        FLOATS: pa.list_(pa.float64()),
        TEXTS: pa.list_(pa.string()),
        MESSAGES: pa.list_(message),
    }
    return pa.schema([(name, types[kind]) for name, kind in COLUMNS.items()])
