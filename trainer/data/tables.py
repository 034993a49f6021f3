"""Rows of Parquet and Arrow files, as the library datasets and the Hugging Face Hub write them.

Both are read in batches, so that memory does not grow with the files, and only the columns that are
asked for.
"""

from __future__ import annotations

import datetime
import decimal
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from startrail_jax.errors import InputError, UserError
from trainer.data.opening import check_expansion, open_regular, reading
from trainer.errors import MissingPackageError

# Number of rows that are read at a time, and of bytes that they may take, but for the least number.
BATCH_ROWS, BATCH_BYTES, LEAST_ROWS = 256, 1 << 30, 4
ARROW_FILE = b"ARROW1"
"""What an Arrow file of the random-access format begins with; other Arrow files are streams."""
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def read_parquet(path: Path, columns: Collection[str]) -> Iterator[tuple[dict[str, Any], int]]:
    """The rows of a Parquet file, in order, and the number of bytes of the file up to each.

    Args:
        path: the file.
        columns: names of the columns to read; those that the file lacks are left out, as are
            values that are null.

    Raises:
        ImportError: if the package pyarrow is missing.
        ValueError: if the file cannot be read, or is no Parquet file.
    """
    _require_pyarrow(path)
    import pyarrow.parquet as pq

    with (
        _opened(path, "Parquet") as (file, size),
        pq.ParquetFile(file, page_checksum_verification=True) as table,
    ):
        names = [x for x in table.schema_arrow.names if x in columns]
        _require_columns(names, table.schema_arrow.names, columns, path)
        done, rows, given = 0, max(table.metadata.num_rows, 1), 0
        at_a_time = _rows_at_a_time(table.metadata, names)
        for batch in table.iter_batches(at_a_time, columns=names, use_threads=False):
            given += batch.nbytes
            check_expansion(path, size, given)
            for row in _rows(batch, path, done):
                done += 1
                yield row, size * done // rows


def read_arrow(path: Path, columns: Collection[str]) -> Iterator[tuple[dict[str, Any], int]]:
    """As `read_parquet`, of an Arrow file: a stream, as `save_to_disk` writes it, or a file."""
    _require_pyarrow(path)
    import pyarrow as pa

    with _opened(path, "Arrow") as (file, size):
        is_file = file.read(len(ARROW_FILE)) == ARROW_FILE
        file.seek(0)
        done = 0
        if is_file:
            reader: Any = pa.ipc.open_file(file)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            _require_end(file)
            reader = batches = pa.ipc.open_stream(file)
        names = [x for x in reader.schema.names if x in columns]
        _require_columns(names, reader.schema.names, columns, path)
        given = 0
        for batch in batches:
            given += batch.nbytes
            check_expansion(path, size, given)
            for start in range(0, batch.num_rows, BATCH_ROWS):
                part = batch.select(names).slice(start, BATCH_ROWS)
                for row in _rows(part, path, done):
                    done += 1
                    yield row, min(file.tell(), size)


def _rows_at_a_time(metadata: Any, names: Collection[str]) -> int:
    """Rows of a Parquet file whose values take little memory, whatever they are.

    A value may be as long as its chunk of a column, where it is written once for many rows.
    """
    columns = (
        metadata.row_group(group).column(number)
        for group in range(metadata.num_row_groups)
        for number in range(metadata.num_columns)
    )
    sizes = [
        column.total_uncompressed_size
        for column in columns
        if column.path_in_schema.partition(".")[0] in names
    ]
    return min(max(BATCH_BYTES // max(*sizes, 1, 1), LEAST_ROWS), BATCH_ROWS)


@contextmanager
def _opened(path: Path, kind: str) -> Iterator[tuple[IO[bytes], int]]:
    """A file, and its size. Errors of pyarrow become errors that name the file."""
    import pyarrow as pa

    with reading(path), open_regular(path) as file:
        size = path.stat().st_size
        try:
            yield file, size
        except UserError:
            raise
        # What is damaged may be a length, a name, or a text.
        except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
            raise InputError(
                f"{str(path)!r} must be a whole {kind} file; got {type(error).__name__}: "
                f"{_first_line(error)}. Write or copy it again, or leave it out."
            ) from error


def _require_end(file: IO[bytes]) -> None:
    """Raises unless a stream has its end: one that is cut between batches has lost rows."""
    file.seek(-min(len(END_OF_STREAM), file.seek(0, os.SEEK_END)), os.SEEK_END)
    if file.read() != END_OF_STREAM:
        raise ValueError("a stream without its end")
    file.seek(0)


def _rows(batch: Any, path: Path, before: int) -> Iterator[dict[str, Any]]:
    # A damaged file may hold offsets that lie beyond its values.
    batch.validate(full=True)
    for number, row in enumerate(batch.to_pylist(), start=before + 1):
        yield {
            name: _as_json(value, f"{path}:{number}", name)
            for name, value in row.items()
            if value is not None
        }


def _as_json(value: Any, place: str, column: str) -> Any:
    """A value as a line of JSONL would hold it.

    A table gives all its objects the keys of each, and null for those that an object lacks. So null
    is left out of objects.
    """
    if isinstance(value, dict):
        return {k: _as_json(x, place, column) for k, x in value.items() if x is not None}
    if isinstance(value, list):
        return [_as_json(x, place, column) for x in value]
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, bytes,
                          tuple)):  # fmt: skip
        raise InputError(
            f"A row must hold text, numbers, lists and objects; got {type(value).__name__} in "
            f"column {column!r} of {place!r}. Convert the column, or leave the file out."
        )
    return value


def _require_columns(
    found: Collection[str], names: list[str], columns: Collection[str], path: Path
) -> None:
    if not found:
        raise InputError(
            f"A table must have a column with text or conversations; got the columns {names} in "
            f"{str(path)!r}, and none of {sorted(columns)}. Name the column that holds the text: "
            "--data.text-key. Conversations, or prompts and completions, need --data.loss-on "
            "completion."
        )


def _require_pyarrow(path: Path) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            f"Parquet and Arrow files must have the package pyarrow; got {str(path)!r} without it. "
            "Run pip install pyarrow, or install the extra: pip install -e '.[datasets]'."
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or "no reason"
