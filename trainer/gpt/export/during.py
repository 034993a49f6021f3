"""Exports while a run trains: folders with the weights after a step, for an inference engine."""

from __future__ import annotations

import functools
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Shaped

from startrail_jax.errors import InputError
from trainer import durable
from trainer.data.cache import storing, write_folder
from trainer.gpt.config import GPTTrainConfig
from trainer.gpt.export.writing import Export, by_path
from trainer.parallel.partition import split_adapters
from trainer.sums import sums_of

OPTION = "--export.dir"
CHUNK_BYTES = 1 << 28
"""Bytes of a weight that all devices have together, where several processes share the weights."""


class StepExporter:
    """Writes the weights of a run after some of its steps: a `trainer.task.Exporter`."""

    def __init__(self, config: GPTTrainConfig, note: Callable[[str], None]) -> None:
        """Reads and writes nothing yet. `note` is called with remarks."""
        self._config, self._note = config, note
        self.folder = config.export.dir or config.run_dir / "exported"

    @functools.cached_property
    def _export(self) -> Export:
        config = self._config
        return Export.of_run(config.run_dir, config, dtype=config.export.dtype, note=self._note)

    def is_due(self, step: int) -> bool:
        """Whether the weights after a step are exported."""
        every = self._config.export.every
        return every is not None and step % every == 0

    def __call__(self, weights: Any, step: int) -> None:
        """Writes the weights after a step. All processes must call it; the first one writes."""
        if self._config.has_adapters:
            weights = split_adapters(weights)[0]
        arrays = {path: x for path, x in _on_host(by_path(weights))}
        if jax.process_index() == 0:
            self._write(arrays, step)

    def _write(self, arrays: dict[str, Any], step: int) -> None:
        out = self.folder / name_of(step)
        for left in self.folder.glob(".step_*"):  # By a program that was killed.
            shutil.rmtree(left, ignore_errors=True)
        if not out.exists():
            write_folder(out, functools.partial(self._fill, arrays), option=OPTION)
        else:
            self._compare(arrays, out)
        if self._config.export.keep is not None:
            for older in exported(self.folder)[: -self._config.export.keep]:
                remove(older)

    def _fill(self, arrays: dict[str, Any], folder: Path) -> None:
        self._export.write(arrays, folder, note=self._note)

    def _compare(self, arrays: dict[str, Any], out: Path) -> None:
        """Raises unless a folder that a killed program has left holds just these weights."""
        with (
            storing(self.folder, OPTION),
            tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=self.folder) as again,
        ):
            self._fill(arrays, Path(again))
            differing = sorted(set(sums_of(out).items()) ^ set(sums_of(Path(again)).items()))
        if differing:
            raise InputError(
                "A step that is done again must give the weights that were exported; got another "
                f"{differing[0][0]} than in {str(out)!r}. Give another {OPTION}, or delete the "
                "folder if nothing uses it."
            )


def name_of(step: int) -> str:
    """The name of the folder of a step."""
    return f"step_{step:06d}"


def exported(folder: Path) -> list[Path]:
    """The folders of steps, the oldest first."""
    with storing(folder, OPTION):
        found = [path for path in folder.iterdir() if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def remove(folder: Path) -> None:
    """Removes a folder, which disappears as a whole."""
    hidden = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    with storing(folder, OPTION):
        durable.rename(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _on_host(arrays: dict[str, Array]) -> Iterator[tuple[str, Shaped[np.ndarray, "..."]]]:
    """Whole weights in the memory of the first process."""
    is_first = jax.process_index() == 0
    for path, x in arrays.items():
        if x.is_fully_addressable:
            yield path, np.asarray(x)
            continue
        # In pieces, as all devices have them together.
        rows = max(x.shape[0] * CHUNK_BYTES // max(x.nbytes, 1), 1)
        whole = np.empty(x.shape, x.dtype) if is_first else None
        for start in range(0, x.shape[0], rows):
            piece = multihost_utils.process_allgather(x[start : start + rows], tiled=True)
            if whole is not None:
                whole[start : start + rows] = piece
        if whole is not None:
            yield path, whole
