"""Rows of Parquet and Arrow files, read by the package datasets."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from startrail_jax.errors import InputError, UserError
from trainer.errors import MissingPackageError

KIND_OF_SUFFIX = {".parquet": "parquet", ".arrow": "arrow"}
SAVED = ("dataset_dict.json", "state.json")
"""What `save_to_disk` puts into a folder of splits, and into that of a split."""
TRAIN = "train"
HELD_OUT = ("validation", "valid", "val", "dev", "eval", "evaluation", "test", "testing")
"""Names of splits that are held out; the first one that there is counts."""


def splits_of_tables(folder: Path) -> tuple[dict[str, list[Path]], bool]:
    """The files of each split of a folder of tables, as `datasets.load_dataset` or `load_from_disk`
    finds them, and whether the folder names all its tables, so that any others are copies."""
    with _datasets(folder) as datasets:
        if any((folder / name).is_file() for name in SAVED):
            found = datasets.load_from_disk(str(folder))
            splits = found if isinstance(found, dict) else {TRAIN: found}
            files = {k: [Path(x["filename"]) for x in v.cache_files] for k, v in splits.items()}
            return files, True
        listed = datasets.load_dataset_builder(str(folder)).config.data_files
        return {str(name): [Path(path) for path in paths] for name, paths in listed.items()}, False


def read_rows(
    path: Path, columns: Collection[str] | None = None, without: Collection[str] = ()
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a file, in order, with their numbers from 1. Null values, and `columns` that the
    file lacks, are left out (None for all columns)."""
    with _datasets(path) as datasets:
        kind = KIND_OF_SUFFIX[path.suffix.lower()]
        rows = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        names = [x for x in rows.column_names or () if columns is None or x in columns]
        if columns is not None and not names:
            raise InputError(
                f"A table must have a column with text or conversations; got the columns "
                f"{rows.column_names} in {str(path)!r}, and none of {sorted(columns)}. Name the "
                "column that holds the text: --data.text-key. Conversations, or prompts and "
                "completions, need --data.loss answers."
            )
        names = [name for name in names if name not in without]
        for number, row in enumerate(rows.select_columns(names), start=1):
            yield number, {name: value for name, value in row.items() if value is not None}


@contextmanager
def _datasets(path: Path) -> Iterator[Any]:
    """The package. Its errors become errors that name the file."""
    try:
        import datasets
    except ImportError as error:
        raise MissingPackageError(
            f"Parquet and Arrow files must have the package datasets; got {str(path)!r} without "
            "it. Install the extra: pip install -e '.[hf]'."
        ) from error
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield datasets
    except UserError:
        raise
    except Exception as error:  # Those of datasets, of pyarrow and of the system.
        raise InputError(
            f"{str(path)!r} must be whole tables that the package datasets reads; got "
            f"{type(error).__name__}: {error}. Write or copy them again, or leave them out."
        ) from error
