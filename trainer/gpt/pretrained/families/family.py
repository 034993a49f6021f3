"""The class of all families of models of the library transformers. Imports no jax.

A family is a `model_type`. All families here are one decoder with other options: see `GPTConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from models.config import GPTConfig
from models.parts.gpt import stack_pairs
from startrail_jax.errors import UnsupportedError
from trainer.gpt.pretrained.families.experts import ExpertLayers
from trainer.gpt.pretrained.plain import pattern
from trainer.gpt.pretrained.rope import FULL, SLIDING, OneBase, rope_length
from trainer.gpt.pretrained.values import LENGTH, ConfigValues
from trainer.weights.files import Tensors
from trainer.weights.places import (
    AS_IT_IS,
    IN_BOTH,
    IN_COLUMNS,
    IN_ROWS,
    OF_HEADS,
    TRANSPOSED,
    Groups,
)

OPTIONS = {
    **{"mlp": "swiglu", "scaled_embedding": False, "sinks": False, "qkv_bias": False},
    **{"qk_norm": False, "qk_norm_over": "head", "norms": "before", "norm_offset": False},
    **{"attention_gate": False, "out_bias": False, "value_norm": False, "layer_scalar": False},
    **{"embedding_scale": 1.0, "residual_scale": 1.0, "logit_divisor": 1.0},
}
"""Options of a model in which families differ, with the values of most families."""
SCALES = ("softcap", "output_softcap", "scale_dim")
"""Options that change no weight, which most models do not have."""
SILU = {"hidden_act": ("silu", "swish")}
WINDOWS = ("sliding_window", "layer_types")
CHOICE = (*WINDOWS, "use_sliding_window", "max_window_layers")
"""Keys that say which layers have a window."""

OF_MODEL: Mapping[str, tuple[str, Groups]] = {
    "embedding/embedding": ("model.embed_tokens.weight", IN_BOTH),
    "norm/scale": ("model.norm.weight", AS_IT_IS),
    "head/kernel": ("lm_head.weight", TRANSPOSED),
    "score/kernel": ("score.weight", TRANSPOSED),
}
"""Weight -> tensor, outside of the layers."""
OF_LAYER: Mapping[str, tuple[str, Groups]] = {
    "attention_norm/scale": ("input_layernorm.weight", AS_IT_IS),
    "mlp_norm/scale": ("post_attention_layernorm.weight", AS_IT_IS),
}
"""Weight of a layer -> tensor of a layer."""
OF_ATTENTION: Mapping[str, tuple[str, Groups]] = {
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
}
OF_MLP: Mapping[str, tuple[str, Groups]] = {
    "mlp/gate/kernel": ("mlp.gate_proj.weight", TRANSPOSED),
    "mlp/up/kernel": ("mlp.up_proj.weight", TRANSPOSED),
    "mlp/down/kernel": ("mlp.down_proj.weight", TRANSPOSED),
}
AFTER_BLOCKS: Mapping[str, tuple[str, Groups]] = {
    "attention_out_norm/scale": ("post_attention_layernorm.weight", AS_IT_IS),
    "mlp_norm/scale": ("pre_feedforward_layernorm.weight", AS_IT_IS),
    "mlp_out_norm/scale": ("post_feedforward_layernorm.weight", AS_IT_IS),
}
"""Tensors with other names in a model that normalises the outputs of attention and MLP, as in
Gemma."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Properties of the models of one `model_type`."""

    architecture: str
    """The class of transformers."""
    keys: tuple[str, ...] = ()
    """Keys of a config.json that its models have beside the keys of all families."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: SILU)
    """Keys with the few values that are supported."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The `OPTIONS` whose values differ from those of most families."""
    switches: Mapping[str, str] = field(default_factory=dict)
    """Keys of a file that switch one of the `OPTIONS` on or off, which `options` then lack."""
    windows: Literal["no", "some", "all", "all_or_none"] = "some"
    """Layers that may have a window."""
    rope: OneBase = field(default_factory=OneBase)
    """Rotary positions."""
    experts: ExpertLayers | None = None
    """Layers of experts."""
    predicting: str | None = None
    """The key of the number of layers behind the last that predict more tokens, which are left
    out."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Keys of a file -> the keys that other families have for them."""
    epsilon: str = "rms_norm_eps"
    """The key of the number that norms add to the mean square."""
    prefix: str = "model."
    """Prefix of the names of the tensors of layers."""
    of_model: Mapping[str, tuple[str, Groups]] = field(default_factory=lambda: OF_MODEL)
    """Weight -> tensor, outside of the layers."""
    sizes_needed: ClassVar[tuple[str, ...]] = ("hidden_size", "num_hidden_layers")
    """Keys of a file without which the planner takes it for no model."""
    module_of_experts: ClassVar[str] = "mlp.experts"
    """Where the matrices of all experts of a layer are in transformers from version 5 on."""
    never_adapted: ClassVar[tuple[str, ...]] = ()
    """Tensors of layers that PEFT refuses to adapt, as kernels use them without their module."""
    needs_experts: ClassVar[bool] = True
    """True if every model of a family with experts has some."""
    mixers: ClassVar[tuple[str, ...]] = ("attention",)
    feed_forwards: ClassVar[tuple[str, ...]] = ("mlp", "experts")
    layer_types: ClassVar[tuple[str, ...]] = (FULL, SLIDING)
    """Types of layers in transformers."""

    def fits(self, model: GPTConfig) -> bool:
        """True if a model in its simplest form is one of the family."""
        windows, feeds = set(model.layer_windows), model.layer_feed_forwards
        wanted = {**OPTIONS, **self.options}
        for name in self.switches.values():
            del wanted[name]
        return all(
            (
                wanted == {name: getattr(model, name) for name in wanted},
                all(getattr(model, name) is None for name in SCALES),
                len(windows - {None}) <= 1,
                windows == {None} or self.windows != "no",
                None not in windows or self.windows != "all",
                len(windows) == 1 or self.windows != "all_or_none",
                {*model.layer_mixers} <= {*self.mixers},
                {*feeds} <= {*self.feed_forwards},
                self.rope.fits(model),
                (self.experts is not None) == ("experts" in feeds) or not self.needs_experts,
                "experts" not in feeds
                or (self.experts is not None and self.experts.fits(model, self.keys)),
            )
        )

    def usual(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values of a file under the keys that other families have for them. A key stays as it is
        if the file has the other one too, with another value."""
        usual = {}
        for key, value in values.items():
            name = self.renamed.get(key, key)
            usual[name if values.get(name, value) == value else key] = value
        return usual

    def in_file(self, key: str) -> str:
        """The key of a file that other families have under this key."""
        return {usual: of_file for of_file, usual in self.renamed.items()}.get(key, key)

    def importable(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values of a file under usual keys, without those that become untrue when its tensors
        are imported."""
        written = self.usual(written)
        if self.predicting is None or written.get(self.predicting) is None:
            return written
        return {**written, self.predicting: 0}

    def check(self, written: Mapping[str, Any], name: str) -> None:
        """Raises if values of a file, whose keys are known, are not supported together."""

    def check_types(self, written: Mapping[str, Any], name: str) -> None:
        """Raises if layers have an unsupported type, or a type that the family does not have."""
        types = written.get("layer_types")
        if types is not None and (
            not isinstance(types, list) or any(x not in self.layer_types for x in types)
        ):
            raise UnsupportedError(
                f"layer_types must be {' or '.join(self.layer_types)} in {name!r}; got {types!r}. "
                "Use another model."
            )

    def model(self, values: ConfigValues) -> GPTConfig:
        """The model with the options that change its weights or windows; `forward` has the
        others."""
        read = values.values
        heads, width = (read[key] for key in ("num_attention_heads", "hidden_size"))
        layers = self.depth(values)
        head_dim, options = values.number("head_dim"), self.layers(values)
        options |= {name: bool(read[key]) for key, name in self.switches.items()}
        mlp_width: Any = read.get("intermediate_size")
        if self.experts is not None and self.has_experts(values):
            options |= self.experts.read(values, self.keys, layers)
            mlp_width = mlp_width or options["experts"].width
        return GPTConfig(
            vocab_size=read["vocab_size"],
            width=width,
            layers=layers,
            heads=heads,
            kv_heads=read["num_key_value_heads"],
            head_dim=head_dim,
            mlp_width=mlp_width,
            tied_head=read["tie_word_embeddings"],
            **self.options,
            **options,
        )

    def depth(self, values: ConfigValues) -> int:
        """The number of layers."""
        return values.number("num_hidden_layers")

    def has_experts(self, values: ConfigValues) -> bool:
        """Whether the model of a file has layers of experts."""
        del values
        return self.experts is not None

    def layers(self, values: ConfigValues) -> dict[str, Any]:
        """The options of a model in which its layers differ."""
        return {"windows": pattern(self._windows(values))}

    def _windows(self, values: ConfigValues) -> tuple[int | None, ...]:
        """The sliding window of each layer; None for a layer without one."""
        read, layers = values.values, values.values["num_hidden_layers"]
        size = read.get("sliding_window") if read.get("use_sliding_window", True) else None
        # Mistral has no types of layers.
        without_types = [FULL if self.windows == "no" or size is None else SLIDING] * layers
        types = read.get("layer_types") or without_types
        if len(types) != layers:
            raise values.wrong(
                "layer_types", f"a list of {layers} names, one for each layer", types
            )
        if SLIDING in types and size is None:
            raise UnsupportedError(
                f"Layers of type {SLIDING} need a sliding_window, and use_sliding_window where the "
                f"file has it; got sliding_window={read.get('sliding_window')}, "
                f"use_sliding_window={read.get('use_sliding_window')} in {values.name!r}. "
                "Correct the file."
            )
        return tuple(values.number("sliding_window") if x == SLIDING else None for x in types)

    def forward(
        self, values: ConfigValues, written: Mapping[str, Any], model: GPTConfig
    ) -> dict[str, Any]:
        """The options of a model that change no weight, from all values of a file with defaults,
        and from the values written in it."""
        return {"rope": self.rope.read(values, written, model)}

    def values(
        self, model: GPTConfig, model_type: str, *, length: int, dtype: str
    ) -> dict[str, Any]:
        """The values of a config.json from which `model` and `forward` make the model again."""
        layers = self.layer_values(model)
        if self.experts is not None and "experts" in model.layer_feed_forwards:
            layers |= self.experts.values(model)
        return {
            "architectures": [self.architecture],
            "model_type": model_type,
            "torch_dtype": dtype,
            "vocab_size": model.vocab_size,
            "hidden_size": model.width,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "intermediate_size": model.mlp_width,
            self.epsilon: model.norm_eps,
            "tie_word_embeddings": model.tied_head,
            LENGTH: rope_length(model.rope, length),
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **self.rope.values(model),
            **{key: value for key, value in layers.items() if key in self.keys},
            **{key: getattr(model, name) for key, name in self.switches.items()},
            **({} if self.predicting is None else {self.predicting: 0}),
            **self.activation_values(model),
        }

    def layer_values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json in which layers differ; the family uses some of them."""
        windows = model.layer_windows
        size = next((window for window in windows if window is not None), None)
        values = {
            "sliding_window": size,
            "use_sliding_window": size is not None,
            "max_window_layers": model.layers if size is None else 0,
        }
        if size is not None:
            values["layer_types"] = [FULL if window is None else SLIDING for window in windows]
        return values

    def activation_values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json for activations and scales."""
        del model
        return {"hidden_act": "silu"}

    def tables(self, model: GPTConfig) -> dict[str, Mapping[str, tuple[str, Groups]]]:
        """Stack of layers -> weight of a layer -> tensor of a layer."""
        feeds = {"mlp": OF_MLP} | (
            {} if self.experts is None else {"experts": self.experts.tensors}
        )
        return {
            stack: {**self.table(model, mixer), **feeds.get(feed_forward, {})}
            for stack, (mixer, feed_forward) in stack_pairs(model).items()
        }

    def table(self, model: GPTConfig, mixer: str) -> dict[str, tuple[str, Groups]]:
        """The tensors of a layer without its feed-forward."""
        del mixer
        return {**OF_LAYER, **OF_ATTENTION, **(AFTER_BLOCKS if model.norms != "before" else {})}

    def in_memory(self, tensor: str) -> str:
        """The name of a tensor of a layer once transformers has loaded it."""
        return tensor

    def row_groups(self, tensor: str, model: GPTConfig) -> int:
        """Number of groups of rows in a tensor of several weights; each group has rows of all of
        them."""
        del tensor, model
        return 1

    def dim_of_rows(self, tensor: str) -> int:
        """The dimension of the rows of a tensor of several weights."""
        del tensor
        return 0

    def takes_turns(self, tensor: str) -> bool:
        """True if the weights of a tensor take turns in its last dimension."""
        del tensor
        return False

    def adapt(self, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        """Tensors of a file under the names, and with the shapes, that the model needs."""
        return tensors if self.experts is None else self.experts.adapt(tensors, shapes)
