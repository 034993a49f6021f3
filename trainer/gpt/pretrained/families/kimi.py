"""Kimi Linear: Kimi Delta Attention, latent attention without positions, and the experts of
DeepSeek V3. Imports no jax.

Published files have lists of layers in an object `linear_attn_config`, and other names for some
keys; transformers writes lists of types instead. Exports are like published files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from models.config import GPTConfig
from models.parts.experts import ExpertsConfig
from models.parts.kda import KDAConfig
from trainer.gpt.pretrained.families.deepseek import OF_LATENT, QUERY_RANK, Latents
from trainer.gpt.pretrained.families.experts import (
    COUNTS,
    LOSSES,
    NORMALISED_SHARES,
    SIZES,
    replaced,
)
from trainer.gpt.pretrained.families.family import OF_LAYER, SILU
from trainer.gpt.pretrained.families.glm import (
    DENSE_FIRST,
    GROUPS,
    OF_ROUTER,
    PREDICTING,
    SCALE,
    SHARED,
    GroupedExperts,
)
from trainer.gpt.pretrained.families.hybrid import LINEAR
from trainer.gpt.pretrained.families.mixtral import OF_MIXTRAL
from trainer.gpt.pretrained.families.nemotron import NoPositions
from trainer.gpt.pretrained.plain import pattern
from trainer.gpt.pretrained.rope import FULL, ROPE
from trainer.gpt.pretrained.values import LENGTH, ConfigValues
from trainer.weights.files import Tensors
from trainer.weights.places import (
    AS_IT_IS,
    IN_COLUMNS,
    IN_ROWS,
    OF_CONV,
    OF_HEADS,
    TRANSPOSED,
    Groups,
)

NESTED, TYPES, FEEDS = "linear_attn_config", "layer_types", "mlp_layer_types"
MIXERS = {FULL: "latent", LINEAR: "kda"}
OF_TYPE = {FULL: "full_attn_layers", LINEAR: "kda_layers"}
"""Types of layers -> keys of their lists in `linear_attn_config`, which count from 1."""
OF_KDA = {
    "linear_num_heads": ("num_heads", "heads"),
    "linear_head_dim": ("head_dim", "head_dim"),
    "linear_conv_kernel_dim": ("short_conv_kernel_size", "conv"),
}
"""Keys of sizes -> keys in `linear_attn_config`, and settings of `KDAConfig`."""
DENSE_OR_NOT = {"dense": "mlp", "sparse": "experts"}
RENAMED = {
    "model_max_length": LENGTH,
    "moe_renormalize": NORMALISED_SHARES,
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": SHARED,
}
TENSORS: Mapping[str, tuple[str, Groups]] = {
    "attention/query/kernel": ("self_attn.q_proj.weight", IN_ROWS),
    "attention/key/kernel": ("self_attn.k_proj.weight", IN_ROWS),
    "attention/value/kernel": ("self_attn.v_proj.weight", IN_ROWS),
    "attention/out_gate_down/kernel": ("self_attn.g_a_proj.weight", TRANSPOSED),
    "attention/out_gate/kernel": ("self_attn.g_b_proj.weight", IN_ROWS),
    "attention/decay_down/kernel": ("self_attn.f_a_proj.weight", TRANSPOSED),
    "attention/decay/kernel": ("self_attn.f_b_proj.weight", IN_ROWS),
    "attention/beta/kernel": ("self_attn.b_proj.weight", TRANSPOSED),
    "attention/query_conv": ("self_attn.q_conv1d.weight", OF_CONV),
    "attention/key_conv": ("self_attn.k_conv1d.weight", OF_CONV),
    "attention/value_conv": ("self_attn.v_conv1d.weight", OF_CONV),
    "attention/decay_rate": ("self_attn.A_log", ((), (), (0,), ())),
    "attention/decay_bias": ("self_attn.dt_bias", OF_HEADS),
    "attention/out_norm/scale": ("self_attn.o_norm.weight", AS_IT_IS),
    "attention/out/kernel": ("self_attn.o_proj.weight", IN_COLUMNS),
}
"""Weight of a layer of Kimi Delta Attention -> tensor."""
OF_EXPERTS: Mapping[str, tuple[str, Groups]] = {
    **{
        path: (name.replace("mlp.", "block_sparse_moe."), groups)
        for path, (name, groups) in OF_ROUTER.items()
    },
    **OF_MIXTRAL,
}
"""Weight of a layer of experts -> tensor."""


@dataclass(frozen=True, kw_only=True)
class ListedExperts(GroupedExperts):
    """The experts of DeepSeek V3, in the layers that a list names."""

    def fits_dense(self, feeds: tuple[str, ...], keys: tuple[str, ...]) -> bool:
        """True: layers without experts may be any."""
        del feeds, keys
        return True

    def feeds(self, values: ConfigValues, layers: int) -> list[str]:
        """The feed-forward of each layer."""
        kinds: Any = values.values[FEEDS]
        if len(kinds) != layers or any(x not in DENSE_OR_NOT for x in kinds):
            needed = f"a list of {layers} names, {' or '.join(DENSE_OR_NOT)}, one for each layer"
            raise values.wrong(FEEDS, needed, kinds)
        if "sparse" not in kinds:
            raise values.wrong(FEEDS, "such that a layer has experts", kinds)
        return [DENSE_OR_NOT[x] for x in kinds]

    def values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json for experts; a family uses some of them."""
        values, feeds = super().values(model), model.layer_feed_forwards
        if "mlp" in feeds[feeds.index("experts") :]:
            kinds = {feed: kind for kind, feed in DENSE_OR_NOT.items()}
            values[FEEDS] = [kinds[x] for x in feeds]
        return values


@dataclass(frozen=True, kw_only=True)
class KimiLinear(Latents):
    """A Kimi Linear."""

    mixers: ClassVar[tuple[str, ...]] = tuple(MIXERS.values())
    layer_types: ClassVar[tuple[str, ...]] = tuple(MIXERS)

    def fits(self, model: GPTConfig) -> bool:
        """True if a model in its simplest form is one of the family."""
        own = model.kda
        return own.norm_eps is None and own.rank is None and super().fits(model)

    def importable(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values of a file under usual keys, without those that become untrue when its tensors
        are imported, and without positions, of which transformers takes no notice."""
        usual = super().importable(written)
        return {key: value for key, value in usual.items() if key not in ROPE}

    def check(self, written: Mapping[str, Any], name: str) -> None:
        """Raises if values of a file, whose keys are known, are not supported together."""
        nested, values = written.get(NESTED), ConfigValues(written, name)
        if nested is None:
            return
        keys = (*OF_TYPE.values(), *(x for x, _ in OF_KDA.values()))
        if not isinstance(nested, dict) or not {*nested} <= {*keys}:
            raise values.wrong(NESTED, f"an object with no keys but {', '.join(keys)}", nested)
        lists = [nested.get(x) for x in OF_TYPE.values()]
        layers = values.number("num_hidden_layers", default=27)
        if written.get(TYPES) is None and not _divide(lists, layers):
            both = " and ".join(OF_TYPE.values())
            needed = f"an object whose {both} name each layer from 1 to {layers} once"
            raise values.wrong(NESTED, needed, nested)

    def layers(self, values: ConfigValues) -> dict[str, Any]:
        """The options of a model in which its layers differ."""
        types, layers = values.values[TYPES], values.number("num_hidden_layers")
        if len(types) != layers or FULL not in types:
            needed = f"a list of {layers} names, one for each layer, among them {FULL}"
            raise values.wrong(TYPES, needed, types)
        found = super().layers(values) | {"mixers": pattern([MIXERS[x] for x in types])}
        if LINEAR not in types:
            return found
        sizes: Any = {name: values.number(key) for key, (_, name) in OF_KDA.items()}
        return found | {"kda": KDAConfig(**sizes)}

    def layer_values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json in which layers differ; the family uses some of them."""
        own, mixers = model.kda.of_model(model), [*enumerate(model.layer_mixers, 1)]
        nested = {key: getattr(own, name) for key, name in OF_KDA.values()} | {
            OF_TYPE[kind]: [i for i, x in mixers if x == mixer] for kind, mixer in MIXERS.items()
        }
        return super().layer_values(model) | {NESTED: nested}

    def values(
        self, model: GPTConfig, model_type: str, *, length: int, dtype: str
    ) -> dict[str, Any]:
        """The values of a config.json from which `model` and `forward` make the model again."""
        values = super().values(model, model_type, length=length, dtype=dtype)
        values |= {"mla_use_nope": True, "moe_router_activation_func": "sigmoid"}
        values |= {"use_grouped_topk": True, "moe_layer_freq": 1}
        return {self.in_file(key): value for key, value in values.items()}

    def table(self, model: GPTConfig, mixer: str) -> dict[str, tuple[str, Groups]]:
        """The tensors of a layer without its feed-forward."""
        return super().table(model, mixer) if mixer == "latent" else {**OF_LAYER, **TENSORS}

    def in_memory(self, tensor: str) -> str:
        """The name of a tensor of a layer once transformers has loaded it."""
        tensor = tensor.replace("self_attn.f_", "self_attn.forget_gate.f_")
        return tensor.replace("block_sparse_moe.", "mlp.")

    def adapt(self, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        """The tensors under the names that a model of this program needs. transformers writes those
        of dense layers as if they were experts; published files do not."""
        written = {name: name.replace(".mlp.", ".block_sparse_moe.") for name in shapes}
        dense = {name: x for name, x in written.items() if name != x and x in tensors.shapes}
        return replaced(
            tensors,
            {name: tensors.shapes[x] for name, x in dense.items()},
            {name: (tensors.slices[x], tensors.dtypes[x]) for name, x in dense.items()},
            {*dense.values()},
        )


def _divide(lists: Sequence[Any], layers: int) -> bool:
    """True if lists together have each number from 1 to `layers` once."""
    if not all(isinstance(x, list) and all(type(i) is int for i in x) for x in lists):
        return False
    return sorted(i for x in lists for i in x) == [*range(1, layers + 1)]


KIMI_LINEAR = KimiLinear(
    architecture="KimiLinearForCausalLM",
    keys=(
        *(COUNTS[0], *SIZES, *GROUPS, NORMALISED_SHARES, SCALE, SHARED, DENSE_FIRST, FEEDS),
        *(*OF_LATENT, QUERY_RANK, NESTED, TYPES, *OF_KDA, PREDICTING, "qk_head_dim"),
    ),
    renamed=RENAMED,
    predicting=PREDICTING,
    # Values that transformers does not read must be those of its code.
    only=SILU
    | {LOSSES[1]: (False,), "attention_bias": (False,), "mla_use_nope": (True,)}
    | {"moe_router_activation_func": ("sigmoid",), "moe_layer_freq": (1,)}
    | {"use_grouped_topk": (True,)},
    windows="no",
    rope=NoPositions(),
    experts=ListedExperts(
        config=ExpertsConfig(scores="sigmoid", choice_bias=True, shared_width=1),
        sizes=SIZES | GROUPS,
        count=COUNTS[0],
        tensors=OF_EXPERTS,
    ),
)
