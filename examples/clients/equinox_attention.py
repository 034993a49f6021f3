# /// script
# dependencies = ["equinox==0.13.8"]
# ///
"""`equinox.nn.MultiheadAttention`: its projections, as it has no argument for a kernel."""

import equinox
import jax
from compare import Result, compare, packed_features, simulated_mesh, squared_error, visible

HEADS = 8
mesh = simulated_mesh()
x, y, ids = packed_features()
layer = equinox.nn.MultiheadAttention(HEADS, 64, key=jax.random.key(0))


# The change, a batch at a time where Equinox has a vmap over sequences:
def attend(layer, attention, x, ids):
    def projected(linear):
        return (x @ linear.weight.T).reshape(*x.shape[:2], HEADS, -1)

    query, key, value = map(projected, (layer.query_proj, layer.key_proj, layer.value_proj))
    out = attention(query, key, value, segment_ids=ids, padding_id=0)
    return out.reshape(*x.shape[:2], -1) @ layer.output_proj.weight.T


# Its end.


def run(attention, dtype, x, y, ids):
    def loss_of(layer):
        layer, x_ = jax.tree.map(
            lambda z: z.astype(dtype) if equinox.is_array(z) else z, (layer, x)
        )
        if attention is None:
            out = jax.vmap(layer)(x_, x_, x_, visible(ids))
        else:
            out = attend(layer, attention, x_, ids)
        return squared_error(out, y, ids), out

    (loss, out), gradients = equinox.filter_jit(
        equinox.filter_value_and_grad(loss_of, has_aux=True)
    )(layer)
    return Result(loss, out, gradients)


if __name__ == "__main__":
    compare(run, (x, y, ids), mesh=mesh, valid=ids > 0)
