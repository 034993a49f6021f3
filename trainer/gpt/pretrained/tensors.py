"""The tensors of a Hugging Face checkpoint: which weight each is.

Both rotate the channel pairs (i, i + head_dim / 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from models.config import GPTConfig
from models.parts.gpt import stack_pairs
from models.periods import layers_of
from startrail_jax.errors import InputError
from trainer.weights.places import (
    AS_IT_IS,
    IN_BOTH,
    IN_COLUMNS,
    IN_ROWS,
    OF_CONV,
    OF_HEADS,
    TRANSPOSED,
    Groups,
    Place,
    Share,
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
    "attention/out_bias": ("self_attn.o_proj.bias", AS_IT_IS),
    "mlp_norm/scale": ("post_attention_layernorm.weight", AS_IT_IS),
}
"""Weight of a layer -> tensor of a layer."""
OF_MLP: Mapping[str, tuple[str, Groups]] = {
    "mlp/gate/kernel": ("mlp.gate_proj.weight", TRANSPOSED),
    "mlp/up/kernel": ("mlp.up_proj.weight", TRANSPOSED),
    "mlp/down/kernel": ("mlp.down_proj.weight", TRANSPOSED),
}
OF_EXPERTS: Mapping[str, tuple[str, Groups]] = {
    "mlp/router": ("mlp.gate.weight", TRANSPOSED),
    "mlp/expert_gate/kernel": ("mlp.experts.{}.gate_proj.weight", TRANSPOSED),
    "mlp/expert_up/kernel": ("mlp.experts.{}.up_proj.weight", TRANSPOSED),
    "mlp/expert_down/kernel": ("mlp.experts.{}.down_proj.weight", TRANSPOSED),
    "mlp/shared/gate/kernel": ("mlp.shared_expert.gate_proj.weight", TRANSPOSED),
    "mlp/shared/up/kernel": ("mlp.shared_expert.up_proj.weight", TRANSPOSED),
    "mlp/shared/down/kernel": ("mlp.shared_expert.down_proj.weight", TRANSPOSED),
    "mlp/shared_gate/kernel": ("mlp.shared_expert_gate.weight", TRANSPOSED),
}
"""Where a name has braces, each expert has a tensor of its own."""
OF_MIXTRAL: Mapping[str, tuple[str, Groups]] = {
    "mlp/router": ("block_sparse_moe.gate.weight", TRANSPOSED),
    "mlp/expert_gate/kernel": ("block_sparse_moe.experts.{}.w1.weight", TRANSPOSED),
    "mlp/expert_up/kernel": ("block_sparse_moe.experts.{}.w3.weight", TRANSPOSED),
    "mlp/expert_down/kernel": ("block_sparse_moe.experts.{}.w2.weight", TRANSPOSED),
}
_BY_EXPERT: Groups = ((0,), (1,), (2,))
OF_GPT_OSS: Mapping[str, tuple[str, Groups]] = {
    "mlp/router": ("mlp.router.weight", TRANSPOSED),
    "mlp/router_bias": ("mlp.router.bias", AS_IT_IS),
    "mlp/expert_gate/kernel": ("mlp.experts.gate_up_proj", _BY_EXPERT),
    "mlp/expert_up/kernel": ("mlp.experts.gate_up_proj", _BY_EXPERT),
    "mlp/expert_down/kernel": ("mlp.experts.down_proj", _BY_EXPERT),
    "mlp/expert_gate_bias": ("mlp.experts.gate_up_proj_bias", IN_BOTH),
    "mlp/expert_up_bias": ("mlp.experts.gate_up_proj_bias", IN_BOTH),
    "mlp/expert_down_bias": ("mlp.experts.down_proj_bias", IN_BOTH),
}
IN_TURNS = ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias")
"""Tensors whose weights take turns in the last dimension."""
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
OF_QWEN3_NEXT: Mapping[str, tuple[str, Groups]] = {
    "attention/query/kernel": ("linear_attn.in_proj_qkvz.weight", IN_ROWS),
    "attention/key/kernel": ("linear_attn.in_proj_qkvz.weight", IN_ROWS),
    "attention/value/kernel": ("linear_attn.in_proj_qkvz.weight", IN_ROWS),
    "attention/out_gate/kernel": ("linear_attn.in_proj_qkvz.weight", IN_ROWS),
    "attention/beta/kernel": ("linear_attn.in_proj_ba.weight", TRANSPOSED),
    "attention/decay/kernel": ("linear_attn.in_proj_ba.weight", TRANSPOSED),
}
BY_KEY_HEAD = ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight")
"""Tensors whose rows are grouped by the key heads of linear attention."""
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


def tables(model: GPTConfig, family: str) -> Mapping[str, Mapping[str, tuple[str, Groups]]]:
    """Part of a model -> weight of a layer -> tensor; families (`model_type`) have other names."""
    found = {}
    for part, (mixer, feed_forward) in stack_pairs(model).items():
        of_all = {path: x for path, x in OF_LAYER.items() if not path.startswith("attention/")}
        table = dict(OF_LAYER) if mixer == "attention" else of_all | dict(OF_LINEAR)
        if mixer == "attention" and model.norms != "before":
            table |= AFTER_BLOCKS
        if mixer == "linear":
            of_family = {"qwen3_next": OF_QWEN3_NEXT, "olmo_hybrid": OF_OLMO}.get(family, {})
            # In the order of the family, which is that of the rows of a tensor.
            table = {x: y for x, y in table.items() if x not in of_family} | dict(of_family)
        own = {"mixtral": OF_MIXTRAL, "gpt_oss": OF_GPT_OSS}.get(family, OF_EXPERTS)
        found[part] = table | dict(OF_MLP if feed_forward == "mlp" else own)
    return found


def places(
    shapes: Mapping[str, tuple[int, ...]], model: GPTConfig, family: str
) -> Iterator[tuple[str, Place]]:
    """The place of every weight of a model."""
    of_parts = tables(model, family)

    def place(path: str) -> Place:
        part, _, rest = path.partition("/")
        if part not in of_parts:
            name, groups = OF_MODEL[path]
            return Place(tensors=(name,), stacked=False, shape=shapes[path], groups=groups)
        if rest not in of_parts[part]:
            raise InputError(
                f"The weights of a model must be those of its family; got {path}, which no model "
                f"of kind {family} has. Leave out flags --model.*."
            )
        name, groups = of_parts[part][rest]
        names = [
            f"model.layers.{layer}.{name}"
            for layer in layers_of(part, model.layer_mixers, model.layer_feed_forwards)
        ]
        _, *shape = shapes[path]
        experts = None
        if "{}" in name:
            experts, *shape = shape
            names = [x.format(expert) for x in names for expert in range(experts)]
        return Place(
            tensors=tuple(names),
            stacked=True,
            experts=experts,
            shape=tuple(shape),
            groups=groups,
        )

    for path in shapes:
        found = place(path)
        part, _, rest = path.partition("/")
        table = of_parts.get(part, {})
        name = table.get(rest, ("",))[0]
        others = (f"{part}/{x}" for x, (other, _) in table.items() if other == name)
        beside = [x for x in others if x in shapes]
        if beside[1:]:
            groups = model.linear.of_model(model).key_heads if name in BY_KEY_HEAD else 1
            share = Share(
                index=beside.index(path),
                sizes=tuple(place(x).tensor_shape[0] // groups for x in beside),
                groups=groups,
                columns=name in IN_TURNS,
            )
            found = replace(found, share=share)
        yield path, found


PREFIXES_OF_TEXT = {"model.language_model.": "model.", "language_model.": ""}
"""What the names of the tensors of a text model begin with, beside those of a model of images, and
with what in a folder of the text model alone. Some have the head inside, and others outside."""
IMAGES = (
    *("model.visual.", "vision_tower.", "multi_modal_projector."),
    *("model.vision_tower.", "model.multi_modal_projector."),
)
"""What the names of tensors for images begin with."""
OTHER_PARTS = (*IMAGES, "mtp.")
"""The same of all tensors that are no part of the text model: those for images, and those that
predict more than one token."""


def part_of(name: str) -> str | None:
    """The other part of a model to which a tensor belongs; None for the text model."""
    return next((part for part in OTHER_PARTS if name.startswith(part)), None)


def name_of_text(name: str) -> str:
    """The name of a tensor of a text model, as in a folder of the text model alone."""
    for prefix, alone in PREFIXES_OF_TEXT.items():
        if name.startswith(prefix):
            return alone + name.removeprefix(prefix)
    return name
