# /// script
# requires-python = ">=3.12"
# dependencies = ["gemma==4.0.1", "sentencepiece==0.2.0"]
# ///
"""gemma's transformer, as Gemma 2: grouped heads, a window in every other layer, soft caps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from compare import Result, compare, cross_entropy, packed_rows, simulated_mesh
from gemma.gm.math import _positional_embeddings
from gemma.gm.nn import _config, _modules, _transformer

mesh = simulated_mesh("context")
dense = _modules.Attention.__call__
tokens, targets, _, ids = packed_rows(97)
# Padding alone: the model takes no documents.
positions, valid = np.broadcast_to(np.arange(len(ids[0])), ids.shape), ids > 0
config = _config.TransformerConfig(
    num_embed=97,
    embed_dim=64,
    hidden_dim=128,
    num_heads=8,
    head_dim=16,
    num_kv_heads=2,
    final_logit_softcap=30.0,
    use_post_attn_norm=True,
    use_post_ffw_norm=True,
    attention_types=(_modules.AttentionType.LOCAL_SLIDING, _modules.AttentionType.GLOBAL),
    attn_logits_soft_cap=5.0,
    sliding_window_size=20,
    query_pre_attn_norm=_config.QueryPreAttentionNormalisation.BY_ONE_OVER_SQRT_HEAD_DIM,
)


def adapted(attention):
    # The change. Valid tokens [batch, seq, 1] take the place of the mask [batch, seq, seq]:
    def call(self, x, positions, cache, valid):
        if cache is not None:
            return dense(self, x, positions, cache, valid)
        query = self.q_einsum("BTD,NDH->BTNH", x)
        key, value = self.kv_einsum("BSD,CKDH->CBSKH", x)
        query, key = (
            _positional_embeddings.apply_rope(
                heads,
                positions,
                base_frequency=self.rope_base_frequency,
                scale_factor=self.rope_scale_factor,
            )
            for heads in (query, key)
        )
        slides = self.attn_type == _modules.AttentionType.LOCAL_SLIDING
        out = dataclasses.replace(
            attention,
            window=self.sliding_window_size if slides else None,
            softcap=self.attn_logits_soft_cap,
            scale=self.query_pre_attn_scalar,
        )(query, key, value, segment_ids=valid[..., 0].astype(int) - 1)
        return None, self.attn_vec_einsum("BTNH,NHD->BTD", out)

    _modules.Attention.__call__ = call
    # Its end.


@functools.cache
def parameters(dtype):
    model = _transformer.Transformer(config=config, dtype=jnp.dtype(dtype))
    tree = model.init(jax.random.key(0), jnp.asarray(tokens))["params"]
    noise = jax.tree.map(lambda x: 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), tree)
    return model, jax.tree.map(lambda x, y: (x + y).astype(dtype), tree, noise)


def run(attention, dtype, tokens, targets, positions, valid):
    _modules.Attention.__call__ = dense
    model, variables = parameters(dtype)
    if attention is None:
        mask = valid[:, None] & jnp.tri(valid.shape[1], dtype=bool)
    else:
        adapted(attention)
        mask = valid[..., None]
    jax.clear_caches()  # The model is jitted as a whole, and does not see that a method changes.

    def loss_of(variables):
        # Without `positions` the model counts tokens in memory, which zigzag order does not allow.
        out = model.apply({"params": variables}, tokens, positions=positions, attention_mask=mask)
        return cross_entropy(out.logits, targets, valid), out.logits

    (loss, logits), gradients = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(variables)
    return Result(loss, logits, gradients)


if __name__ == "__main__":
    batch = tokens, targets, positions, valid
    compare(run, batch, mesh=mesh, axis="context", valid=valid, causal=True)
