"""Diffusion transformers: their weights. `models.dit` and `models.wan` compute them."""

from __future__ import annotations

from dataclasses import replace

from models.parts import mlp
from models.weights import Weight, below, bias, projection, scale, stacked, weight

TIME_CHANNELS = 256
"""Sines and cosines in which a DiT codes a time."""
_HEADS = {
    "query/kernel": projection("width | heads head_dim"),
    "key/kernel": projection("width | heads head_dim"),
    "value/kernel": projection("width | heads head_dim"),
    "out/kernel": projection("heads head_dim | width"),
}
_OF_TEXT = replace(projection("width | heads head_dim"), of_text=True)


def dit_weights(*, text: bool = False) -> dict[str, Weight]:
    """All weights of a DiT, by path. `text`: its layers attend to a text."""
    stream = {"modulation/kernel": weight("width layer_modulations width", "zeros")} | _HEADS
    if text:
        of_text = {"key/kernel": _OF_TEXT, "value/kernel": _OF_TEXT}
        of_text["out/kernel"] = projection("heads head_dim | width", "zeros")
        stream |= below("text", _HEADS | of_text)
    stream |= below("mlp", mlp.weights_of("mlp", gated=False))
    return {
        "patches/kernel": weight("values | width"),
        "time_in/kernel": weight("time width"),
        "time_out/kernel": weight("width width"),
        "classes/embedding": weight("classes width", "embedding"),
        **(below("text", _TEXT_TOKENS) if text else {}),
        **stacked("blocks/image", stream),
        "modulation/kernel": weight("width modulations width", "zeros"),
        "head/kernel": weight("width | values", "zeros"),
    }


_TEXT_TOKENS = {
    "text_in/kernel": weight("text_dim width"),
    "text_out/kernel": weight("width width"),
}


def wan_weights(*, image: bool, text_norm: bool) -> dict[str, Weight]:
    """All weights of a Wan, by path. `image`: a video begins with an image; `text_norm`: tokens are
    normalised before they attend to the text."""
    attention = _HEADS | {f"{x}_bias": bias("heads head_dim") for x in ("query", "key", "value")}
    attention |= {"out_bias": bias("width")}
    attention |= below("query_norm", _NORM_OVER_HEADS) | below("key_norm", _NORM_OVER_HEADS)
    of_text = attention | {"key/kernel": _OF_TEXT, "value/kernel": _OF_TEXT}
    if image:
        of_text |= {f"image_{x}/kernel": _OF_TEXT for x in ("key", "value")}
        of_text |= {f"image_{x}_bias": bias("heads head_dim") for x in ("key", "value")}
        of_text |= below("image_key_norm", _NORM_OVER_HEADS)
    layer = below("attention", attention) | below("text_attention", of_text)
    layer |= below("text_norm", _affine("width")) if text_norm else {}
    layer |= below("mlp", mlp.weights_of("mlp", gated=False, biased=True))
    layer |= {"mlp_bias": bias("width"), "modulation_table": _table("layer_modulations")}
    declared = {
        "patches/kernel": weight("frames rows columns in_channels | width"),
        "patches_bias": bias("width"),
        **{f"{x}/kernel": weight(f"{y} width") for x, y in _OF_ROWS.items()},
        "modulation/kernel": weight("width layer_modulations width"),
        **{f"{x}_bias": bias("width") for x in _OF_ROWS},
        "modulation_bias": bias("layer_modulations width"),
        **stacked("blocks", layer),
        "modulation_table": _table("modulations"),
        "head/outputs/kernel": weight("width | values", "zeros"),
        "head/outputs_bias": bias("values"),
    }
    if image:
        tokens = {
            "image_in/kernel": weight("image_dim image_dim"),
            "image_out/kernel": weight("image_dim width"),
            "image_in_bias": bias("image_dim"),
            "image_out_bias": bias("width"),
            **below("norm_in", _affine("image_dim")),
            **below("norm_out", _affine("width")),
        }
        declared |= below("image", tokens)
    return declared


_NORM_OVER_HEADS = {"heads_scale": scale("heads head_dim", precise=True)}
_OF_ROWS = {"time_in": "time", "time_out": "width", "text_in": "text_dim", "text_out": "width"}
"""Matrices whose inputs are no tokens of the sequence, and the names of these inputs."""


def _table(count: str) -> Weight:
    """Numbers that are added to modulations."""
    return weight(f"{count} width", "table", precise=True)


def _affine(width: str) -> dict[str, Weight]:
    """The weights of a LayerNorm."""
    return {"norm_scale": scale(width), "norm_bias": bias(width)}
