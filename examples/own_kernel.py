"""A block kernel of your own, which every scheme and mask can use: `python examples/own_kernel.py`.

A kernel attends the queries that are on one device to some keys. What is on which device when, and
how results are joined, is not its concern. `startrail_jax.blocks.Block` has the whole contract.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import startrail_jax as st


@dataclass(frozen=True)
class Dense:
    """All logits at once, in float32."""

    def refusal(self, request):
        """Why it does not serve a request; None if it does."""
        return "it knows no caps and no scores" if request.softcap or request.scores else None

    def forward(self, pair, into=()):
        """Appends (out, lse) of these keys to those of others: out = softmax(scale q k^T) v."""
        logits = self.logits(pair)
        lse = jax.nn.logsumexp(logits, 3)
        lse = jnp.where(logits.max(3) < -1e29, -1e30, lse)  # In rows that see no key.
        p = jnp.where(logits < -1e29, 0, jnp.exp(logits - lse[..., None]))
        return *into, (self.product("bnts,bsnv->btnv", p, self.heads(pair.v, pair.q)), lse)

    def backward(self, pair, lse, delta, dout, into=(None, None, None)):
        """Adds (dq, dk, dv) of these pairs to `into`; lse and delta are those of whole rows."""
        q, k, v, _, scale, _ = pair
        logits = self.logits(pair)
        p = jnp.where(logits < -1e29, 0, jnp.exp(logits - lse[..., None]))
        dp = self.product("btnv,bsnv->bnts", dout, self.heads(v, q))
        ds = scale * p * (dp - delta[..., None])
        dq = self.product("bnts,bsnh->btnh", ds, self.heads(k, q))
        dk = self.product("bnts,btnh->bsnh", ds, q)
        dv = self.product("bnts,btnv->bsnv", p, dout)
        dk, dv = (x.reshape(*k.shape[:3], -1, x.shape[3]).sum(3) for x in (dk, dv))
        return tuple(x if y is None else x + y for x, y in zip((dq, dk, dv), into, strict=False))

    def logits(self, pair):
        logits = self.product("btnh,bsnh->bnts", pair.q, self.heads(pair.k, pair.q)) * pair.scale
        return jnp.where(pair.visibility.dense[:, None], logits, -1e30)

    def heads(self, x, q):
        """Keys or values for each query head: neighbouring query heads share one."""
        return jnp.repeat(x, q.shape[2] // x.shape[2], 2)

    def product(self, subscripts, x, y):
        return jnp.einsum(subscripts, x, y, precision="highest", preferred_element_type="float32")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    x = np.random.default_rng(0).standard_normal((3, 1, 1024, 4, 64), np.float32)
    mesh = st.make_mesh(st.Degrees.startrail(8, c=2))
    own, known = (
        st.Attention(mesh, causal=True, backend=backend) for backend in ([Dense(), "auto"], "auto")
    )
    inputs = own.shard(*x)
    print(own.explain(seq_len=1024, heads=4, head_dim=64, dtype="float32"))
    for attention in (own, known):
        out, vjp = jax.vjp(attention, *inputs)
        print("sums of dq, dk and dv:", *(float(abs(dx).sum()) for dx in vjp(jnp.sin(out))))
