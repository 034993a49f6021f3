"""Generation: greedy decoding equals whole forward passes; draws are the same on every mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import startrail_jax as st
from models.config import GPTConfig, RopeConfig
from models.gpt import GPT
from models.parts.attention import GlobalConfig
from models.parts.gpt import gpt_weights
from programs import SMALL, make_config
from refusals import refused
from startrail_jax.errors import InputError
from trainer.gpt.config import attention_of
from trainer.gpt.generation import Generator
from trainer.gpt.token_choice import Sampling
from trainer.parallel.partition import Partition

MODEL = GPTConfig(
    **SMALL, qkv_bias=True, qk_norm=True, windows=(4, "none"), sinks=True, softcap=2.0,
    output_softcap=3.0, rope=RopeConfig(bases=(100.0, "none")),
)  # fmt: skip
LONG_MODEL = GPTConfig(
    vocab_size=48, width=16, layers=1, heads=1, kv_heads=1, head_dim=2, mlp_width=16
)
TWO_SIZES = dataclasses.replace(
    MODEL, layers=3, heads=8, kv_heads=4, head_dim=4, windows=(4, "none", 4), softcap=None,
    sinks=False, rope=RopeConfig(), mixers=("attention", "global_attention", "attention"),
    value_norm=True, layer_scalar=True,
    global_attention=GlobalConfig(
        head_dim=12, kv_heads=2, values_from_keys=True, rotary_pairs=3
    ),
)  # fmt: skip
NUM_TOKENS = 7
SAMPLING = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=3)


def make_model(config):
    attention_fn = functools.partial(dense_attention, softcap=config.softcap)
    return GPT(config, attention_fn=attention_fn, rngs=nnx.Rngs(0))


def dense_attention(
    query, key, value, *, segment_ids=None, local_window_size=None, sinks=None, softcap=None
):
    """The softmax of logits that are capped and masked, with a sink beside the keys."""
    length, groups = query.shape[1], query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, 2) for x in (key, value))
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[3] ** -0.5
    logits = softcap * jnp.tanh(logits / softcap)
    before = jnp.arange(length)[:, None] - jnp.arange(length)[None]
    visible = (before >= 0) & (before <= (local_window_size or (length, 0))[0])
    logits = jnp.where(visible[None, None], logits, -jnp.inf)
    beside = jnp.broadcast_to(sinks[None, :, None, None], (*logits.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([logits, beside], -1))[..., :-1]
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


@functools.cache
def make_weights(config=MODEL):
    """Weights on the host, larger than initial ones, so that the likeliest token is clear."""
    weights = jax.jit(lambda: nnx.state(make_model(config)))()
    rng = np.random.default_rng(1)

    def enlarge(path, x):
        if any(name in jax.tree_util.keystr(path) for name in ("_bias", "sinks")):
            return rng.normal(size=x.shape).astype(np.float32)
        return np.asarray(x) * (2 if x.ndim == 2 else 1)

    return jax.tree_util.tree_map_with_path(enlarge, weights)


@functools.cache
def prompts(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(MODEL.vocab_size, size=length) for length in lengths]


@functools.cache
def make_generator(degrees, sampling=SAMPLING, config=MODEL, *, zero=0, tile=None):
    mesh = st.make_mesh(degrees, "auto", jax.devices()[: degrees.num_devices])
    attention = st.Attention(mesh, causal=True, **attention_of(config))
    run = make_config(vars(config), tile=tile)
    return Generator(run, attention, sampling, zero=zero)


def generate(generator, rows, num_tokens=NUM_TOKENS, config=MODEL, zero=0, **options):
    """A list of tokens for each prompt."""
    mesh = generator.attention.mesh
    partition = Partition(mesh, gpt_weights(config), zero, dtype=config.dtype)
    weights = make_weights(config)
    weights = jax.device_put(weights, partition.shardings(weights))
    steps = generator(weights, rows, num_tokens=num_tokens, **options)
    return [list(row) for row in zip(*steps, strict=True)]


@functools.cache
def one_device(sampling=SAMPLING):
    return generate(make_generator(st.Degrees(), sampling), prompts(5, 13, 9))


@pytest.mark.parametrize(
    "degrees",
    [st.Degrees.startrail(8, c=2), st.Degrees(head=2, tensor=4), st.Degrees(ring=2, tensor=4)],
)
def test_layers_of_two_sizes_are_decoded_as_whole_rows(degrees):
    """Also where devices share the key heads of the global layers alone."""
    greedy = make_generator(degrees, Sampling(temperature=0.0), TWO_SIZES)
    prompt = prompts(9)[0]
    (found,) = generate(greedy, [prompt], config=TWO_SIZES)

    def attend(query, key, value, *, segment_ids=None, local_window_size=None):
        window = local_window_size
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=True, local_window_size=window
        )

    model = nnx.eval_shape(lambda: GPT(TWO_SIZES, attention_fn=attend, rngs=nnx.Rngs(0)))
    tokens = np.array([[*prompt, *found]], np.int32)
    positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
    logits = jax.jit(lambda weights, *rows: nnx.merge(nnx.graphdef(model), weights)(*rows))(
        make_weights(TWO_SIZES), tokens, positions
    )
    likeliest = np.argmax(logits[0, len(prompt) - 1 : -1], -1)
    np.testing.assert_array_equal(found, likeliest)


@pytest.mark.slow
def test_greedy_tokens_are_the_likeliest_of_the_whole_forward_pass():
    greedy = make_generator(st.Degrees.startrail(8, c=2), Sampling(temperature=0.0))
    found = generate(greedy, prompts(5, 13, 9))
    graph = nnx.graphdef(nnx.eval_shape(lambda: make_model(MODEL)))
    tokens = np.zeros((3, 13 + NUM_TOKENS), np.int32)
    for row, prompt, new in zip(tokens, prompts(5, 13, 9), found, strict=True):
        row[: len(prompt) + NUM_TOKENS] = [*prompt, *new]
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    logits = jax.jit(lambda weights, *inputs: nnx.merge(graph, weights)(*inputs))(
        make_weights(), tokens, positions
    )
    for row, prompt, new in zip(logits.argmax(-1), prompts(5, 13, 9), found, strict=True):
        assert row[len(prompt) - 1 :][:NUM_TOKENS].tolist() == new
    assert len({token for row in found for token in row}) > 3


MESHES = {
    "Ring Attention": (st.Degrees.ring_attention(4), {}),
    "all-gather": (st.Degrees.all_gather(4), {}),
    "Ulysses": (st.Degrees.ulysses(4), {}),
    "2D-Attention, tiled": (st.Degrees.loongtrain(4, head=2), {"tile": 2}),
    "StarTrail": (st.Degrees.startrail(8, c=2), {}),
    "tiles, zero 2": (st.Degrees(team=2, group=2), {"zero": 2}),
    "StarTrail x Ulysses, zero 3": (st.Degrees.startrail(8, c=2, head=2), {"zero": 3}),
    "data and tensor, zero 3": (st.Degrees(data=2, team=2, tensor=2), {"zero": 3}),
    "tensor, few key heads": (st.Degrees(tensor=4, head=2), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("degrees", "options"), MESHES.values(), ids=MESHES)
def test_draws_do_not_depend_on_the_mesh(degrees, options):
    generator = make_generator(degrees, **options)
    found = generate(generator, prompts(5, 13, 9), zero=options.get("zero", 0))
    assert found == one_device()


@pytest.mark.slow
def test_rows_and_seeds_differ_and_rows_do_not_depend_on_what_is_beside_them():
    first, second, third = prompts(5, 13, 9)
    found = generate(make_generator(st.Degrees()), [second, second, third])
    beside = generate(make_generator(st.Degrees()), [second, first, second])
    assert found[0] == beside[0] != found[1]
    assert found[1] == one_device()[1]
    assert one_device() != one_device(dataclasses.replace(SAMPLING, seed=4))


@pytest.mark.slow
def test_seed_of_a_call_is_that_of_the_sampling_and_compiles_nothing():
    wanted = one_device(dataclasses.replace(SAMPLING, seed=4))
    assert one_device() != wanted
    generator = make_generator(st.Degrees())
    programs = generator.prefill._cache_size(), generator.decode._cache_size()
    assert generate(generator, prompts(5, 13, 9), seed=4) == wanted
    assert (generator.prefill._cache_size(), generator.decode._cache_size()) == programs
    with refused(InputError, "seed"):
        generate(generator, prompts(5, 13, 9), seed=1 << 32)


@pytest.mark.slow
def test_rows_end_with_the_document():
    rows = one_device()
    end = rows[1][2]
    found = generate(make_generator(st.Degrees()), prompts(5, 13, 9), end_of_document=end)
    for before, row in zip(rows, found, strict=True):
        length = before.index(end) if end in before else NUM_TOKENS
        assert row == (before[:length] + [None] * NUM_TOKENS)[: len(row)]
    assert None in found[1]


@pytest.mark.slow
def test_generation_stops_when_all_rows_have_ended():
    rows = [prompts(5, 13, 9)[1]] * 3
    greedy = make_generator(st.Degrees(), Sampling(temperature=0.0))
    before = generate(greedy, rows)
    assert before[0] == before[1] == before[2]
    end = before[0][2]
    stopped = generate(greedy, rows, end_of_document=end)
    length = before[0].index(end)
    assert stopped == [[*before[0][:length], None]] * 3
    # A token that the model does not choose, and others at which a text ends.
    assert generate(greedy, rows, end_of_document=None, stops=[-1, end]) == stopped
    assert generate(greedy, rows, end_of_document=end, stops=[-1]) == stopped


def test_no_tokens_are_asked_for():
    assert generate(make_generator(st.Degrees()), prompts(5), num_tokens=0) == []


@pytest.mark.slow
def test_cache_of_32k_tokens_is_an_eighth_on_each_of_eight_devices():
    """A decode step does not copy it."""
    config = dataclasses.replace(MODEL, layers=12)
    generator = make_generator(st.Degrees.startrail(8, c=2), config=config)
    cache, lengths, seed = cache_shapes(generator, slots=1 << 15)
    of_cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert of_cache == 2 * 12 * 2 * (1 << 15) * 2 * 4 * 4
    lowered = generator.decode.lower(generator.weight_shapes, cache, lengths, lengths, seed)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == of_cache // 8
    # Temporary arrays hold keys and values of one layer at a time, of twelve.
    assert memory.temp_size_in_bytes < of_cache // 8 / 6


@pytest.mark.slow
def test_cache_is_in_the_type_of_the_activations_and_holds_no_head_twice():
    config = dataclasses.replace(MODEL, kv_heads=1, dtype="bfloat16")
    cache, *_ = cache_shapes(make_generator(st.Degrees(head=4), config=config), slots=64)
    assert [(x.shape, x.dtype.name) for x in cache["blocks"]] == [
        ((2, 2, 64, 1, 4), "bfloat16")
    ] * 2
    # Both devices along tensor have the head.
    cache, *_ = cache_shapes(make_generator(st.Degrees(head=2, tensor=2), config=config), slots=64)
    assert {x.shape for x in cache["blocks"]} == {(2, 2, 64, 2, 4)}


def cache_shapes(generator, slots):
    """Shapes of a cache for two rows, of the rows' lengths and of a seed."""
    tokens, lengths = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((2, slots), (2,)))
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    arguments = (generator.weight_shapes, tokens, tokens, lengths, seed)
    return jax.eval_shape(generator.prefill, *arguments)[1], lengths, seed


@pytest.mark.slow
def test_32k_tokens_on_eight_devices_give_the_tokens_of_one(compile_well):
    prompt = np.random.default_rng(1).integers(LONG_MODEL.vocab_size, size=(1 << 15) - 3)
    found = [
        generate(make_generator(degrees, config=LONG_MODEL), [prompt], 3, LONG_MODEL)
        for degrees in (st.Degrees(), st.Degrees.startrail(8, c=2))
    ]
    assert found[0] == found[1]
    assert len(found[0][0]) == 3


# Errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "named"),
    [([], "have at least one token; got an empty"), ([3, 48], "vocab_size=48"), ([-1, 3], "0 and")],
)
def test_prompts_that_the_model_does_not_know_raise(prompt, named):
    generator = make_generator(st.Degrees())
    with refused(InputError, named):
        generator(make_weights(), [np.array([1]), np.array(prompt, int)], num_tokens=1)


def test_decode_of_integers_raises():
    attention = st.Attention(st.make_mesh(st.Degrees(), "auto", jax.devices()[:1]), causal=True)
    query, cache = np.zeros((1, 1, 2, 4), np.int32), np.zeros((1, 8, 2, 4), np.int32)
    with refused(InputError, "query, key_cache and value_cache must"):
        attention.decode(query, cache, cache, np.zeros((1, 1), np.int32))
