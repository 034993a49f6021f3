"""Files of Olmo Hybrid as they were published, from those that transformers writes.

transformers joins three convolutions to one and renames norms, and undoes both when it saves: the
norms then have other names in layers with attention, and each of the three convolutions a third of
all rows, whatever their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Shaped

from trainer.weights.files import Tensors

NORMS = {
    "input_layernorm": "attention_layer_norm",
    "post_attention_layernorm": "feedforward_layer_norm",
}
"""Names in transformers -> names in files. It reads both in every layer."""
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")


def as_published(tensors: Tensors, wanted: Mapping[str, tuple[int, ...]]) -> Tensors:
    """The tensors under the names and with the rows that a model of this program has."""
    names = {name: name for name in tensors.shapes}
    for name in wanted.keys() - tensors.shapes.keys():
        for here, there in NORMS.items():
            for other in (name.replace(here, there), name.replace(there, here)):
                if other in names and other not in wanted:
                    names[other] = name
    shapes = {names[name]: shape for name, shape in tensors.shapes.items()}
    dtypes = {names[name]: dtype for name, dtype in tensors.dtypes.items()}
    slices = {names[name]: x for name, x in tensors.slices.items()}
    for name in wanted:
        if CONVOLUTIONS[0] not in name:
            continue
        three = [name.replace(CONVOLUTIONS[0], other) for other in CONVOLUTIONS]
        given, own = ([x[key][0] for key in three if key in x] for x in (shapes, wanted))
        if len(given) == 3 and given != own and sum(given) == sum(own):
            parts, start = [(slices[key], shapes[key][0]) for key in three], 0
            for key, size in zip(three, own, strict=True):
                slices[key] = _Rows(parts, start)
                shapes[key] = (size, *shapes[key][1:])
                start += size
    return replace(tensors, shapes=shapes, dtypes=dtypes, slices=slices)


class _Rows:
    """Some rows of several tensors as if these were one, read when it is indexed with slices."""

    def __init__(self, parts: Sequence[tuple[Any, int]], start: int) -> None:
        self._parts, self._start = parts, start

    def __getitem__(self, index: tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
        rows, *rest = index
        first, last, found = self._start + rows.start, self._start + rows.stop, []
        for tensor, size in self._parts:
            own = slice(max(first, 0), min(last, size))
            if own.start < own.stop:
                found.append(np.asarray(tensor[(own, *rest)]))
            first, last = first - size, last - size
        return np.concatenate(found)
