# /// script
# dependencies = ["flax==0.12.8"]
# ///
"""`flax.linen.MultiHeadDotProductAttention`: the attention is an argument of the module."""

import functools

import jax
from compare import Result, compare, packed_features, simulated_mesh, squared_error, visible
from flax import linen

mesh = simulated_mesh()
x, y, ids = packed_features()
variables = linen.MultiHeadDotProductAttention(8).init(jax.random.key(0), x)


def run(attention, dtype, x, y, ids):
    layer, mask = linen.MultiHeadDotProductAttention(8, dtype=dtype), None
    if attention is None:
        mask = visible(ids)[:, None]
    else:
        # The change:
        attend = functools.partial(attention, segment_ids=ids, padding_id=0)
        layer = linen.MultiHeadDotProductAttention(8, dtype=dtype, attention_fn=attend)
        # Its end.

    def loss_of(variables):
        out = layer.apply(variables, x, mask=mask)
        return squared_error(out, y, ids), out

    (loss, out), gradients = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(variables)
    return Result(loss, out, gradients)


if __name__ == "__main__":
    compare(run, (x, y, ids), mesh=mesh, valid=ids > 0)
