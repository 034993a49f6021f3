"""Losses that depend on other tokens of their row: the same on every mesh, in tiles or not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import programs
import startrail_jax as st
from programs import SMALL, check_same_gradients, learnable_tokens, make_config
from trainer.config import OptimizerConfig
from trainer.data.batches import place
from trainer.gpt.batches import next_token_batch
from trainer.gpt.objective import NextToken
from trainer.parallel.checks import make_attention
from trainer.parallel.row_sums import RowSums
from trainer.parallel.step import Program

END = 7
CONFIG = make_config(SMALL, optimizer=OptimizerConfig(learning_rate=1e-2), seq_len=40)


class OfRows(NextToken):
    """Next-token training, as a loss of rows."""

    of_rows = True


class OfDocuments(OfRows):
    """A loss in which every token knows how likely its document is."""

    names_of_means = ("length",)

    def loss(self, numbers, batch, sums):
        ids = batch.segment_ids
        length = sums(jnp.ones_like(numbers[..., 0]), ids)
        mean = sums(numbers[..., 0], ids) / jnp.maximum(length, 1)
        return mean * jnp.tanh(numbers[..., 0]) + jnp.square(mean), {"length": length}


@functools.cache
def gradients_of(objective, degrees, layout="zigzag", **changes):
    """The gradients, (loss, metrics) and weights of a step."""
    config = dataclasses.replace(CONFIG, **changes)
    made = objective(config)
    mesh = st.make_mesh(degrees, axis_type="auto", devices=jax.devices()[: degrees.num_devices])
    attention = dataclasses.replace(make_attention(mesh, config, made), layout=layout)
    program = Program(config, attention, made)
    tokens = learnable_tokens(CONFIG, 0, END)
    layout = program.attention.layout
    batch = next_token_batch(tokens, layout=layout, end_of_document=END)
    # One row counts nothing, and so do most devices of another.
    counted = np.ones((CONFIG.batch_size, CONFIG.seq_len), np.float32)
    counted[1], counted[2, :33] = 0, 0
    counted = np.pad(counted, ((0, 0), (0, batch.weights.shape[1] - CONFIG.seq_len)))
    batch = batch._replace(weights=batch.weights * layout.permute(counted))
    weights = jax.device_get(initial_weights())
    return programs.gradients_of(program, weights, place(batch, program.batch_sharding))


@functools.cache
def initial_weights():
    made = NextToken(CONFIG)
    mesh = st.make_mesh(st.Degrees(), axis_type="auto", devices=jax.devices()[:1])
    return Program(CONFIG, make_attention(mesh, CONFIG, made), made).initialise().weights


def check_alike(got, want):
    check_same_gradients(got, want, rtol=1e-6)


MESHES = {
    "ring": (st.Degrees(ring=4), {}),
    "startrail": (st.Degrees.startrail(8, c=2), dict(zero=3, tile=7)),
    "ulysses": (st.Degrees(head=2, data=2), dict(zero=1)),
    "tensor": (st.Degrees(tensor=2, ring=3), dict(tile=5)),
    "accumulated": (st.Degrees(ring=2), dict(gradient_accumulation=2)),
    "natural": (
        st.Degrees(ring=2, data=2),
        dict(layout="contiguous", tile=3),
    ),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_next_token_training_is_a_loss_of_rows(mesh):
    degrees, changes = MESHES[mesh]
    check_alike(
        gradients_of(OfRows, degrees, **changes), gradients_of(NextToken, degrees, **changes)
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_of_documents_do_not_depend_on_the_mesh(mesh):
    degrees, changes = MESHES[mesh]
    check_alike(
        gradients_of(OfDocuments, degrees, **changes), gradients_of(OfDocuments, st.Degrees())
    )


@pytest.mark.parametrize("split", [False, True])
def test_sums_cross_devices(split):
    """On rows that all four devices share, and on two rows of two devices each."""
    mesh = jax.make_mesh(
        (2, 2), ("x", "y"), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    rng, rows, length = np.random.default_rng(0), 2 if split else 3, 12
    shape = rows, length
    x, scale = rng.normal(size=(2, *shape)).astype(np.float32)
    ids = np.sort(rng.integers(-1, 4, size=shape), axis=1).astype(np.int32)
    counted = rng.random(shape) < 0.7
    sums = RowSums(("x", "y"), length)
    spec = PartitionSpec(None, ("x", "y"))
    if split:
        sums = RowSums(("x", "y"), length, split=("x", "y"), rows=(0, 0, 1, 1))
        spec = PartitionSpec("x", "y")
    local = jax.shard_map(sums, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    got, pull = jax.vjp(lambda x: jax.jit(local)(x, ids, counted), x)
    same = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, None]
    np.testing.assert_allclose(got, np.einsum("bts,bs->bt", same, x * counted), atol=1e-6)
    want = np.einsum("bts,bt->bs", same, scale) * counted
    np.testing.assert_allclose(pull(scale)[0], want, atol=1e-6)
