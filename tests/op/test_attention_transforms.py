"""Memory of a longer sequence, 64 devices, and a batch of any size in an exported program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import startrail_jax as st
from attention_cases import (
    FLOAT32_ERROR,
    Case,
    forward_and_backward,
    make_attention,
    place,
    reference,
    relative_error,
)

STARTRAIL = st.Degrees.startrail(8, c=2)


@pytest.mark.slow
def test_memory_at_most_doubles_with_the_length():
    """Temporary memory of one device, forward and backward, at a fixed number of devices."""

    def temporary_bytes(tokens):
        case = Case(degrees=STARTRAIL, tokens=tokens, heads="grouped")
        arguments = place(case.attention, case.problem)
        program = forward_and_backward.lower(case.attention, *arguments).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(512) <= 2 * 1.05 * temporary_bytes(256)


@pytest.mark.slow
def test_sixty_four_devices():
    case = Case(degrees=st.Degrees.startrail(64, c=4), tokens=2, heads="single")
    query, key, value, *_ = place(case.attention, case.problem)
    out, lse = jax.jit(functools.partial(case.attention, return_lse=True))(query, key, value)
    expected = reference(case.problem, causal=True)
    unpermute = case.attention.layout.unpermute
    assert relative_error(unpermute(np.asarray(out)), expected.out) <= FLOAT32_ERROR
    assert relative_error(unpermute(np.asarray(lse), axis=2), expected.lse) <= FLOAT32_ERROR


@pytest.mark.usefixtures("unchecked")
def test_batch_may_be_symbolic_in_an_exported_program():
    attention = make_attention(st.Degrees(ring=2))
    (batch,) = jax.export.symbolic_shape("batch")
    sharding = NamedSharding(attention.mesh, attention.query_spec(2))
    x = jax.ShapeDtypeStruct((batch, 8, 2, 4), jnp.float32, sharding=sharding)
    exported = jax.export.export(jax.jit(attention))(x, x, x)
    assert str(exported.out_avals[0].shape) == "(batch, 8, 2, 4)"
