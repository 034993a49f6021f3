"""Files of experts in other forms than a run has: all experts in one tensor, and 4-bit numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Shaped

from trainer.weights.files import Tensors

_OWN = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the tensors of numbers in the format MXFP4, and of the exponents of their blocks."""
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The numbers of 4 bits, of which the higher one of a byte comes second (Open Compute Project,
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf)."""


def with_experts(tensors: Tensors, wanted: Mapping[str, tuple[int, ...]]) -> Tensors:
    """The tensors under the names that a model of this program has. Qwen3.5 is published with one
    tensor [experts, 2 * hidden, width] for the gates and the projections up of all experts, and
    transformers writes one for each. gpt-oss is published in MXFP4, of which transformers makes
    [experts, width, 2 * hidden]."""
    shapes, dtypes, slices = (dict(x) for x in (tensors.shapes, tensors.dtypes, tensors.slices))

    def give(name: str, source: Any, kind: str) -> None:
        shapes[name], dtypes[name], slices[name] = wanted[name], kind, source

    used = set()
    for name in wanted.keys() - tensors.shapes.keys():
        if own := _OWN.fullmatch(name):
            layer, expert, which = own[1], int(own[2]), own[3]
            fused = f"{layer}.down_proj" if which == "down" else f"{layer}.gate_up_proj"
            rows = wanted[name][0]
            count = 1 if which == "down" else 2
            shape = tensors.shapes.get(fused, ())
            if shape[1:] == (count * rows, wanted[name][1]) and shape[0] > expert:
                before = rows if which == "up" else 0
                give(name, _OfExpert(tensors.slices[fused], expert, before), tensors.dtypes[fused])
                used.add(fused)
        elif name + BLOCKS in tensors.shapes and name + SCALES in tensors.shapes:
            blocks, scales = name + BLOCKS, name + SCALES
            experts, width, outputs = wanted[name]
            if tensors.shapes[blocks] == (experts, outputs, width // 32, 16):
                give(name, _Unpacked(tensors.slices[blocks], tensors.slices[scales]), "BF16")
                used |= {blocks, scales}
    for name in used:
        del shapes[name], dtypes[name], slices[name]
    return replace(tensors, shapes=shapes, dtypes=dtypes, slices=slices)


class _OfExpert:
    """Some rows of one expert, of a tensor of all experts."""

    def __init__(self, tensor: Any, expert: int, before: int) -> None:
        self._tensor, self._expert, self._before = tensor, expert, before

    def __getitem__(self, index: tuple[slice, slice]) -> Shaped[np.ndarray, "rows columns"]:
        rows, columns = index
        own = slice(rows.start + self._before, rows.stop + self._before)
        expert = slice(self._expert, self._expert + 1)
        return np.asarray(self._tensor[(expert, own, columns)])[0]


class _Unpacked:
    """The transpose of matrices in MXFP4, whose rows have blocks of 32 numbers and an exponent."""

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales

    def __getitem__(self, index: tuple[slice, ...]) -> Shaped[np.ndarray, "experts inputs outputs"]:
        experts, inputs, outputs = index
        first, last = inputs.start // 32, -(-inputs.stop // 32)
        cover = (experts, outputs, slice(first, last))
        packed = np.asarray(self._blocks[(*cover, slice(0, 16))])
        exponents = np.asarray(self._scales[cover]).astype(np.int32) - 127
        numbers = FP4[np.stack([packed & 15, packed >> 4], axis=-1)]
        numbers = np.ldexp(numbers.reshape(*packed.shape[:-1], 32), exponents[..., None])
        rows = numbers.reshape(*packed.shape[:2], -1)
        return rows[:, :, inputs.start - 32 * first : inputs.stop - 32 * first].swapaxes(1, 2)
