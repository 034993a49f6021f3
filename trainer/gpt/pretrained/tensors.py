"""The tensors of a Hugging Face checkpoint: which weight each is, and parts of those in its files.

PyTorch keeps the matrix of a projection as [outputs, inputs], and one tensor for each layer; here a
kernel is [*inputs, *outputs], and those of all layers are one array. Both rotate the channel pairs
(i, i + head_dim / 2). Files are read by safetensors; nothing is unpickled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open

from models.periods import ATTENTION, LINEAR
from startrail_jax.errors import InputError, UnsupportedError
from trainer.data.opening import read_object
from trainer.gpt.config import GPTConfig

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "*.pth", "*.pt", "*.ckpt")

IGNORED = ".rotary_emb.inv_freq"
"""Ending of tensors that old checkpoints have, and that follow from config.json."""
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The types of tensors that are read, as safetensors and as numpy name them; widest first."""

Groups = tuple[tuple[int, ...], ...]
"""For each dimension of a tensor, the dimensions of the weight of which it is made, in order."""

AS_IT_IS: Groups = ((0,),)
TRANSPOSED: Groups = ((1,), (0,))
OF_MODEL: Mapping[str, tuple[str, Groups]] = {
    "embedding/embedding": ("model.embed_tokens.weight", ((0,), (1,))),
    "norm/scale": ("model.norm.weight", AS_IT_IS),
    "head/kernel": ("lm_head.weight", TRANSPOSED),
}
"""Weight -> tensor, outside of the layers."""
OF_LAYER: Mapping[str, tuple[str, Groups]] = {
    "attention_norm/scale": ("input_layernorm.weight", AS_IT_IS),
    "attention/query/kernel": ("self_attn.q_proj.weight", ((1, 2), (0,))),
    "attention/key/kernel": ("self_attn.k_proj.weight", ((1, 2), (0,))),
    "attention/value/kernel": ("self_attn.v_proj.weight", ((1, 2), (0,))),
    "attention/out/kernel": ("self_attn.o_proj.weight", ((2,), (0, 1))),
    "attention/query_bias": ("self_attn.q_proj.bias", ((0, 1),)),
    "attention/key_bias": ("self_attn.k_proj.bias", ((0, 1),)),
    "attention/value_bias": ("self_attn.v_proj.bias", ((0, 1),)),
    "attention/sinks": ("self_attn.sinks", AS_IT_IS),
    "attention/query_norm/scale": ("self_attn.q_norm.weight", AS_IT_IS),
    "attention/key_norm/scale": ("self_attn.k_norm.weight", AS_IT_IS),
    "attention/query_norm/heads_scale": ("self_attn.q_norm.weight", ((0, 1),)),
    "attention/key_norm/heads_scale": ("self_attn.k_norm.weight", ((0, 1),)),
    "mlp_norm/scale": ("post_attention_layernorm.weight", AS_IT_IS),
    "mlp/gate/kernel": ("mlp.gate_proj.weight", TRANSPOSED),
    "mlp/up/kernel": ("mlp.up_proj.weight", TRANSPOSED),
    "mlp/down/kernel": ("mlp.down_proj.weight", TRANSPOSED),
}
"""Weight of a layer -> tensor of a layer."""
IN_ROWS: Groups = ((1, 2), (0,))
OF_CONV: Groups = ((1, 2), (), (0,))
OF_LINEAR: Mapping[str, tuple[str, Groups]] = {
    "attention/query/kernel": ("linear_attn.in_proj_qkv.weight", IN_ROWS),
    "attention/key/kernel": ("linear_attn.in_proj_qkv.weight", IN_ROWS),
    "attention/value/kernel": ("linear_attn.in_proj_qkv.weight", IN_ROWS),
    "attention/out_gate/kernel": ("linear_attn.in_proj_z.weight", IN_ROWS),
    "attention/decay/kernel": ("linear_attn.in_proj_a.weight", TRANSPOSED),
    "attention/beta/kernel": ("linear_attn.in_proj_b.weight", TRANSPOSED),
    "attention/query_conv": ("linear_attn.conv1d.weight", OF_CONV),
    "attention/key_conv": ("linear_attn.conv1d.weight", OF_CONV),
    "attention/value_conv": ("linear_attn.conv1d.weight", OF_CONV),
    "attention/decay_rate": ("linear_attn.A_log", AS_IT_IS),
    "attention/decay_bias": ("linear_attn.dt_bias", AS_IT_IS),
    "attention/out_norm/scale": ("linear_attn.norm.weight", AS_IT_IS),
    "attention/out/kernel": ("linear_attn.out_proj.weight", ((2,), (0, 1))),
}
"""The same of linear attention. Where several weights are one tensor, its rows are theirs, in the
order of this table."""
OF_OLMO: Mapping[str, tuple[str, Groups]] = {
    "attention_norm/scale": ("attention_layer_norm.weight", AS_IT_IS),
    "mlp_norm/scale": ("feedforward_layer_norm.weight", AS_IT_IS),
    "attention/query/kernel": ("linear_attn.q_proj.weight", IN_ROWS),
    "attention/key/kernel": ("linear_attn.k_proj.weight", IN_ROWS),
    "attention/value/kernel": ("linear_attn.v_proj.weight", IN_ROWS),
    "attention/out_gate/kernel": ("linear_attn.g_proj.weight", IN_ROWS),
    "attention/decay/kernel": ("linear_attn.a_proj.weight", TRANSPOSED),
    "attention/beta/kernel": ("linear_attn.b_proj.weight", TRANSPOSED),
    "attention/query_conv": ("linear_attn.q_conv1d.weight", OF_CONV),
    "attention/key_conv": ("linear_attn.k_conv1d.weight", OF_CONV),
    "attention/value_conv": ("linear_attn.v_conv1d.weight", OF_CONV),
    "attention/out_norm/scale": ("linear_attn.o_norm.weight", AS_IT_IS),
    "attention/out/kernel": ("linear_attn.o_proj.weight", ((2,), (0, 1))),
}
"""What an Olmo Hybrid has in its layers of linear attention, beside the decay of others."""
AFTER_BLOCKS: Mapping[str, tuple[str, Groups]] = {
    "attention_out_norm/scale": ("post_attention_layernorm.weight", AS_IT_IS),
    "mlp_norm/scale": ("pre_feedforward_layernorm.weight", AS_IT_IS),
    "mlp_out_norm/scale": ("post_feedforward_layernorm.weight", AS_IT_IS),
}
"""What has another name in a model that normalises what a block adds, as Gemma does."""


def tables(model: GPTConfig) -> Mapping[str, Mapping[str, tuple[str, Groups]]]:
    """Part of a model -> weight of a layer -> tensor."""
    of_all = {path: x for path, x in OF_LAYER.items() if not path.startswith("attention/")}
    is_olmo = model.norms == "after"
    return {
        ATTENTION: OF_LAYER if model.norms == "before" else {**OF_LAYER, **AFTER_BLOCKS},
        LINEAR: of_all | dict(OF_LINEAR) | (dict(OF_OLMO) if is_olmo else {}),
    }


def numbers_of(mixers: Sequence[str], part: str) -> list[int]:
    """The numbers of the layers of a part."""
    kind = "linear" if part == LINEAR else "attention"
    return [number for number, mixer in enumerate(mixers) if mixer == kind]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one weight, or that of all layers together, lies in a checkpoint."""

    tensors: tuple[str, ...]
    """Its tensors: one for each layer, or a single one."""
    stacked: bool
    """Whether its first dimension counts layers."""
    shape: tuple[int, ...]
    """Its shape, without layers."""
    groups: Groups
    """How the dimensions of a tensor are made of its own; one of size 1 is made of none."""
    rows: tuple[int, int] | None = None
    """The first of its rows in a tensor that has other weights too, and the rows of all of them."""

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of each of its tensors."""
        rows, *rest = self.tensor_shape
        return (rows if self.rows is None else self.rows[1], *rest)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of its part of each of its tensors."""
        return tuple(math.prod(self.shape[dim] for dim in group) for group in self.groups)

    def read(self, tensor: Any, index: Sequence[slice]) -> Shaped[np.ndarray, "..."]:
        """A part of the weight of one layer, of which as little is read as slices allow.

        Args:
            tensor: its tensor, or what gives parts of it when it is indexed with slices.
            index: the part: for each dimension of the weight, a slice of step 1.
        """
        ranges = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True)]
        cover, split, inner = [], [], []
        for group in self.groups:
            if not group:
                cover.append(slice(0, 1))
                continue
            first, *rest = group
            # Of the first dimension only what is wanted, and of the others, which lie within it,
            # everything.
            size = math.prod(self.shape[dim] for dim in rest)
            start, stop = ranges[first]
            cover.append(slice(start * size, stop * size))
            split += [stop - start, *(self.shape[dim] for dim in rest)]
            inner += [slice(None), *(slice(*ranges[dim]) for dim in rest)]
        if self.rows is not None:
            before = self.rows[0]
            cover[0] = slice(cover[0].start + before, cover[0].stop + before)
        block = np.asarray(tensor[tuple(cover)]).reshape(split)[tuple(inner)]
        return block.transpose(np.argsort(self._order))

    def to_tensor(self, weight: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        """The tensor of the weight of one layer, or its rows of that, contiguous."""
        return np.ascontiguousarray(weight.transpose(self._order).reshape(self.tensor_shape))

    @property
    def _order(self) -> list[int]:
        return [dim for group in self.groups for dim in group]


def places(shapes: Mapping[str, tuple[int, ...]], model: GPTConfig) -> Iterator[tuple[str, Place]]:
    """The place of every weight of a model.

    Args:
        shapes: the shape of every weight by its path: `blocks/mlp/up/kernel`.
        model: the model.
    """
    of_parts = tables(model)
    for path, shape in shapes.items():
        part, _, rest = path.partition("/")
        if part in of_parts:
            table = of_parts[part]
            layers = numbers_of(model.layer_mixers, part)
            name, groups = table[rest]
            place = Place(
                tensors=tuple(f"model.layers.{layer}.{name}" for layer in layers),
                stacked=True,
                shape=shape[1:],
                groups=groups,
            )
            others = [x for x, (other, _) in table.items() if other == name]
            beside = [x for x in others if f"{part}/{x}" in shapes]
            if beside[1:]:
                # Heads and their channels are the last dimensions of all of them.
                sizes = [math.prod(shapes[f"{part}/{x}"][-2:]) for x in beside]
                before = sum(sizes[: beside.index(rest)])
                place = replace(place, rows=(before, sum(sizes)))
            yield path, place
        else:
            name, groups = OF_MODEL[path]
            yield path, Place(tensors=(name,), stacked=False, shape=shape, groups=groups)


def by_tensor(found: Mapping[str, Place]) -> dict[str, list[tuple[str, int]]]:
    """For each tensor, the weights whose rows it has, in their order: path, and layer of the path.

    Args:
        found: what `places` gives.
    """
    tensors: dict[str, list[tuple[str, int]]] = {}
    for path, place in found.items():
        for layer, name in enumerate(place.tensors):
            tensors.setdefault(name, []).append((path, layer))
    return {
        name: sorted(parts, key=lambda x: (found[x[0]].rows or (0,))[0])
        for name, parts in tensors.items()
    }


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """The open files of a checkpoint."""

    folder: Path
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every tensor."""
    dtypes: Mapping[str, str]
    """Type of every tensor, as safetensors names it."""
    slices: Mapping[str, Any]
    """What gives parts of a tensor, as numpy arrays, when it is indexed with slices."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """For each other part than the text model, how many tensors it has."""

    @property
    def dtype(self) -> str:
        """The type that holds the values of all tensors."""
        kinds = {DTYPES[kind] for kind in self.dtypes.values()}
        return kinds.pop() if len(kinds) == 1 else "float32"

    def check(self, wanted: Mapping[str, tuple[int, ...]], *, tied: Mapping[str, str]) -> None:
        """Raises unless these are the tensors of a model.

        Args:
            wanted: the shapes of the model's tensors.
            tied: names of tensors that may be there if they equal another one.

        Raises:
            ValueError: if a tensor is missing, unknown, or of another shape.
            NotImplementedError: if a tensor is of a type that is not read.
        """
        unknown = [name for name in self.shapes if name not in wanted and name not in tied]
        missing = [name for name in wanted if name not in self.shapes]
        lines = [
            *(f"  {name}: {list(wanted[name])} in the model, not in the files" for name in missing),
            *(f"  {name}: {list(self.shapes[name])} in the files, not in the model"
              for name in unknown),
            *(f"  {name}: {list(self.shapes[name])} in the files, {list(shape)} in the model"
              for name, shape in wanted.items()
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
        for name, kind in self.dtypes.items():
            if kind not in DTYPES:
                raise UnsupportedError(
                    f"Tensors must be of type {', '.join(DTYPES)}; got {name} of type {kind} in "
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
            np.array_equal(self.slices[name][part], self.slices[other][part]) for part in parts
        )


PREFIX_OF_TEXT = "model.language_model."
"""What the names of the tensors of a text model begin with, beside those of a model of images."""
IMAGES = "model.visual."
OTHER_PARTS = (IMAGES, "mtp.")
"""What the names of tensors begin with that are no part of the text model: those for images, and
those that predict more than one token."""


def _part_of(name: str) -> str | None:
    """The other part of a model to which a tensor belongs; None for the text model."""
    return next((part for part in OTHER_PARTS if name.startswith(part)), None)


def _name_of_text(name: str) -> str:
    """The name of a tensor of a text model, as in a folder of the text model alone."""
    rest = name.removeprefix(PREFIX_OF_TEXT)
    return name if rest == name else f"model.{rest}"


@contextmanager
def open_tensors(folder: Path) -> Iterator[Tensors]:
    """Opens the files of a checkpoint, and reads what their headers say.

    Tensors of other parts than the text model are counted, and left out.

    Raises:
        ValueError: if a file is missing or damaged, or changes.
    """
    index = _index(folder)
    slices: dict[str, Any] = {}
    with ExitStack() as stack:
        for path in _files(folder, index):
            file = stack.enter_context(_opened(path))
            names = [name for name in file.keys() if not name.endswith(IGNORED)]  # noqa: SIM118
            strays = [name for name in names if index and index.get(name) != path.name]
            if strays:
                raise InputError(
                    f"Every tensor must be in the file that {INDEX} names, once; got {strays[0]} "
                    f"in {str(path)!r}. Download the files again."
                )
            slices |= {name: file.get_slice(name) for name in names}
        lost = sorted(x for x in index or {} if x not in slices and not x.endswith(IGNORED))
        if lost:
            raise InputError(
                f"Every tensor of {INDEX} must be in its file; got no {lost[0]} in "
                f"{str(folder / (index or {})[lost[0]])!r}. Download the files again."
            )
        left_out = Counter(filter(None, map(_part_of, slices)))
        found = {_name_of_text(name): x for name, x in slices.items() if not _part_of(name)}
        yield Tensors(
            folder=folder,
            shapes={name: tuple(x.get_shape()) for name, x in found.items()},
            dtypes={name: x.get_dtype() for name, x in found.items()},
            slices=found,
            left_out=left_out,
        )


def _opened(path: Path) -> Any:
    """A file, of which parts of tensors are read: a context manager."""
    try:
        # Pages of a mapped file would count as memory of the process, as much as the weights.
        return safe_open(path, framework="numpy", backend="pread")
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{str(path)!r} must be a whole safetensors file; got {error}. Download it again."
        ) from error


def _index(folder: Path) -> dict[str, str] | None:
    """Tensor -> file; None for a checkpoint of one file."""
    if (folder / ONE_FILE).exists():
        return None
    path = folder / INDEX
    if not path.exists():
        pickles = sorted(found.name for kind in PICKLES for found in folder.glob(kind))
        why = f", but {pickles[0]}, which is never unpickled" if pickles else ""
        raise InputError(
            f"init_from must hold {ONE_FILE} or {INDEX}; got {str(folder)!r} with neither{why}. "
            "Download the safetensors files of the model, or convert it with save_pretrained of "
            "transformers."
        )
    files = read_object(path).get("weight_map")
    if not isinstance(files, dict) or not files or not all(map(_is_name, files.values())):
        raise InputError(
            f"weight_map must name a file of the folder for every tensor in {str(path)!r}; got "
            "something else. Download it again."
        )
    return files


def _is_name(name: Any) -> bool:
    """Whether a file can have a name, which does not lead out of its folder."""
    if not isinstance(name, str) or not name.isprintable():
        return False
    return name == Path(name).name and len(name) < 256


def _files(folder: Path, index: Mapping[str, str] | None) -> list[Path]:
    names = [ONE_FILE] if index is None else sorted(set(index.values()))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise InputError(
            f"All files that {INDEX} names must be there; got {str(folder)!r} without "
            f"{', '.join(missing)}. Download them."
        )
    return [folder / name for name in names]
