"""What a mask, a scheme and a rule take: one class each. A kernel is tried in test_backends.py."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import startrail_jax as st
from attention_cases import Case, check, make_attention
from startrail_jax import masks
from startrail_jax.blocks import xla
from startrail_jax.blocks.base import Pair
from startrail_jax.blocks.softmax import merge_precisely
from startrail_jax.linear.rules import Chunk, ChunkTerms, GatedDelta
from startrail_jax.rings import collectives, score_units, vjp
from startrail_jax.rings.residuals import row_gradients
from startrail_jax.testing import assert_exact


@dataclass(frozen=True)
class Strided(masks.Mask):
    """A causal mask of every `step`-th key: that of the query, and so on towards the first."""

    step: int
    causal = grows = True

    def visible(self, query: Any, key: Any) -> Any:
        return (key <= query) & ((query - key) % self.step == 0)

    def some(self, query: Any, key: Any) -> Any:
        # Some distance from a query down to a key is a multiple of `step`, and not below 0.
        nearest, farthest = query.first - key.last, query.last - key.first
        return farthest // self.step * self.step >= nearest * (nearest > 0)

    def every(self, query: Any, key: Any) -> Any:
        same = (query.first == query.last) & (key.first == key.last)
        return same & self.visible(query.first, key.first)


@pytest.mark.parametrize("degrees", [st.Degrees(ring=4), st.Degrees.startrail(8, c=2)], ids=str)
@pytest.mark.parametrize("exchange", ["rings", pytest.param("sparse", marks=pytest.mark.slow)])
def test_a_mask_is_one_class(degrees, exchange):
    attention = make_attention(degrees, mask=Strided(3), layout="zigzag", exchange=exchange)
    assert_exact(attention, seq_len=48, heads=2, head_dim=8)


@dataclass(frozen=True)
class Broadcast:
    """Every device receives all keys from a sum over all devices, to which each adds its own."""

    schedule: Any
    scale: float

    @classmethod
    def of(cls, schedule, kept, given, *, gathered=False):
        q = kept[0]
        return cls(schedule, schedule.scale or q.shape[-1] ** -0.5)

    def gather(self, shards, *, named=False):
        q, k, v, query_ids, key_ids = shards
        ranks = self.schedule.ring

        def whole(x):
            spread = jnp.zeros((x.shape[0], ranks.degree, *x.shape[1:]), x.dtype)
            spread = spread.at[:, collectives.index(ranks)].set(x)
            unit = jax.lax.psum(spread, ranks.names)
            unit = unit.reshape(x.shape[0], -1, *x.shape[2:])
            return self.schedule.layout.sort_unit(unit, ranks.degree, 1)

        keys = jax.tree.map(whole, (k, v, key_ids))
        return q, keys[0], keys[1], query_ids, keys[2]

    def pair(self, gathered, given):
        q, k, v, query_ids, key_ids = gathered
        schedule, rank = self.schedule, collectives.index(self.schedule.ring)
        seen, scores = score_units.visibility_and_scores(
            schedule, k.shape[1], (rank, 0, 0), (q, k[:, : q.shape[1]], query_ids, key_ids), given
        )
        keys = schedule.layout.unit_positions(k.shape[1], 0, schedule.ring.degree)
        return Pair(q, k, v, dataclasses.replace(seen, key_runs=keys), self.scale, scores)

    def attend(self, gathered, given):
        out, lse, low = merge_precisely(xla.forward(self.pair(gathered, given)))
        return out.astype(gathered[0].dtype), lse, low

    def again(self, kept, dout, lse):
        return self.gather(kept)

    def gradients(self, gathered, found, given, key_dtype):
        dout, delta = row_gradients(found)
        dq, dk, dv = xla.backward(self.pair(gathered, given), found.lse, delta, dout)[:3]
        ranks = self.schedule.ring

        def home(x):
            x = self.schedule.layout.unsort_unit(x.astype(jnp.float32), ranks.degree, 1)
            return collectives.sum_at_owner(x, ranks, 1, "float32").astype(key_dtype)

        return dq, home(dk), home(dv), (), delta


@pytest.mark.parametrize("mask", ["causal", "packed", "window"])
def test_a_scheme_of_another_traffic_is_one_class(monkeypatch, mask):
    """Forward, gradients, residuals and recomputation are those of the `custom_vjp` of all."""
    assert isinstance(Broadcast, vjp.Transport)
    monkeypatch.setattr(vjp, "_transport", lambda schedule: Broadcast)
    check(Case(degrees=st.Degrees(ring=4), mask=mask, layout="zigzag", heads="grouped"))


class NegativeEigenvalues(GatedDelta):
    """A beta of up to 2, with which a token may turn what the state holds round."""

    name = "negative_eigenvalues"

    def token(self, state: Any, key: Any, value: Any, decay: Any, beta: Any) -> Any:
        return super().token(state, key, value, decay, 2 * beta)

    def terms(self, chunk: Chunk) -> ChunkTerms:
        return super().terms(chunk._replace(beta=2 * chunk.beta))


@pytest.mark.slow_except_every(2)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_rule_of_linear_attention_is_one_class(layout):
    mesh = st.make_mesh(st.Degrees(ring=3, data=2), devices=jax.devices("cpu")[:6])
    linear = st.LinearAttention(mesh, rule=NegativeEigenvalues(), layout=layout)
    sizes = dict(seq_len=84, heads=4, kv_heads=2, head_dim=7, value_head_dim=5)
    assert_exact(linear, **sizes, packed=True)
    other = st.LinearAttention(mesh, rule="gated_delta", layout=layout)
    with pytest.raises(AssertionError, match="leaves 'out'"):
        assert_exact(linear, **sizes, attention_fn=other)
