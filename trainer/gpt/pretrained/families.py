"""Families of models of the library transformers, and the config.json of a model. Imports no jax.

A family is a `model_type`. All families here are one decoder with other options: see `GPTConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from models.config import ExpertsConfig, GPTConfig, LinearConfig, RopeConfig
from startrail_jax.errors import UnsupportedError
from startrail_jax.patterns import shortest

GELU = "gelu_pytorch_tanh"
OPTIONS = {
    **{"mlp": "swiglu", "scaled_embedding": False, "sinks": False, "qkv_bias": False},
    **{"qk_norm": False, "qk_norm_over": "head", "norms": "before", "norm_offset": False},
    **{"attention_gate": False, "out_bias": False},
}
"""Options of a model by which families differ, as most have them."""
NORMALISED = {"qk_norm": True}
GEMMA = {"mlp": "geglu", "scaled_embedding": True, "norms": "both", "norm_offset": True}
OLMO = {"qk_norm": True, "qk_norm_over": "heads", "norms": "after"}
CAPPED = ("softcap", "output_softcap", "scale_dim")
"""Options that only a Gemma has."""
FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR = "linear_attention"
"""Types of layers in transformers: without a window, with one, and of linear attention."""
MULTIMODAL = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
}
"""`model_type` of models of images and text -> the family of their text models."""
PARTS = {"qwen3_vl": "qwen3_vl_text"}
"""`model_type` of models of images and text -> that of their `text_config`, if it is no family."""
SILU = {"hidden_act": ("silu", "swish")}
OF_GEMMA = {"hidden_activation": (GELU,), "use_bidirectional_attention": (None, False)}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What differs between the models of one `model_type` and those of another."""

    architecture: str
    """The class of transformers."""
    keys: tuple[str, ...]
    """Keys of a config.json that its models have beside those of all families."""
    only: Mapping[str, tuple[Any, ...]]
    """Keys of which a few values are supported."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The `OPTIONS` that are not as most have them."""
    windows: Literal["no", "some", "all", "all_or_none"] = "some"
    """Which layers may have a window."""
    without_rope: Literal["no", "some", "all"] = "no"
    """Which layers may have no rotary positions."""
    gemma: bool = False
    """Whether it may have soft caps, and another scale of attention."""
    local_rope: bool = False
    """Whether layers with a window have rotary positions of their own."""
    linear: LinearConfig | None = None
    """What its layers of linear attention have beside their sizes; None for none."""
    turns_some: bool = False
    """Whether some channels of a head may not turn."""
    experts: ExpertsConfig | None = None
    """What its layers of experts have beside their sizes; None for none."""
    expert_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of experts -> settings of `ExpertsConfig`."""
    truncates: bool = True
    """Whether YaRN always begins and ends its blend at whole pairs of channels."""


OF_LINEAR = {
    "linear_num_value_heads": "heads",
    "linear_num_key_heads": "key_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "conv",
}
"""Keys of linear attention -> settings of `LinearConfig`."""
COUNTS = ("num_experts", "num_local_experts")
"""Names of the number of experts, of which a file has either."""
OF_EXPERTS = {"num_experts_per_tok": "top_k", "moe_intermediate_size": "width"}
OF_SHARED = OF_EXPERTS | {"shared_expert_intermediate_size": "shared_width"}
OF_MIXTRAL = {"num_experts_per_tok": "top_k", "intermediate_size": "width"}
"""Keys of experts -> settings of `ExpertsConfig`."""
BALANCE, NORMALISED_SHARES = "router_aux_loss_coef", "norm_topk_prob"
DENSE = ("mlp_only_layers", "decoder_sparse_step")
"""Keys that say which layers have no experts."""
LOSSES = (BALANCE, "output_router_logits")
"""Keys of the balancing loss, which transformers adds if the second one is set."""
NEGATIVE = "linear_allow_neg_eigval"
"""Whether the states of an Olmo Hybrid may change their sign: beta is then at most 2, else 1."""
LAYERS = ("sliding_window", "layer_types")
CHOICE = (*LAYERS, "use_sliding_window", "max_window_layers")
LOCAL_BASE = "rope_local_base_freq"
CAPS = ("query_pre_attn_scalar", "final_logit_softcapping")
OF_HYBRID = ("layer_types", "full_attention_interval", "partial_rotary_factor", *OF_LINEAR)
PREDICTING = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
"""Keys of how heads that predict more tokens are made, and of the type of states elsewhere."""
QWEN3_5 = Family(
    architecture="Qwen3_5ForCausalLM",
    keys=(*OF_HYBRID, *PREDICTING),
    only=SILU
    | {
        "attn_output_gate": (True, None),
        "output_gate_type": ("swish", "silu", None),
        "mlp_only_layers": ([], None),
    },
    options=NORMALISED | {"attention_gate": True, "norm_offset": True},
    windows="no",
    linear=LinearConfig(),
    turns_some=True,
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    keys=(*QWEN3_5.keys, *COUNTS, *OF_SHARED, *LOSSES),
    experts=ExpertsConfig(shared_width=1, shared_gate=True),
    expert_keys=OF_SHARED,
)
FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM", keys=LAYERS, only=SILU, windows="no"),
    "mistral": Family(
        architecture="MistralForCausalLM", keys=("sliding_window",), only=SILU, windows="all"
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM", keys=CHOICE, only=SILU, options={"qkv_bias": True}
    ),
    "qwen3": Family(architecture="Qwen3ForCausalLM", keys=CHOICE, only=SILU, options=NORMALISED),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        # Published files have `max_window_layers`, which transformers reads for Qwen only.
        keys=(*CHOICE, "no_rope_layers", "no_rope_layer_interval"),
        only=SILU,
        without_rope="some",
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        # Published files have `sliding_window_size` and `hidden_act`, which nobody reads.
        keys=(*LAYERS, *CAPS, "attn_logit_softcapping", "sliding_window_size", "hidden_act"),
        only=OF_GEMMA | {"sliding_window_pattern": (2,)},
        options=GEMMA,
        gemma=True,
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        keys=(*LAYERS, *CAPS, "sliding_window_pattern", LOCAL_BASE, "hidden_act"),
        # transformers has the cap of attention, and caps nothing.
        only=OF_GEMMA | {"attn_logit_softcapping": (None,)},
        options=GEMMA | NORMALISED,
        gemma=True,
        local_rope=True,
    ),
    "qwen3_5_text": QWEN3_5,
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        keys=("sliding_window", *COUNTS, *OF_MIXTRAL, *LOSSES),
        only=SILU | {"router_jitter_noise": (0.0,)},
        windows="all_or_none",
        experts=ExpertsConfig(),
        expert_keys=OF_MIXTRAL,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        # Published files have `max_window_layers`, which transformers does not read here.
        keys=(
            *("sliding_window", "use_sliding_window", "max_window_layers", *COUNTS, *OF_EXPERTS),
            *(NORMALISED_SHARES, *DENSE, *LOSSES),
        ),
        only=SILU,
        options=NORMALISED,
        windows="all_or_none",
        experts=ExpertsConfig(),
        expert_keys=OF_EXPERTS,
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        # Published files have the last two, which nobody reads.
        keys=(
            *(*LAYERS, *COUNTS, *OF_MIXTRAL, *LOSSES),
            *("experts_per_token", "initial_context_length"),
        ),
        only=SILU | {"swiglu_limit": (7.0,), "swiglu_alpha": (1.702,), "attention_bias": (True,)},
        options={"qkv_bias": True, "out_bias": True, "sinks": True},
        experts=ExpertsConfig(activation="clamped", biases=True),
        expert_keys=OF_MIXTRAL,
        truncates=False,
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        keys=(*COUNTS, *OF_MIXTRAL, NORMALISED_SHARES, *LOSSES),
        only=SILU | {"clip_qkv": (None,)},
        options=NORMALISED | {"qk_norm_over": "heads"},
        windows="no",
        experts=ExpertsConfig(),
        expert_keys=OF_MIXTRAL,
    ),
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen3_next": replace(
        QWEN3_5_MOE,
        architecture="Qwen3NextForCausalLM",
        keys=(*OF_HYBRID, *COUNTS, *OF_SHARED, NORMALISED_SHARES, *DENSE, *LOSSES),
        only=SILU,
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM", keys=(), only=SILU, options=OLMO, windows="no"
    ),
    "olmo3": Family(
        architecture="Olmo3ForCausalLM", keys=LAYERS, only=SILU, options=OLMO, local_rope=True
    ),
    "olmo_hybrid": Family(
        architecture="OlmoHybridForCausalLM",
        # Beside the layers, how their weights begin.
        keys=(
            *("layer_types", *OF_LINEAR, NEGATIVE, "linear_a_log_min", "linear_a_log_max"),
            *("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
        ),
        only=SILU,
        options=OLMO,
        windows="no",
        without_rope="all",
        linear=LinearConfig(norms="before", norm_eps=1e-5, largest_beta=2.0),
    ),
}
"""The families by `model_type`."""


def family_of(model: GPTConfig) -> str:
    """The `model_type` of which a model is."""
    kind = next((kind for kind, family in FAMILIES.items() if _fits(model, family)), None)
    if kind is None:
        given = {name: getattr(model, name) for name in (*OPTIONS, *CAPPED, "windows", "mixers")}
        raise UnsupportedError(
            f"A model that is exported must be one of {', '.join(FAMILIES)}; got "
            f"{', '.join(f'{name}={value!r}' for name, value in given.items())}, "
            f"rope.bases={model.rope.bases}, rope.channels={model.rope.channels}, "
            f"rope.scaling={model.rope.scaling!r}, rope.stretches={model.rope.stretches!r}, which "
            "none of them has together. Train one of theirs."
        )
    return kind


def _fits(model: GPTConfig, family: Family) -> bool:
    """Whether a model is one of a family."""
    model = plain(model)
    windows = set(model.layer_windows)
    without_rope = {base is None for base in model.layer_bases}
    return all(
        (
            {**OPTIONS, **family.options} == {name: getattr(model, name) for name in OPTIONS},
            family.gemma or all(getattr(model, name) is None for name in CAPPED),
            family.turns_some or model.rope.channels is None,
            len(windows - {None}) <= 1,
            windows == {None} or family.windows != "no",
            None not in windows or family.windows != "all",
            len(windows) == 1 or family.windows != "all_or_none",
            model.rope.truncate or not family.truncates,
            (_bases_by_window if family.local_rope else _one_base)(model),
            True not in without_rope or family.without_rope != "no",
            len(without_rope) == 1 or family.without_rope == "some",
            {*model.layer_mixers} <= {"attention", *(["linear"] if family.linear else [])},
            _fits_linear(model, family),
            _fits_experts(model, family),
        )
    )


def _fits_linear(model: GPTConfig, family: Family) -> bool:
    """Whether the layers of linear attention of a model, if it has some, are those of a family."""
    given, wanted = model.linear, family.linear
    if "linear" not in model.layer_mixers:
        # Of those, only an Olmo Hybrid must have such layers.
        return wanted is None or wanted.norms is None
    return wanted is not None and (
        given.largest_beta in (1.0, wanted.largest_beta)
        and (given.norm_eps or model.norm_eps) == (wanted.norm_eps or model.norm_eps)
        and (given.norms or model.norms) == (wanted.norms or model.norms)
    )


def _fits_experts(model: GPTConfig, family: Family) -> bool:
    """Whether the layers of experts of a model, if it has some, are those of a family."""
    given, wanted = model.experts, family.experts
    if wanted is None or "experts" not in model.layer_feed_forwards:
        return wanted is None and "experts" not in model.layer_feed_forwards
    same = ("activation", "biases", "shared_gate", "scores")
    return (
        all(getattr(given, name) == getattr(wanted, name) for name in same)
        and not given.balance_rate
        and (given.shared_width > 0) == ("shared_width" in family.expert_keys.values())
        and (given.normalised or NORMALISED_SHARES in family.keys)
        and ("mlp" not in model.layer_feed_forwards or DENSE[0] in family.keys)
    )


def rotary_values(model: GPTConfig) -> dict[str, Any]:
    """The values of a config.json that say what the rotary positions of a model are."""
    family = FAMILIES[family_of(model)]
    if family.linear is not None:
        values = _rope_values(model)
        scaling: dict[str, Any] = values["rope_scaling"] or {"rope_type": "default"}
        if family.turns_some:
            channels = model.rope.channels or model.head_dim
            scaling["partial_rotary_factor"] = channels / model.head_dim
        theta = None if plain(model).rope.bases == ("none",) else values["rope_theta"]
        return {"rope_parameters": {"rope_theta": theta, **scaling}}
    return _local_rope_values(model, family) if family.local_rope else _rope_values(model)


def to_values(model: GPTConfig, *, length: int, dtype: str) -> dict[str, Any]:
    """The values of a config.json: `describe` gives the model again."""
    kind = family_of(model)
    family = FAMILIES[kind]
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": kind,
        "torch_dtype": dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.mlp_width,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_head,
        "max_position_embeddings": rope_length(model.rope, length),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **rotary_values(model),
        **_layer_values(model, family),
    }
    if not family.gemma:
        return values | {"hidden_act": "silu"}
    return values | {
        "hidden_activation": GELU,
        "query_pre_attn_scalar": model.scale_dim or model.head_dim,
        "attn_logit_softcapping": model.softcap,
        "final_logit_softcapping": model.output_softcap,
    }


def rope_length(rope: RopeConfig, length: int) -> int:
    """Tokens of the sequences that stretched positions are for, of which transformers computes."""
    if rope.original_length is None:
        return length
    return max(length, round(rope.factor * rope.original_length))


def paper_factor(factor: float) -> float:
    """The factor of queries and keys in the paper on YaRN."""
    return 0.1 * math.log(factor) + 1


def _rope_values(model: GPTConfig) -> dict[str, Any]:
    """The rotary positions, under the names that all versions of transformers read."""
    rope = model.rope
    bases = model.of_attention(model.layer_bases)
    base = next((x for x in bases if x is not None), 10_000.0)
    if rope.scaling == "ntk":  # It is nothing but a larger base: see `models.rope`.
        half = (rope.channels or model.head_dim) // 2
        base *= rope.factor ** (half / max(half - 1, 1))
    if rope.scaling in ("none", "ntk"):
        return {"rope_theta": base, "rope_scaling": None}
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.original_length is not None:
        scaling["original_max_position_embeddings"] = rope.original_length
    if rope.scaling == "llama3":
        most, least = rope.turns or (4.0, 1.0)
        scaling |= {"high_freq_factor": most, "low_freq_factor": least}
    if rope.scaling == "yarn":
        most, least = rope.turns or (32.0, 1.0)
        scaling |= {"beta_fast": most, "beta_slow": least}
        # Versions of transformers differ in what they make of a factor that is left out.
        factor = rope.attention_factor
        scaling["attention_factor"] = paper_factor(rope.factor) if factor is None else factor
        scaling |= {} if rope.truncate else {"truncate": False}
    return {"rope_theta": base, "rope_scaling": scaling}


def _local_rope_values(model: GPTConfig, family: Family) -> dict[str, Any]:
    """`_rope_values` where layers with a window have positions of their own."""
    pairs = dict(zip(model.layer_windows, model.layer_bases, strict=True))
    local = next((base for window, base in pairs.items() if window is not None), None)
    base = pairs.get(None, model.layer_bases[0])
    of_global = replace(model.rope, bases=(base,), stretches="all")
    values = _rope_values(replace(model, rope=of_global, windows=("none",)))
    if local is None:
        return values
    if LOCAL_BASE in family.keys:
        return values | {LOCAL_BASE: local}
    scaling = values["rope_scaling"] or {"rope_type": "default"}
    ropes = {FULL: {**scaling, "rope_theta": base}}
    ropes[SLIDING] = {"rope_type": "default", "rope_theta": local}
    return {"rope_parameters": ropes}


def _layer_values(model: GPTConfig, family: Family) -> dict[str, Any]:
    """What config.json says of windows and of layers without rotary positions."""
    size = next((window for window in model.layer_windows if window is not None), None)
    kinds = [FULL if window is None else SLIDING for window in model.layer_windows]
    found = {
        "sliding_window": size,
        "use_sliding_window": size is not None,
        "max_window_layers": model.layers if size is None else 0,
        "no_rope_layers": [int(base is not None) for base in model.layer_bases],
    }
    if family.gemma or size is not None:
        found["layer_types"] = kinds
    if family.linear is not None:
        found[NEGATIVE] = model.linear.largest_beta == 2
        found["layer_types"] = [FULL if x == "attention" else LINEAR for x in model.layer_mixers]
        found |= {
            key: getattr(model.linear.of_model(model), name) for key, name in OF_LINEAR.items()
        }
    if family.experts is not None:
        experts = model.experts
        local = family.architecture.startswith(("Mixtral", "GptOss"))
        found |= {
            key: getattr(model.experts.of_model(model), name)
            for key, name in family.expert_keys.items()
        }
        found |= {COUNTS[local]: experts.count, NORMALISED_SHARES: experts.normalised}
        dense = [i for i, x in enumerate(model.layer_feed_forwards) if x == "mlp"]
        found |= dict(zip(DENSE, (dense, 1), strict=True))
        factor = experts.balance_loss
        if experts.balance_over == "layer":  # Added up; there, the mean over layers counts.
            factor *= model.layer_feed_forwards.count("experts")
        found |= dict(zip(LOSSES, (factor, factor > 0), strict=True))
    return {key: value for key, value in found.items() if key in family.keys}


def plain(model: GPTConfig) -> GPTConfig:
    """The same model, said in the simplest way: two models are equal if these are."""
    if model.scale_dim == model.head_dim:
        model = replace(model, scale_dim=None)
    stretches = model.rope.stretches if _stretches_some(model) else "all"
    channels = None if model.rope.channels == model.head_dim else model.rope.channels
    rope = replace(model.rope, stretches=stretches, channels=channels)
    feed_forwards = pattern(model.layer_feed_forwards)
    model = replace(model, mixers=pattern(model.layer_mixers), feed_forwards=feed_forwards)
    if "experts" in feed_forwards:
        width = model.experts.of_model(model).width
        # Without dense layers, there is no MLP.
        mlp_width = model.mlp_width if "mlp" in feed_forwards else width
        model = replace(model, experts=replace(model.experts, width=width), mlp_width=mlp_width)
    if "linear" in model.mixers:
        linear = model.linear.of_model(model)
        norm_eps = None if linear.norm_eps == model.norm_eps else linear.norm_eps
        norms = None if linear.norms == model.norms else linear.norms
        model = replace(model, linear=replace(linear, norm_eps=norm_eps, norms=norms))
    rope = replace(rope, bases=pattern(_like_attention(model, model.layer_bases)))
    return replace(model, rope=rope, windows=pattern(_like_attention(model, model.layer_windows)))


def _like_attention(model: GPTConfig, layers: Sequence[Any]) -> tuple[Any, ...]:
    """What each layer has, where those of linear attention have what the first other one has."""
    pairs = tuple(zip(model.layer_mixers, layers, strict=True))
    first = next(entry for mixer, entry in pairs if mixer == "attention")
    return tuple(entry if mixer == "attention" else first for mixer, entry in pairs)


def pattern(layers: Sequence[Any]) -> tuple[Any, ...]:
    """The shortest list that says what each layer has, by `none` where that is None."""
    return tuple("none" if x is None else x for x in shortest(layers))


def without_rope(model: GPTConfig) -> tuple[GPTConfig, tuple[bool, ...]]:
    """The model without what config.json has in another form, or not at all."""
    same = replace(without_losses(model), rope=RopeConfig(), dtype="float32")
    return same, tuple(base is None for base in model.layer_bases)


def without_losses(model: GPTConfig) -> GPTConfig:
    """The model in its simplest form, without what changes no logits."""
    model = plain(model)
    if "experts" not in model.feed_forwards:
        return model
    losses: dict[str, Any] = {"balance_loss": 0.0, "balance_over": "layer", "z_loss": 0.0}
    return replace(model, experts=replace(model.experts, **losses))


def _stretches_some(model: GPTConfig) -> bool:
    """Whether positions are stretched in the layers without a window, and there are others."""
    rope = model.rope
    mixed = set(model.layer_windows) != {None}
    return rope.stretches == "global" and rope.scaling != "none" and mixed


def _one_base(model: GPTConfig) -> bool:
    """Whether all layers with rotary positions have the same ones."""
    bases = {base for base in model.layer_bases if base is not None}
    return len(bases) <= 1 and not _stretches_some(model)


def _bases_by_window(model: GPTConfig) -> bool:
    """Whether rotary positions differ only between layers with a window, which must not be
    stretched, as in Gemma 3, and those without."""
    pairs = set(zip(model.layer_windows, model.layer_bases, strict=True))
    if len({window for window, _ in pairs}) < len(pairs) or any(x is None for _, x in pairs):
        return False
    if all(window is None for window, _ in pairs):
        return True
    return model.rope.scaling == "none" or model.rope.stretches == "global"
