"""The tensors of a Wan in a folder of diffusers: which weight each is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from models.periods import ATTENTION
from trainer.weights.places import (
    AS_IT_IS,
    IN_COLUMNS,
    IN_ROWS,
    OF_HEADS,
    TRANSPOSED,
    Groups,
    Place,
)

OF_TABLE: Groups = ((), (0,), (1,))


def _of_projection(path: str, name: str) -> dict[str, tuple[str, Groups]]:
    """A projection with a bias."""
    return {
        f"{path}/kernel": (f"{name}.weight", TRANSPOSED),
        f"{path}_bias": (f"{name}.bias", AS_IT_IS),
    }


def _of_norm(path: str, name: str) -> dict[str, tuple[str, Groups]]:
    return {
        f"{path}/norm_scale": (f"{name}.weight", AS_IT_IS),
        f"{path}/norm_bias": (f"{name}.bias", AS_IT_IS),
    }


def _of_attention(path: str, name: str) -> dict[str, tuple[str, Groups]]:
    pairs = {"query": "to_q", "key": "to_k", "value": "to_v"}
    pairs |= {"image_key": "add_k_proj", "image_value": "add_v_proj"}
    found = _of_projection(f"{path}/out", f"{name}.to_out.0")
    found[f"{path}/out/kernel"] = (f"{name}.to_out.0.weight", IN_COLUMNS)
    for here, there in pairs.items():
        found[f"{path}/{here}/kernel"] = (f"{name}.{there}.weight", IN_ROWS)
        found[f"{path}/{here}_bias"] = (f"{name}.{there}.bias", OF_HEADS)
    for here, there in (("query", "q"), ("key", "k"), ("image_key", "added_k")):
        found[f"{path}/{here}_norm/heads_scale"] = (f"{name}.norm_{there}.weight", OF_HEADS)
    return found


_CONDITION, _IMAGE = "condition_embedder", "condition_embedder.image_embedder"
OF_MODEL: Mapping[str, tuple[str, Groups]] = {
    # Frames, height, width and channels of a patch, and channels of the stream.
    "patches/kernel": ("patch_embedding.weight", ((4,), (3,), (0,), (1,), (2,))),
    "patches_bias": ("patch_embedding.bias", AS_IT_IS),
    **_of_projection("time_in", f"{_CONDITION}.time_embedder.linear_1"),
    **_of_projection("time_out", f"{_CONDITION}.time_embedder.linear_2"),
    "modulation/kernel": (f"{_CONDITION}.time_proj.weight", IN_ROWS),
    "modulation_bias": (f"{_CONDITION}.time_proj.bias", OF_HEADS),
    **_of_projection("text_in", f"{_CONDITION}.text_embedder.linear_1"),
    **_of_projection("text_out", f"{_CONDITION}.text_embedder.linear_2"),
    **_of_norm("image/norm_in", f"{_IMAGE}.norm1"),
    **_of_projection("image/image_in", f"{_IMAGE}.ff.net.0.proj"),
    **_of_projection("image/image_out", f"{_IMAGE}.ff.net.2"),
    **_of_norm("image/norm_out", f"{_IMAGE}.norm2"),
    "modulation_table": ("scale_shift_table", OF_TABLE),
    **_of_projection("head/outputs", "proj_out"),
}
"""Weight -> tensor, outside of the layers."""
OF_LAYER: Mapping[str, tuple[str, Groups]] = {
    **_of_attention("attention", "attn1"),
    **_of_attention("text_attention", "attn2"),
    **_of_norm("text_norm", "norm2"),
    **_of_projection("mlp/up", "ffn.net.0.proj"),
    "mlp/down/kernel": ("ffn.net.2.weight", TRANSPOSED),
    "mlp_bias": ("ffn.net.2.bias", AS_IT_IS),
    "modulation_table": ("scale_shift_table", OF_TABLE),
}
"""Weight of a layer -> tensor of a layer."""


def places(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Place]]:
    """The place of every weight of a model."""
    for path, shape in shapes.items():
        part, _, rest = path.partition("/")
        if part == ATTENTION:
            name, groups = OF_LAYER[rest]
            names = tuple(f"blocks.{layer}.{name}" for layer in range(shape[0]))
            yield path, Place(tensors=names, stacked=True, shape=shape[1:], groups=groups)
        else:
            name, groups = OF_MODEL[path]
            yield path, Place(tensors=(name,), stacked=False, shape=shape, groups=groups)
