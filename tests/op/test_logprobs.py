"""Log-probabilities and entropies of tokens, beside whole logits in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import startrail_jax as st
from refusals import refused
from startrail_jax.errors import InputError

BATCH, SEQ, WIDTH, VOCAB = 2, 32, 12, 37
TOKENS = P("data", "seq")
OPTIONS = (
    {},
    {"tile": 5},
    {"tile": 1, "temperature": 0.7},
    {"tile": 8, "temperature": 1.3, "softcap": 4.0},
)


def oracle(hidden, head, targets, of_logprobs, of_entropy, temperature=1.0, softcap=None, **_):
    """Both numbers, and the gradients of hidden and head by their cotangents, of whole logits."""
    z, slope = hidden @ head, 1.0
    if softcap is not None:
        z = softcap * np.tanh(z / softcap)
        slope = 1 - (z / softcap) ** 2
    z, slope = z / temperature, slope / temperature
    powers = np.exp(z - z.max(-1, keepdims=True))
    p = powers / powers.sum(-1, keepdims=True)
    counts, own = targets >= 0, np.eye(head.shape[1])[np.maximum(targets, 0)]
    entropy = -(p * np.log(p)).sum(-1)
    dz = (counts * of_logprobs)[..., None] * (own - p)
    dz = (dz - (counts * of_entropy)[..., None] * p * (np.log(p) + entropy[..., None])) * slope
    logprobs = (np.log(p) * own).sum(-1)
    dhead = np.einsum("btw,btv->wv", hidden, dz)
    return np.where(counts, logprobs, 0), np.where(counts, entropy, 0), dz @ head.T, dhead


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    floats = [rng.normal(size=shape) for shape in ((BATCH, SEQ, WIDTH), (WIDTH, VOCAB))]
    targets = rng.integers(-1, VOCAB, (BATCH, SEQ))
    return *floats, targets, *rng.normal(size=(2, BATCH, SEQ))


def both_passes(hidden, head, targets, of_logprobs, of_entropy, **options):
    """The numbers and the gradients; the sum is over the tokens that are here."""

    def total(hidden, head):
        found = st.token_logprobs(hidden, head, targets, **options)
        both = found.logprobs * of_logprobs, found.entropy * of_entropy
        return sum(map(jnp.sum, both)), tuple(found)

    (_, found), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(hidden, head)
    return *found, *gradients


def mesh_of(kind):
    shape = (1, 1) if kind == "one" else (2, 4)
    devices = jax.devices()[: shape[0] * shape[1]]
    type_ = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    return jax.make_mesh(shape, ("data", "seq"), (type_,) * 2, devices=devices)


def program_of(kind, **options):
    """The program of both passes on a mesh, and its inputs there."""
    mesh, run = mesh_of(kind), functools.partial(both_passes, **options)
    specs = (P("data", "seq", None), P(), TOKENS, TOKENS, TOKENS)
    if kind == "local":
        out = (TOKENS, TOKENS, specs[0], P())
        run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out)
    low = [x.astype(np.int32 if x.dtype == np.int64 else np.float32) for x in inputs()]
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(low, specs, strict=True)
    ]
    return jax.jit(run), placed


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["one", "auto", "explicit", "local"])
def test_numbers_and_gradients_are_those_of_whole_logits(kind, options):
    """Global arrays under jit on either kind of axes, and those of a device in a shard_map."""
    run, arrays = program_of(kind, **options)
    wanted = oracle(*inputs(), **options)
    for found, exact in zip(run(*arrays), wanted, strict=True):
        np.testing.assert_allclose(found, exact, rtol=0, atol=2e-6 * np.abs(exact).max())


def test_no_token_is_sent_and_no_whole_logits_exist():
    """What devices send is the gradient of a part of the head."""
    run, arrays = program_of("auto", tile=5)
    text = run.lower(*arrays).compile().as_text()
    assert not re.search(r"(all-gather|all-to-all|collective-permute)(-start)?\(", text)
    sent = re.findall(r"= (f32\[12,5\])\S* all-reduce(?:-start)?\(", text)
    assert sent
    rows = rf"\[({BATCH}|1),({SEQ}|{SEQ // 4}),{VOCAB}\]"
    assert not re.search(rows, text)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    "degrees", [st.Degrees.startrail(8, c=2), st.Degrees(data=2, ring=4)], ids=str
)
def test_shards_of_an_attention_give_what_whole_rows_give(layout, degrees):
    """Targets are shifted before tokens are sharded, as for a loss."""
    mesh = st.make_mesh(degrees, devices=jax.devices()[:8])
    attention = st.Attention(mesh, causal=True, layout=layout)
    rng = np.random.default_rng(1)
    ids = rng.integers(VOCAB, size=(BATCH, SEQ + 1))
    hidden, head = (rng.normal(size=x).astype("f4") for x in ((BATCH, SEQ, 12), (12, VOCAB)))
    whole = st.token_logprobs(hidden, head, ids[:, 1:], tile=9)
    shards = attention.shard(hidden, ids[:, 1:])
    found = jax.jit(functools.partial(st.token_logprobs, tile=9))(shards[0], head, shards[1])
    for name in ("logprobs", "entropy"):
        x = getattr(found, name)
        assert x.sharding.is_equivalent_to(shards[1].sharding, 2)
        np.testing.assert_allclose(attention.unshard(x), getattr(whole, name), rtol=0, atol=1e-6)


def test_what_has_no_target_changes_nothing():
    hidden, head, targets, *cotangents = (x.astype("f4") for x in inputs())
    targets = targets.astype("i4")
    expected = both_passes(hidden, head, targets, *cotangents)
    hidden[targets < 0] = np.nan
    found = both_passes(hidden, head, targets, *cotangents)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert not np.asarray(found[2])[targets < 0].any()


def test_target_beyond_the_vocabulary_is_not_a_number():
    hidden, head, targets, *_ = inputs()
    targets[0, 3] = VOCAB
    found = st.token_logprobs(hidden.astype("f4"), head.astype("f4"), targets, tile=5)
    assert np.isnan(found.logprobs).nonzero() == (np.array([0]), np.array([3]))


def test_sixteen_bits_have_sums_in_float32():
    """Beside the same rounded inputs: probabilities are of float32, gradients rounded once."""
    hidden, head, targets, *cotangents = inputs()
    hidden, head = (x.astype(jnp.bfloat16) for x in (hidden, head))
    low = [jnp.asarray(x, jnp.float32) for x in cotangents]
    found = both_passes(hidden, head, targets, *low, tile=5)
    exact = oracle(*(np.asarray(x, np.float64) for x in (hidden, head)), targets, *cotangents)
    assert [str(x.dtype) for x in found] == ["float32", "float32", "bfloat16", "bfloat16"]
    for x, wanted, bound in zip(found, exact, (2e-6, 2e-6, 8e-3, 8e-3), strict=True):
        error = np.abs(np.asarray(x, np.float64) - wanted).max()
        assert error <= bound * np.abs(wanted).max()


@pytest.mark.usefixtures("unchecked")  # The errors of the package, not of the type checker.
def test_mistakes_are_named():
    hidden, head, targets = jnp.zeros((2, 8, 4)), jnp.zeros((4, 9)), jnp.zeros((2, 8), int)
    run = st.token_logprobs
    for given in ((hidden, head.T, targets), (hidden[0], head, targets), (hidden, head, head)):
        with refused(InputError, "head [width, vocab] and targets [batch, seq]; got hidden"):
            run(*given)
    with refused(InputError, "hidden and head must be floats and targets integers; got float32"):
        run(hidden, head, targets.astype(float))
    for name, value in (("temperature", 0), ("temperature", np.nan), ("softcap", -1.0)):
        with refused(InputError, f"{name} must be a positive number; got {name}="):
            run(hidden, head, targets, **{name: value})
    with refused(InputError, "tile must be a positive integer; got tile=0"):
        run(hidden, head, targets, tile=0)
