"""Gemma 4: global layers with other heads, whose keys may be values too. Imports no jax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from models.config import GPTConfig, RopeConfig
from models.parts.attention import ATTENTIONS, GlobalConfig
from startrail_jax.errors import UnsupportedError
from trainer.gpt.pretrained.families.family import SCALES, WINDOWS, Family
from trainer.gpt.pretrained.families.gemma import GELU
from trainer.gpt.pretrained.plain import pattern
from trainer.gpt.pretrained.rope import FULL, NESTED, SHARE, SLIDING, THETA, BasesByWindow
from trainer.gpt.pretrained.values import ConfigValues, require
from trainer.weights.places import AS_IT_IS, Groups

LAYERS = "per_layer_config"
"""The key of sizes in which layers differ: transformers makes it of the keys of published files."""
DIM, HEADS, SAME = "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"
CAP = "final_logit_softcapping"
PER_LAYER = "hidden_size_per_layer_input"
OTHER_LAYERS = {PER_LAYER: 256, "num_kv_shared_layers": 0, "enable_moe_block": False}
"""Keys of layers that are not supported, with the value that transformers has where a file lacks
them: embeddings of each layer, keys of another layer, and experts beside the MLP."""
PROPORTIONAL = "proportional"
SCALE_DIM = 1
"""Queries and keys are normalised, and their products are not scaled."""


@dataclass(frozen=True)
class Proportional(BasesByWindow):
    """Positions of two kinds; in layers without a window, some pairs may turn, as if all did."""

    shares: ClassVar[tuple[Any, ...] | None] = (1.0, None)

    def _check_object(self, entry: Mapping[str, Any], name: str) -> None:
        if entry.get("rope_type") != PROPORTIONAL:
            super()._check_object(entry, name)
            return
        unknown = sorted(entry.keys() - {"rope_type", THETA, SHARE, "factor"})
        if unknown:
            raise UnsupportedError(
                f"Positions of rope_type {PROPORTIONAL} must have no keys but {THETA}, {SHARE} and "
                f"factor in {name!r}; got {', '.join(unknown)}. Use another model."
            )

    def read(
        self, values: ConfigValues, written: Mapping[str, Any], model: GPTConfig
    ) -> RopeConfig:
        """The positions of a model, from all values of a file with defaults, and from the values
        written in it."""
        objects = _positions(values)
        if objects[FULL]["rope_type"] == PROPORTIONAL:
            # Which pairs turn is an option of global layers.
            factor = ConfigValues({"factor": 1.0, **objects[FULL]}, values.name).real("factor")
            kind = {"rope_type": "linear", "factor": factor}
            objects[FULL] = {THETA: objects[FULL][THETA], **kind}
        values = ConfigValues({**values.values, NESTED: objects}, values.name)
        return super().read(values, written, model)

    def values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json."""
        own: Any = model.global_attention.of_model(model)
        # Layers with a window are never stretched, and "ntk" stretches by the channels of a head.
        objects = super().values(replace(model, head_dim=own.head_dim))[NESTED]
        if own.rotary_pairs is not None:
            share = 2 * own.rotary_pairs / own.head_dim
            while int(share * own.head_dim // 2) < own.rotary_pairs:  # As transformers rounds.
                share = math.nextafter(share, 2)
            objects[FULL] |= {"rope_type": PROPORTIONAL, SHARE: share}
        return {NESTED: objects}


def _positions(values: ConfigValues) -> dict[str, Any]:
    """The objects of positions of both types of layers."""
    objects = values.values[NESTED]
    found = isinstance(objects, dict) and all(
        isinstance(objects.get(kind), dict) and objects[kind].get("rope_type")
        for kind in (FULL, SLIDING)
    )
    if not found:
        needed = f"an object with {FULL} and {SLIDING}, each with a rope_type"
        raise values.wrong(NESTED, needed, objects)
    return dict(objects)


@dataclass(frozen=True, kw_only=True)
class Gemma4(Family):
    """A dense Gemma 4 without embeddings of each layer."""

    mixers: ClassVar[tuple[str, ...]] = ATTENTIONS

    def fits(self, model: GPTConfig) -> bool:
        """True if a model in its simplest form is one of the family."""
        own = model.global_attention.of_model(model)
        stretched = model.rope.scaling
        pairs = set(zip(model.layer_mixers, model.layer_windows, strict=True))
        return all(
            (
                # The last layer of transformers has no window, and some other one has.
                model.layer_windows[-1] is None,
                len(pairs) == 2 and len({window for _, window in pairs}) == 2,
                own.values_from_keys or own.kv_heads == model.kv_heads,
                own.rotary_pairs is None or stretched in ("none", "ntk", "linear"),
                model.scale_dim == SCALE_DIM and model.softcap is None,
                super().fits(replace(model, **dict.fromkeys(SCALES))),
            )
        )

    def check_types(self, written: Mapping[str, Any], name: str) -> None:
        """Raises if layers have an unsupported type, or weights that no model here has."""
        super().check_types(written, name)
        for key, missing in OTHER_LAYERS.items():
            require(key, written.get(key, missing), self.only[key], name)

    def layers(self, values: ConfigValues) -> dict[str, Any]:
        """The options of a model in which its layers differ."""
        windows = self._windows(values)
        if set(windows) == {None}:
            raise UnsupportedError(
                f"One layer or more must be of type {SLIDING} in {values.name!r}; got "
                f"layer_types={values.values['layer_types']}. Use another model."
            )
        mixers = ["attention" if window else "global_attention" for window in windows]
        return {
            "windows": pattern(windows),
            "mixers": pattern(mixers),
            "global_attention": self._global(values, windows),
        }

    def _global(self, values: ConfigValues, windows: tuple[int | None, ...]) -> GlobalConfig:
        """The options of the global layers, from the sizes of all layers."""
        sizes = {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}
        every = {int(layer): own for layer, own in (values.values.get(LAYERS) or {}).items()}
        of_global = {layer: every.pop(layer, {}) for layer, x in enumerate(windows) if x is None}
        first, *others = of_global.values()
        if any(every.values()) or any(x != first for x in others) or not first.keys() <= {*sizes}:
            raise UnsupportedError(
                f"{LAYERS} must give head_dim and num_key_value_heads, to all layers of type {FULL}"
                f" alike and to no others, in {values.name!r}; got {values.values[LAYERS]}. Use "
                "another model."
            )
        found = ConfigValues(first, values.name)
        own = {name: found.number(key) for key, name in sizes.items() if key in first}
        head_dim: int = own.get("head_dim") or values.number("head_dim")
        entry, pairs = _positions(values)[FULL], None
        if entry.get("rope_type") == PROPORTIONAL:
            share = ConfigValues({SHARE: 1.0, **entry}, values.name).real(SHARE)
            pairs = int(share * head_dim // 2)
            if not 1 <= pairs <= head_dim // 2:
                needed = "at most 1, and enough for one pair of channels to turn"
                raise values.wrong(SHARE, needed, share)
        return GlobalConfig(**own, rotary_pairs=pairs, values_from_keys=bool(values.values[SAME]))

    def forward(
        self, values: ConfigValues, written: Mapping[str, Any], model: GPTConfig
    ) -> dict[str, Any]:
        """The options of a model that change no weight, from all values of a file with defaults,
        and from the values written in it."""
        same = {"scale_dim": SCALE_DIM, "output_softcap": values.values[CAP]}
        return super().forward(values, written, model) | same

    def layer_values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json in which layers differ."""
        own = model.global_attention.of_model(model)
        return super().layer_values(model) | {
            DIM: own.head_dim,
            HEADS: own.kv_heads if own.values_from_keys else None,
            SAME: own.values_from_keys,
        }

    def activation_values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json for activations and scales."""
        return {"hidden_activation": GELU, CAP: model.output_softcap, PER_LAYER: 0}

    def table(self, model: GPTConfig, mixer: str) -> dict[str, tuple[str, Groups]]:
        """The tensors of a layer without its feed-forward."""
        return super().table(model, mixer) | {"layer_scalar": ("layer_scalar", AS_IT_IS)}


GEMMA4 = Gemma4(
    architecture="Gemma4ForCausalLM",
    keys=(
        *(*WINDOWS, CAP, DIM, HEADS, SAME, LAYERS),
        # Without layers that share keys, layers of experts and embeddings of each layer, idle.
        *("use_double_wide_mlp", "num_experts", "top_k_experts", "moe_intermediate_size"),
        "vocab_size_per_layer_input",
    ),
    only={
        "hidden_activation": (GELU,),
        # Text alone is causal with "vision" too.
        "use_bidirectional_attention": (None, "vision"),
        PER_LAYER: (0,),
        "num_kv_shared_layers": (0,),
        "enable_moe_block": (False,),
    },
    options={
        **{"mlp": "geglu", "scaled_embedding": True, "norms": "both", "qk_norm": True},
        **{"value_norm": True, "layer_scalar": True},
    },
    rope=Proportional(),
)
