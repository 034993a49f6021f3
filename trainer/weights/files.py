"""Folders of safetensors files: reads headers, and slices of tensors.

Nothing is unpickled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from startrail_jax.errors import InputError, UnsupportedError
from trainer.data.opening import read_object

MODEL = "model"
"""Stems of the names of files: of transformers, and of diffusers."""
DIFFUSERS = "diffusion_pytorch_model"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "*.pth", "*.pt", "*.ckpt")

IGNORED = ".rotary_emb.inv_freq"
"""Ending of the names of tensors in old checkpoints that follow from config.json."""
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Supported types of tensors: their names in safetensors -> in numpy."""


def one_file(stem: str) -> str:
    """The name of the file of a checkpoint with a single file."""
    return f"{stem}.safetensors"


def index_of(stem: str) -> str:
    """The name of the index of a checkpoint with several files."""
    return f"{one_file(stem)}.index.json"


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """The open files of a checkpoint."""

    folder: Path
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every tensor."""
    dtypes: Mapping[str, str]
    """Type of every tensor, as safetensors names it."""
    slices: Mapping[str, Any]
    """Readers of tensors: indexed with slices, each gives a part of its tensor as a numpy array."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Number of tensors of each other part of the model."""

    @property
    def types(self) -> dict[str, str]:
        """Type of every tensor, as numpy names it."""
        return {name: DTYPES[dtype] for name, dtype in self.dtypes.items()}

    @property
    def kinds(self) -> str:
        """The types of all tensors, as a text."""
        return " and ".join(sorted({*self.types.values()}))

    @property
    def largest_kind(self) -> str:
        """The type of the most numbers."""
        sizes: Counter[str] = Counter()
        for name, dtype in self.types.items():
            sizes[dtype] += math.prod(self.shapes[name])
        return max(sizes, key=lambda dtype: sizes[dtype])

    def check(self, shapes: Mapping[str, tuple[int, ...]], *, tied: Mapping[str, str]) -> None:
        """Raises unless the tensors have the names and `shapes` of a model; copies of `tied` ones
        may be present."""
        unknown = [name for name in self.shapes if name not in shapes and name not in tied]
        missing = [name for name in shapes if name not in self.shapes]
        lines = [
            *(f"  {name}: {list(shapes[name])} in the model, not in the files" for name in missing),
            *(f"  {name}: {list(self.shapes[name])} in the files, not in the model"
              for name in unknown),
            *(f"  {name}: {list(self.shapes[name])} in the files, {list(shape)} in the model"
              for name, shape in shapes.items()
              if name in self.shapes and self.shapes[name] != shape),
        ]  # fmt: skip
        if lines:
            more = f"\n  and {len(lines) - 5} more" if lines[5:] else ""
            listed = "\n".join(lines[:5])
            raise InputError(
                f"The tensors must be those of the model that config.json and the flags describe; "
                f"got {str(self.folder)!r} with others:\n{listed}{more}\n"
                "Leave out flags --model.*, or download the files again."
            )
        for name, dtype in self.dtypes.items():
            if dtype not in DTYPES:
                raise UnsupportedError(
                    f"Tensors must be of type {', '.join(DTYPES)}; got {name} of type {dtype} in "
                    f"{str(self.folder)!r}, which is not supported. Use a checkpoint that is not "
                    "quantised."
                )
        for name, other in tied.items():
            if name in self.shapes and not self._are_equal(name, other):
                raise InputError(
                    f"{name} must equal {other}, since config.json says that they are tied; got "
                    f"{str(self.folder)!r}, where they differ. Correct tie_word_embeddings in "
                    "config.json, or download the files again."
                )

    def _are_equal(self, name: str, other: str) -> bool:
        if self.shapes[name] != self.shapes[other] or self.dtypes[name] != self.dtypes[other]:
            return False
        rows = self.shapes[name][0]
        parts = [slice(start, min(start + 4096, rows)) for start in range(0, rows, 4096)]
        return all(
            np.array_equal(self.slices[name][index], self.slices[other][index]) for index in parts
        )


@contextmanager
def open_tensors(
    folder: Path,
    *,
    stem: str = MODEL,
    name_of: Callable[[str], str] = str,
    part_of: Callable[[str], str | None] = lambda name: None,
) -> Iterator[Tensors]:
    """Opens the files of a checkpoint, and reads their headers.

    `part_of` names the other part of the model to which a tensor belongs, or None; tensors of other
    parts are counted and left out.
    """
    index = _index(folder, stem)
    slices: dict[str, Any] = {}
    with ExitStack() as stack:
        for path in _files(folder, index, stem):
            file = stack.enter_context(_opened(path))
            names = [name for name in file.keys() if not name.endswith(IGNORED)]  # noqa: SIM118
            strays = [name for name in names if index and index.get(name) != path.name]
            if strays:
                raise InputError(
                    f"Every tensor must be in the file that {index_of(stem)} names, once; got "
                    f"{strays[0]} in {str(path)!r}. Download the files again."
                )
            slices |= {name: file.get_slice(name) for name in names}
        lost = sorted(x for x in index or {} if x not in slices and not x.endswith(IGNORED))
        if lost:
            raise InputError(
                f"Every tensor of {index_of(stem)} must be in its file; got no {lost[0]} in "
                f"{str(folder / (index or {})[lost[0]])!r}. Download the files again."
            )
        left_out = Counter(filter(None, map(part_of, slices)))
        model_slices = {name_of(name): x for name, x in slices.items() if not part_of(name)}
        yield Tensors(
            folder=folder,
            shapes={name: tuple(x.get_shape()) for name, x in model_slices.items()},
            dtypes={name: x.get_dtype() for name, x in model_slices.items()},
            slices=model_slices,
            left_out=left_out,
        )


def _opened(path: Path) -> Any:
    """Opens a file to read parts of tensors: a context manager."""
    try:
        # Pages of a mapped file would count as memory of the process, as much as the weights.
        return safe_open(path, framework="numpy", backend="pread")
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{str(path)!r} must be a whole safetensors file; got {error}. Download it again."
        ) from error


def _index(folder: Path, stem: str) -> dict[str, str] | None:
    """Tensor -> file; None for a checkpoint of one file."""
    if (folder / one_file(stem)).exists():
        return None
    path = folder / index_of(stem)
    if not path.exists():
        pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
        why = f", but {pickles[0]}, which is never unpickled" if pickles else ""
        raise InputError(
            f"init_from must hold {one_file(stem)} or {index_of(stem)}; got {str(folder)!r} with "
            f"neither{why}. Download the safetensors files of the model, or convert it with "
            "save_pretrained of its library."
        )
    files = read_object(path).get("weight_map")
    if not isinstance(files, dict) or not files or not all(map(_is_name, files.values())):
        raise InputError(
            f"weight_map must name a file of the folder for every tensor in {str(path)!r}; got "
            "something else. Download it again."
        )
    return files


def _is_name(name: Any) -> bool:
    """True for the name of a file that does not lead out of its folder."""
    if not isinstance(name, str) or not name.isprintable():
        return False
    return name == Path(name).name and len(name) < 256


def _files(folder: Path, index: Mapping[str, str] | None, stem: str) -> list[Path]:
    names = [one_file(stem)] if index is None else sorted(set(index.values()))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise InputError(
            f"All files that {index_of(stem)} names must be there; got {str(folder)!r} without "
            f"{', '.join(missing)}. Download them."
        )
    return [folder / name for name in names]
