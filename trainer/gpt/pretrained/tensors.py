"""The tensors of a Hugging Face checkpoint: which weight each is.

Both rotate the channel pairs (i, i + head_dim / 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from models.periods import ATTENTION, LINEAR
from trainer.gpt.config import GPTConfig
from trainer.weights.places import (
    AS_IT_IS,
    IN_COLUMNS,
    IN_ROWS,
    OF_CONV,
    OF_HEADS,
    TRANSPOSED,
    Groups,
    Place,
)

OF_MODEL: Mapping[str, tuple[str, Groups]] = {
    "embedding/embedding": ("model.embed_tokens.weight", ((0,), (1,))),
    "norm/scale": ("model.norm.weight", AS_IT_IS),
    "head/kernel": ("lm_head.weight", TRANSPOSED),
}
"""Weight -> tensor, outside of the layers."""
OF_LAYER: Mapping[str, tuple[str, Groups]] = {
    "attention_norm/scale": ("input_layernorm.weight", AS_IT_IS),
    "attention/query/kernel": ("self_attn.q_proj.weight", IN_ROWS),
    "attention/key/kernel": ("self_attn.k_proj.weight", IN_ROWS),
    "attention/value/kernel": ("self_attn.v_proj.weight", IN_ROWS),
    "attention/out/kernel": ("self_attn.o_proj.weight", IN_COLUMNS),
    "attention/query_bias": ("self_attn.q_proj.bias", OF_HEADS),
    "attention/key_bias": ("self_attn.k_proj.bias", OF_HEADS),
    "attention/value_bias": ("self_attn.v_proj.bias", OF_HEADS),
    "attention/sinks": ("self_attn.sinks", AS_IT_IS),
    "attention/query_norm/scale": ("self_attn.q_norm.weight", AS_IT_IS),
    "attention/key_norm/scale": ("self_attn.k_norm.weight", AS_IT_IS),
    "attention/query_norm/heads_scale": ("self_attn.q_norm.weight", OF_HEADS),
    "attention/key_norm/heads_scale": ("self_attn.k_norm.weight", OF_HEADS),
    "mlp_norm/scale": ("post_attention_layernorm.weight", AS_IT_IS),
    "mlp/gate/kernel": ("mlp.gate_proj.weight", TRANSPOSED),
    "mlp/up/kernel": ("mlp.up_proj.weight", TRANSPOSED),
    "mlp/down/kernel": ("mlp.down_proj.weight", TRANSPOSED),
}
"""Weight of a layer -> tensor of a layer."""
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
    "attention/out/kernel": ("linear_attn.out_proj.weight", IN_COLUMNS),
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
    "attention/out/kernel": ("linear_attn.o_proj.weight", IN_COLUMNS),
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


PREFIX_OF_TEXT = "model.language_model."
"""What the names of the tensors of a text model begin with, beside those of a model of images."""
IMAGES = "model.visual."
OTHER_PARTS = (IMAGES, "mtp.")
"""What the names of tensors begin with that are no part of the text model: those for images, and
those that predict more than one token."""


def part_of(name: str) -> str | None:
    """The other part of a model to which a tensor belongs; None for the text model."""
    return next((part for part in OTHER_PARTS if name.startswith(part)), None)


def name_of_text(name: str) -> str:
    """The name of a tensor of a text model, as in a folder of the text model alone."""
    rest = name.removeprefix(PREFIX_OF_TEXT)
    return name if rest == name else f"model.{rest}"
