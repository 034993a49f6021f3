"""The DiT alone: against a dense one in numpy, with permuted tokens, and divided among devices;
each time with classes and with texts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import startrail_jax as st
from models import dit
from programs import noted_hooks
from refusals import refused
from startrail_jax.errors import InputError

BATCH, FRAMES, ROWS, COLUMNS = 2, 2, 3, 4
SEQ_LEN = FRAMES * ROWS * COLUMNS
CLASSES, PATCH, CHANNELS = 5, (1, 2, 3), 2
PATCH_CHANNELS = 12
LAYERS, WIDTH, HEADS = 2, 26, 2
SIZES = {
    "channels": CHANNELS, "classes": CLASSES, "patch": PATCH,
    "width": WIDTH, "layers": LAYERS, "heads": HEADS, "mlp_width": 19,
}  # fmt: skip
OF_TEXTS = SIZES | {"classes": 0, "text_dim": 7}
BOTH = pytest.mark.parametrize("sizes", [SIZES, OF_TEXTS], ids=["classes", "texts"])
COUNTS = (3, 0)
"""Tokens of the texts; the second row has none."""


def dense_attention(query, key, value, *, segment_ids=None):
    """Attention of each token to those of its own segment; padding sees nothing and gives 0."""
    if segment_ids is None:
        return jax.nn.dot_product_attention(query, key, value)
    mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    mask &= (segment_ids >= 0)[:, None, None, :]
    out = jax.nn.dot_product_attention(query, key, value, mask=mask)
    return jnp.where((segment_ids >= 0)[:, :, None, None], out, 0)


def make_model(sizes, attention_fn=dense_attention, **options):
    return dit.DiT(**sizes | options, attention_fn=attention_fn, rngs=nnx.Rngs(0))


@functools.cache
def graph_of(sizes, attention_fn):
    return nnx.graphdef(nnx.eval_shape(lambda: make_model(dict(sizes), attention_fn)))


def make_weights(sizes, scale=0.15):
    """Random weights: those that begin as 0 would hide what goes into them."""
    shapes = nnx.state(nnx.eval_shape(lambda: make_model(sizes)))
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(scale * rng.standard_normal(x.shape), jnp.float32), shapes
    )


@functools.partial(jax.jit, static_argnames=["sizes", "attention_fn"])
def run(weights, *inputs, sizes, attention_fn=dense_attention, **texts):
    return nnx.merge(graph_of(sizes, attention_fn), weights)(*inputs, **texts)


def predict(*inputs, sizes=SIZES, **texts):
    texts = texts or texts_of(sizes)
    return run(make_weights(sizes), *inputs, sizes=tuple(sizes.items()), **texts)


def texts_of(sizes):
    """A text for each row, of five tokens of which only the first few count."""
    if "text_dim" not in sizes:
        return {}
    text = np.random.default_rng(3).standard_normal((BATCH, 5, sizes["text_dim"]))
    ids = np.where(np.arange(5) < np.array(COUNTS)[:, None], 0, -1)
    return {"text": jnp.asarray(text, jnp.float32), "text_ids": jnp.asarray(ids, jnp.int32)}


def make_inputs(seed=0, classes=CLASSES):
    """Patches, positions, time and labels, one of which is "no class"."""
    rng = np.random.default_rng(seed)
    grid = np.stack(np.unravel_index(np.arange(SEQ_LEN), (FRAMES, ROWS, COLUMNS)), axis=-1)
    return (
        jnp.asarray(rng.standard_normal((BATCH, SEQ_LEN, PATCH_CHANNELS)), jnp.float32),
        jnp.asarray(np.tile(grid, (BATCH, 1, 1)), jnp.int32),
        jnp.asarray([0.3, 0.8], jnp.float32),
        jnp.asarray([min(3, classes), classes], jnp.int32),
    )


# The same model again, in float64 and without the package.


def numpy_sinusoids(x, channels):
    frequencies = 10_000.0 ** (-np.arange(channels // 2) / (channels // 2))
    angles = np.asarray(x, float)[..., None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


def numpy_modulated(x, shift, scale):
    return numpy_norm(x) * (1 + scale[:, None]) + shift[:, None]


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def numpy_norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)


def numpy_text_attention(x, text, block):
    """Of each row with a text alone, to as many tokens as it has."""
    out = np.zeros_like(x)
    for row, count in enumerate(COUNTS):
        if count:
            query = np.einsum("tw,wnh->nth", numpy_norm(x[row]), block["text/query"])
            key, value = (
                np.einsum("sw,wnh->nsh", text[row, :count], block[f"text/{name}"])
                for name in ("key", "value")
            )
            weight = np.exp(query @ np.swapaxes(key, -1, -2) / np.sqrt(WIDTH // HEADS))
            attended = weight / weight.sum(-1, keepdims=True) @ value
            out[row] = np.einsum("nth,nhw->tw", attended, block["text/out"])
    return out


def numpy_dit(weights, patches, positions, time, labels, text=None):
    """Frames, rows and columns have 6, 10 and 10 of the 26 channels."""
    kernel = {
        "/".join(str(k.key) for k in path if hasattr(k, "key")): np.asarray(x, np.float64)
        for path, x in jax.tree_util.tree_leaves_with_path(weights)
    }
    coordinates = np.moveaxis(np.asarray(positions), -1, 0)
    embedded = [numpy_sinusoids(x, n) for x, n in zip(coordinates, (6, 10, 10), strict=True)]
    x = patches @ kernel["patches/kernel"] + np.concatenate(embedded, axis=-1)
    timed = numpy_sinusoids(np.asarray(time, float) * 1000, 256)
    timed = silu(timed @ kernel["time_in/kernel"]) @ kernel["time_out/kernel"]
    condition = silu(timed + kernel["classes/embedding"][np.asarray(labels)])
    if text is not None:
        text = gelu(numpy_norm(np.asarray(text, float)) @ kernel["text/text_in/kernel"])
        text = text @ kernel["text/text_out/kernel"]
    for layer in range(LAYERS):
        block = {
            name.removeprefix("blocks/image/").removesuffix("/kernel"): x[layer]
            for name, x in kernel.items()
            if name.startswith("blocks/image/")
        }
        modulations = np.einsum("bw,wkv->kbv", condition, block["modulation"])
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulations
        y = numpy_modulated(x, shift, scale)
        query, key, value = (
            np.einsum("btw,wnh->bnth", y, block[name]) for name in ("query", "key", "value")
        )
        logits = query @ np.swapaxes(key, -1, -2) / np.sqrt(WIDTH // HEADS)
        weight = np.exp(logits - logits.max(-1, keepdims=True))
        attended = weight / weight.sum(-1, keepdims=True) @ value
        x = x + gate[:, None] * np.einsum("bnth,nhw->btw", attended, block["out"])
        if text is not None:
            x = x + numpy_text_attention(x, text, block)
        y = numpy_modulated(x, mlp_shift, mlp_scale)
        x = x + mlp_gate[:, None] * (gelu(y @ block["mlp/up"]) @ block["mlp/down"])
    shift, scale = np.einsum("bw,wkv->kbv", condition, kernel["modulation/kernel"])
    return numpy_modulated(x, shift, scale) @ kernel["head/kernel"]


@BOTH
def test_dit_equals_a_dense_one_in_float64(sizes):
    inputs, texts = make_inputs(classes=sizes["classes"]), texts_of(sizes)
    expected = numpy_dit(make_weights(sizes), *inputs, texts.get("text"))
    assert expected.std() > 0.5
    np.testing.assert_allclose(predict(*inputs, sizes=sizes), expected, atol=1e-4)


def test_a_text_is_seen_by_its_row_as_far_as_it_goes():
    inputs, texts = make_inputs(classes=0), texts_of(OF_TEXTS)
    found = predict(*inputs, sizes=OF_TEXTS)
    others = {"text": texts["text"].at[:, 3:].add(1.0), "text_ids": texts["text_ids"]}
    np.testing.assert_array_equal(predict(*inputs, sizes=OF_TEXTS, **others), found)
    others["text"] = texts["text"].at[0, 2].add(1.0)
    changed = predict(*inputs, sizes=OF_TEXTS, **others)
    assert (changed[0] != found[0]).any(axis=-1).all()
    np.testing.assert_array_equal(changed[1], found[1])
    # Shorter arrays of the same texts give the same.
    shorter = {name: x[:, :3] for name, x in texts.items()}
    np.testing.assert_allclose(predict(*inputs, sizes=OF_TEXTS, **shorter), found, atol=1e-5)


def test_a_row_without_text_has_finite_gradients():
    inputs, texts = make_inputs(classes=0), texts_of(OF_TEXTS)
    texts["text_ids"] = jnp.full_like(texts["text_ids"], -1)
    sizes = tuple(OF_TEXTS.items())
    found = jax.jit(jax.grad(lambda x: jnp.sum(run(x, *inputs, sizes=sizes, **texts) ** 2)))(
        make_weights(OF_TEXTS)
    )
    for path, x in jax.tree_util.tree_leaves_with_path(found):
        assert np.isfinite(x).all(), path
        assert bool((x == 0).all()) == ("text" in str(path)), path


@pytest.mark.slow
@BOTH
def test_dit_begins_with_an_output_of_0_and_blocks_that_change_nothing(sizes):
    inputs, texts = make_inputs(classes=sizes["classes"]), texts_of(sizes)

    @jax.jit
    def outputs():
        model = make_model(sizes)
        hidden = model.hidden(*inputs, **texts)
        patches, positions = inputs[:2]
        embedded = model.patches(patches) + dit.grid_sinusoids(positions, WIDTH)
        zeros = jnp.zeros((BATCH, 1, WIDTH))
        return model(*inputs, **texts), hidden, dit.modulate(embedded, zeros, zeros)

    output, hidden, expected = outputs()
    assert output.shape == (BATCH, SEQ_LEN, PATCH_CHANNELS)
    assert hidden.shape == (BATCH, SEQ_LEN, WIDTH)
    np.testing.assert_array_equal(output, jnp.zeros_like(output))
    np.testing.assert_allclose(hidden, expected, atol=1e-5)


def test_dit_sees_its_own_segment_only():
    patches, positions, *row = make_inputs()
    segment_ids = jnp.tile(jnp.arange(SEQ_LEN, dtype=jnp.int32) // 11, (BATCH, 1))
    before = predict(patches, positions, *row, segment_ids)
    after = predict(patches.at[:, :11].add(1.0), positions, *row, segment_ids)
    np.testing.assert_array_equal(before[:, 11:], after[:, 11:])
    assert (before[:, :11] != after[:, :11]).all()


@BOTH
def test_dit_divided_among_devices_in_any_order_equals_the_whole(sizes):
    degrees = st.Degrees(data=2, group=1, ring=2, team=2)
    mesh = st.make_mesh(degrees, axis_type="auto", devices=jax.devices()[: degrees.num_devices])
    attention = st.Attention(mesh, causal=False)
    weights, texts = make_weights(sizes), texts_of(sizes)
    patches, positions, *row = make_inputs(classes=sizes["classes"])
    expected = predict(patches, positions, *row, sizes=sizes)

    def local_attention(query, key, value, *, segment_ids=None):
        return attention.local(query, key, value, segment_ids, segment_ids)[0]

    def one_device(weights, texts, *inputs):
        graph = graph_of(tuple(sizes.items()), local_attention)
        return nnx.merge(graph, weights)(*inputs, **texts)

    spec = attention.sequence_spec
    order = np.random.default_rng(2).permutation(SEQ_LEN)
    inputs = [patches[:, order], positions[:, order], *row]
    specs = [spec, spec, P(spec[0]), P(spec[0])]
    in_specs = (P(), P(spec[0]), *specs)
    actual = jax.jit(jax.shard_map(one_device, mesh=mesh, in_specs=in_specs, out_specs=spec))(
        weights, texts, *inputs
    )
    np.testing.assert_allclose(actual, expected[:, order], atol=1e-4)


@pytest.mark.slow
@BOTH
def test_dit_in_bfloat16_has_float32_weights_output_and_gradients(sizes):
    inputs, texts = make_inputs(classes=sizes["classes"]), texts_of(sizes)
    weights, exact = make_weights(sizes), predict(*inputs, sizes=sizes)
    sizes = tuple((sizes | {"dtype": "bfloat16"}).items())

    @jax.jit
    def gradients(weights):
        def loss(weights):
            model = nnx.merge(graph_of(sizes, dense_attention), weights)
            hidden = model.hidden(*inputs, **texts)
            output = model.output(hidden)
            return jnp.mean(output**2), (hidden, output)

        return jax.grad(loss, has_aux=True)(weights)

    found, (hidden, output) = gradients(weights)
    assert (hidden.dtype, output.dtype) == (jnp.bfloat16, jnp.float32)
    assert jnp.linalg.norm(output - exact) < 0.05 * jnp.linalg.norm(exact)
    for path, x in jax.tree_util.tree_leaves_with_path(jax.device_get(found)):
        assert x.dtype == np.float32, path
        values = x[x != 0]
        assert values.size, path
        if "kernel" in str(path):
            # Gradients that were rounded on their way would all be values of bfloat16.
            assert (values != values.astype(jnp.bfloat16)).mean() > 0.5, path


@BOTH
def test_hooks_wrap_each_layer_and_the_functions_of_tokens(sizes):
    hooks, calls = noted_hooks()
    texts = texts_of(sizes)
    jax.eval_shape(lambda: make_model(sizes, hooks=hooks)(*make_inputs(), **texts))
    # The scan over layers traces one of them.
    assert calls.count("wrap_layer") == calls.count("tiled") == 1
    assert calls.count("attend_whole") == len(texts) / 2
    # Attention to a text copies the tokens and the text.
    assert calls.count("copy_to_tensor") == 2 + len(texts)
    assert calls.count("reduce_from_tensor") == 2 + len(texts) / 2


def test_a_text_is_given_where_there_is_one():
    with refused(InputError, "got a text. Leave out text."):
        make_model(SIZES)(*make_inputs(), **texts_of(OF_TEXTS))
    with refused(InputError, "got no text. Give text."):
        make_model(OF_TEXTS)(*make_inputs(classes=0))


def test_dit_names_what_does_not_fit():
    with refused(InputError, width=28):
        make_model(SIZES, heads=4)
    with refused(InputError, width=6):
        make_model(SIZES, width=6, heads=1)
