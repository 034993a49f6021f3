"""Attention of a GPT: its weights and sizes. `models.attention` computes it.

While it decodes, a layer keeps the keys and values of all tokens, [seq, kv_heads, head_dim] each.
Between the passes it keeps its output and its log-sum-exp, and more if `--remat` says so. Its
messages depend on the mesh: `startrail_jax.communication` counts them.
"""

from __future__ import annotations

from collections.abc import Mapping

from models.weights import Model, Weight, bias, projection, scale


def weights(config: Model) -> dict[str, Weight]:
    """The weights, in the order in which they are drawn."""
    declared = {
        "query/kernel": projection("width | heads query_dim"),
        "key/kernel": projection("width | kv_heads head_dim"),
        "value/kernel": projection("width | kv_heads head_dim"),
        "out/kernel": projection("heads head_dim | width", "out"),
    }
    if config.qkv_bias:
        declared["query_bias"] = bias("heads query_dim")
        declared["key_bias"] = declared["value_bias"] = bias("kv_heads head_dim")
    if config.qk_norm and config.qk_norm_over == "head":
        declared["query_norm/scale"] = declared["key_norm/scale"] = scale("head_dim")
    elif config.qk_norm:
        declared["query_norm/heads_scale"] = scale("heads head_dim", precise=True)
        declared["key_norm/heads_scale"] = scale("kv_heads head_dim", precise=True)
    if config.sinks:
        declared["sinks"] = bias("heads")
    if config.out_bias:
        declared["out_bias"] = bias("width")
    return declared


def sizes(config: Model) -> dict[str, int]:
    """Sizes by name of dimension. A gate has as many channels as the query, and lies beside it."""
    return {
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "query_dim": config.head_dim * (2 if config.attention_gate else 1),
    }


def moved(sizes: Mapping[str, int]) -> int:
    """Elements of a token, over all heads, that rotary positions and a gate, which run between the
    matrix products, read and write in a forward pass."""
    queries, keys = (sizes[name] * sizes["head_dim"] for name in ("heads", "kv_heads"))
    is_gated = sizes["query_dim"] > sizes["head_dim"]
    return 2 * (queries + keys) + 3 * queries * is_gated
