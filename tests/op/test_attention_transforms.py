"""Under jit, grad, scan and remat; what the program sends, and the memory it takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
import startrail_jax as st
from attention_cases import (
    FLOAT32_ERROR,
    QUICK,
    Case,
    forward_and_backward,
    natural,
    place,
    reference,
    relative_error,
)
from startrail_jax.analysis.hlo import read_traffic
from startrail_jax.rings.residuals import CHECKPOINT_NAMES

STARTRAIL = st.Degrees.startrail(8, c=2)


@pytest.mark.slow_except_every(2)
@pytest.mark.parametrize("published", [False, True])
def test_gradient_of_lse_alone(published):
    case = Case(degrees=STARTRAIL, published=published, heads="grouped")
    query, key, value, dout, dlse, _ = place(case.attention, case.problem)
    result = natural(
        case.attention,
        forward_and_backward(case.attention, query, key, value, 0 * dout, dlse, None),
    )
    problem = case.problem
    expected = oracle.gradients(
        problem.query, problem.key, problem.value, 0 * problem.dout, problem.dlse, causal=True
    )
    assert relative_error(result.dq, expected.query) <= FLOAT32_ERROR
    assert relative_error(result.dk, expected.key) <= FLOAT32_ERROR
    assert (result.dv == 0).all()


# Backward mode -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "heads", "expected"),
    [
        (st.Degrees.ring_attention(8), "equal", "query"),
        (st.Degrees.ring_attention(8), "grouped", "kv"),
        (st.Degrees(team=4, ring=2), "equal", "kv"),
    ],
)
def test_auto_backward_is_the_program_of_the_cheaper_mode(degrees, heads, expected):
    def program(backward):
        case = Case(degrees=degrees, heads=heads, backward=backward)
        arguments = place(case.attention, case.problem)
        return forward_and_backward.lower(case.attention, *arguments).as_text()

    other = {"query": "kv", "kv": "query"}[expected]
    assert program("auto") == program(expected) != program(other)


# Layers --------------------------------------------------------------------------------------

NUM_LAYERS, WIDTH, HEADS = 3, 20, 4
SAVE_ATTENTION = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)
REMAT = {
    "none": lambda layer: layer,
    "save_attention": functools.partial(jax.checkpoint, policy=SAVE_ATTENTION),
    "everything": jax.checkpoint,
}


def stack(attend, remat, x, weights):
    """A scan over layers of attention with a residual connection."""

    def layer(x, w):
        query, key, value = jnp.einsum("btd,dcnh->cbtnh", x, w)
        return x + attend(query, key, value).reshape(x.shape), None

    return jax.lax.scan(REMAT[remat](layer), x, weights)[0]


def layers_problem(seq_len):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(2, seq_len, WIDTH)).astype("f4")
    shape = (NUM_LAYERS, WIDTH, 3, HEADS, WIDTH // HEADS)
    return (
        x,
        (rng.normal(size=shape) / WIDTH**0.5).astype("f4"),
        rng.normal(size=x.shape).astype("f4"),
    )


def layers_program(attention, remat):
    def loss(x, weights, dout):
        return (stack(attention, remat, x, weights) * dout).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1)))


def run_layers(axis_type, remat, seq_len=48):
    """The traffic of the program, dx in natural order, and dweights."""
    attention = Case(degrees=STARTRAIL, axis_type=axis_type, backward="kv").attention
    x, weights, dout = layers_problem(seq_len)
    tokens = NamedSharding(attention.mesh, P(*attention.sequence_spec, None))
    x, dout = (jax.device_put(attention.layout.permute(a), tokens) for a in (x, dout))
    weights = jax.device_put(weights, NamedSharding(attention.mesh, P()))
    lowered = layers_program(attention, remat).lower(x, weights, dout)
    compiled = lowered.compile(compiler_options=QUICK)
    dx, dweights = compiled(x, weights, dout)
    dx = attention.layout.unpermute(np.asarray(dx))
    return read_traffic(compiled.as_text()), dx, dweights


@functools.cache
def expected_layers(seq_len=48):
    plain = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    with jax.default_matmul_precision("highest"):
        return layers_program(plain, "none")(*layers_problem(seq_len))


def assert_gradients_of_layers(dx, dweights):
    expected_dx, expected_dweights = expected_layers()
    # Three layers of rounding on both sides.
    assert relative_error(dx, expected_dx) <= 3 * FLOAT32_ERROR
    assert relative_error(dweights, expected_dweights) <= 3 * FLOAT32_ERROR


@pytest.mark.slow
def test_scan_over_layers_on_an_auto_mesh():
    _, *gradients = run_layers("auto", "save_attention")
    assert_gradients_of_layers(*gradients)


@pytest.mark.slow
def test_remat_that_saves_attention_sends_nothing_again():
    traffic = {}
    for remat in REMAT:
        traffic[remat], *gradients = run_layers("explicit", remat)
        assert_gradients_of_layers(*gradients)
    assert traffic["save_attention"].counts == traffic["none"].counts
    assert traffic["save_attention"].received_bytes == traffic["none"].received_bytes
    assert traffic["everything"].received_bytes > traffic["none"].received_bytes


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
    mesh = st.make_mesh(st.Degrees(ring=2), devices=jax.devices()[:2])
    attention = st.Attention(mesh)
    (batch,) = jax.export.symbolic_shape("batch")
    sharding = NamedSharding(mesh, attention.query_spec(2))
    x = jax.ShapeDtypeStruct((batch, 8, 2, 4), jnp.float32, sharding=sharding)
    exported = jax.export.export(jax.jit(attention))(x, x, x)
    assert str(exported.out_avals[0].shape) == "(batch, 8, 2, 4)"
