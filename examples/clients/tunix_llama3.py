# /// script
# dependencies = ["google-tunix==0.1.7"]
# ///
"""tunix's Llama 3, in contiguous order with the loss of its trainer.

The trainer shifts targets after they were sharded, which zigzag order does not allow. There, the
loss is one that gets shifted targets.
"""

import jax
import jax.numpy as jnp
from compare import Result, compare, cross_entropy, packed_rows, simulated_mesh, visible
from flax import nnx
from tunix.models.llama3 import model as llama3
from tunix.sft.peft_trainer import _default_loss_fn

mesh = simulated_mesh()
dense = llama3.Attention.block
tokens, targets, positions, ids = packed_rows(97)
config = llama3.ModelConfig(
    num_layers=2,
    vocab_size=97,
    embed_dim=64,
    hidden_dim=128,
    num_heads=8,
    head_dim=16,
    num_kv_heads=2,
    rope_theta=10000,
    norm_eps=1e-5,
    remat_config=llama3.RematConfig.BLOCK,
)


def adapted(attention):
    # The change. Segment ids take the place of the mask:
    def block(self, x, positions, cache, ids):
        if cache is not None:
            return dense(self, x, positions, cache, ids)
        query = llama3.apply_rope(self.q_proj(x), positions, head_dim=self.head_dim)
        key = llama3.apply_rope(self.k_proj(x), positions, head_dim=self.head_dim)
        out = attention(query, key, self.v_proj(x), segment_ids=ids, padding_id=0)
        return None, self.o_proj(out)

    llama3.Attention.block = block
    # Its end.


def run(attention, dtype, tokens, targets, positions, ids, counts):
    model = llama3.Llama3(config, rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), nnx.state(model)))
    if attention is None:
        llama3.Attention.block = dense
        mask = visible(ids)
    else:
        adapted(attention)
        mask = ids

    def loss_of(model):
        logits, _ = model(tokens, positions, None, mask)
        if attention is not None and attention.layout.kind == "zigzag":
            return cross_entropy(logits, targets, counts), logits
        return _default_loss_fn(model, tokens, ids > 0, positions, mask), logits

    (loss, logits), gradients = nnx.jit(nnx.value_and_grad(loss_of, has_aux=True))(model)
    return Result(loss, logits, gradients)


if __name__ == "__main__":
    counts = ids > 0  # The targets that the trainer counts.
    counts = jnp.pad(counts[:, 1:], ((0, 0), (0, 1)))
    batch = tokens, targets, positions, ids, counts
    compare(run, batch, mesh=mesh, valid=ids > 0)
