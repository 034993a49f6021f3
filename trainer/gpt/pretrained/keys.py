"""Every key of a config.json, its default, and what this program makes of it. Imports no jax.

The defaults are those of the config classes of transformers 5, and null is allowed where they
allow it: a key that a file leaves out, or sets to null, must not give another model here than
there. tests/parity compares this table with the classes. A key that is in no table might change
the model, so a file with one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from startrail_jax.errors import UnsupportedError
from trainer.gpt.pretrained.config_json import ConfigValues


@dataclass(frozen=True)
class Key:
    """A key of a config.json that says what the model is."""

    default: Any = None
    """Its value where a file leaves it out. None: it follows from others."""
    null: bool = False
    """Whether null is allowed, which is then a value of its own."""
    only: tuple[Any, ...] | None = None
    """The values that this program supports; None: it reads the value."""


def only(*values: Any, null: bool = False) -> Key:
    """A key of which a few values are supported, the default first."""
    return Key(values[0], null, values)


# Keys that change no logits: names, ids of tokens, how to train, generate and store.
IDLE = {
    *("transformers_version", "use_cache", "cache_implementation", "initializer_range"),
    *("attention_dropout", "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("sep_token_id", "unk_token_id", "decoder_start_token_id", "tokenizer_class", "prefix"),
    *("output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward"),
    *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "pruned_heads"),
    *("task_specific_params", "torchscript", "use_bfloat16", "tie_encoder_decoder"),
    *("cross_attention_hidden_size", "unsloth_version", "unsloth_fixed", "generation_config"),
    *("temperature", "top_k", "top_p", "typical_p", "do_sample", "num_beams", "max_length"),
    *("min_length", "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping"),
    *("repetition_penalty", "encoder_no_repeat_ngram_size", "no_repeat_ngram_size"),
    *("bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate"),
    *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
    *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
    *("auto_map", "attn_implementation", "gradient_checkpointing"),
    *("max_sequence_length", "model_max_length", "is_llama_config", "transformers.js_config"),
}
# What transformers reads of every family.
COMMON = {
    "model_type": Key(),
    "architectures": Key(null=True),
    "dtype": Key(null=True),
    "torch_dtype": Key(null=True),
    "vocab_size": Key(),
    "hidden_size": Key(),
    "intermediate_size": Key(),
    "num_hidden_layers": Key(),
    "num_attention_heads": Key(),
    "num_key_value_heads": Key(),
    "head_dim": Key(),
    "rms_norm_eps": Key(1e-6),
    "tie_word_embeddings": Key(False),
    "rope_parameters": Key(null=True),
    "rope_scaling": Key(null=True),
    "rope_theta": Key(10_000.0),
    "original_max_position_embeddings": Key(),
    "partial_rotary_factor": only(1.0, None, null=True),
    "is_causal": only(True),
    "is_decoder": only(False, True),
    "is_encoder_decoder": only(False),
    "add_cross_attention": only(False),
    "quantization_config": only(None, null=True),
    # Some families have no such biases and read no such key; files have it all the same.
    "attention_bias": only(False),
    "mlp_bias": only(False),
    "use_sliding_window": only(False),
    "rope_interleaved": only(False),
    "use_mrope": only(False),
}
SILU = only("silu", "swish")
WINDOW = Key(4096, null=True)
PER_LAYER = Key(null=True)
GEMMA = {
    "hidden_activation": only("gelu_pytorch_tanh"),
    # Files have it beside the other, and transformers does not read it.
    "hidden_act": Key(null=True),
    "hidden_size": Key(2304),
    "intermediate_size": Key(9216),
    "num_hidden_layers": Key(26),
    "num_attention_heads": Key(8),
    "num_key_value_heads": Key(4),
    "head_dim": Key(256),
    "tie_word_embeddings": Key(True),
    "query_pre_attn_scalar": Key(256),
    "sliding_window": WINDOW,
    "layer_types": PER_LAYER,
}
QWEN = {
    "vocab_size": Key(151_936),
    "hidden_size": Key(4096),
    "intermediate_size": Key(22_016),
    "num_hidden_layers": Key(32),
    "num_attention_heads": Key(32),
    "num_key_value_heads": Key(32, null=True),
    "max_position_embeddings": Key(32_768),
    "hidden_act": SILU,
    "use_sliding_window": Key(False),
    "sliding_window": WINDOW,
    "max_window_layers": Key(28),
    "layer_types": PER_LAYER,
}
KEYS: Mapping[str, Mapping[str, Key]] = {
    "llama": {
        "vocab_size": Key(32_000),
        "hidden_size": Key(4096),
        "intermediate_size": Key(11_008),
        "num_hidden_layers": Key(32),
        "num_attention_heads": Key(32),
        "num_key_value_heads": Key(null=True),
        "head_dim": Key(null=True),
        "max_position_embeddings": Key(2048),
        "hidden_act": SILU,
        # transformers has no windows here; see `read_windows` for what changes nothing.
        "sliding_window": Key(null=True),
        "layer_types": PER_LAYER,
    },
    "mistral": {
        "vocab_size": Key(32_000),
        "hidden_size": Key(4096),
        "intermediate_size": Key(14_336),
        "num_hidden_layers": Key(32),
        "num_attention_heads": Key(32),
        "num_key_value_heads": Key(8),
        "head_dim": Key(null=True),
        "max_position_embeddings": Key(131_072),
        "hidden_act": SILU,
        "sliding_window": WINDOW,
    },
    # All of them have biases of queries, keys and values.
    "qwen2": QWEN,
    "qwen3": QWEN | {"head_dim": Key(128)},
    "smollm3": {
        "vocab_size": Key(128_256),
        "hidden_size": Key(2048),
        "intermediate_size": Key(11_008),
        "num_hidden_layers": Key(36),
        "num_attention_heads": Key(16),
        "num_key_value_heads": Key(4, null=True),
        "max_position_embeddings": Key(32_768),
        "hidden_act": SILU,
        "tie_word_embeddings": Key(True),
        "rope_theta": Key(2_000_000.0),
        "use_sliding_window": Key(False),
        "sliding_window": Key(null=True),
        # Published files have it, and transformers reads it for Qwen only.
        "max_window_layers": Key(null=True),
        "no_rope_layers": Key(null=True),
        "no_rope_layer_interval": Key(4),
        "layer_types": PER_LAYER,
    },
    "gemma2": GEMMA
    | {
        "vocab_size": Key(256_000),
        "max_position_embeddings": Key(8192),
        "attn_logit_softcapping": Key(50.0, null=True),
        "final_logit_softcapping": Key(30.0, null=True),
        "use_bidirectional_attention": only(None, False, null=True),
        # Published files have it beside `sliding_window`, and transformers does not read it.
        "sliding_window_size": Key(null=True),
        "sliding_window_pattern": only(2),
    },
    "gemma3_text": GEMMA
    | {
        "vocab_size": Key(262_208),
        "max_position_embeddings": Key(131_072),
        "final_logit_softcapping": Key(null=True),
        # transformers has the key, and caps nothing.
        "attn_logit_softcapping": only(None, null=True),
        "use_bidirectional_attention": only(False, None, null=True),
        "rope_theta": Key(1_000_000.0),
        "rope_local_base_freq": Key(10_000.0),
        "sliding_window_pattern": Key(6),
    },
}
"""The keys of each family, beside those of `COMMON`."""


def values_of(family: str, values: Mapping[str, Any], name: str) -> ConfigValues:
    """The values of a config.json, with the defaults of its family.

    Args:
        family: its `model_type`.
        values: the JSON object.
        name: of the file, for messages.

    Raises:
        ValueError: if a value is null that must not be.
        NotImplementedError: if a key is unknown, or its value is not supported.
    """
    known = {**COMMON, **KEYS[family]}
    defaults = {key: spec.default for key, spec in known.items()}
    read = ConfigValues({**defaults, **values}, name)
    for key, value in values.items():
        if key in IDLE or key.startswith("_") or (key not in known and value is None):
            continue
        if key not in known:
            raise UnsupportedError(
                f"Every key must be known for a model of kind {family} in {name!r}; got {key}="
                f"{value!r}, which may make it another model. Use another model; if transformers "
                "takes no notice of the key, delete it from the file."
            )
        if value is None and not known[key].null:
            raise read.wrong(key, "other than null, or left out", value)
        supported = known[key].only
        if supported is not None and not any(
            value == x and isinstance(value, bool) == isinstance(x, bool) for x in supported
        ):
            raise UnsupportedError(
                f"{key} must be {' or '.join(map(repr, supported))} in {name!r}; got {value!r}, "
                "which is not supported. Use another model."
            )
    return read
