"""Training steps: the same losses on every mesh, and however memory is saved."""

import dataclasses
import functools
import gc
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fake_cudnn
import startrail_jax as st
from models.config import RopeConfig
from models.gpt import GPT
from models.parts.gpt import gpt_weights
from programs import SMALL, learnable_tokens, make_config, placed, train_steps
from programs import make_program as program_of
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.config import AttentionConfig, OptimizerConfig
from trainer.data.batches import place
from trainer.gpt.batches import next_token_batch
from trainer.gpt.config import DataConfig
from trainer.parallel.optimizer import make_optimizer
from trainer.parallel.remat import rematerialised

STEPS = 10
END = 7  # Ends a document.
CONFIG = make_config(SMALL, optimizer=OptimizerConfig(learning_rate=1e-2), steps=STEPS, seq_len=64)


@functools.cache
def make_program(degrees, **changes):
    return program_of(dataclasses.replace(CONFIG, **changes), degrees)


def windows(step):
    return learnable_tokens(CONFIG, step, END)


def batch(program, step, end=END):
    layout = program.attention.layout
    return place(
        next_token_batch(windows(step), layout=layout, end_of_document=end), program.batch_sharding
    )


@pytest.fixture(scope="module")
def initial_state():
    return jax.device_get(make_program(st.Degrees()).initialise())


def losses_of(program, state, steps=STEPS):
    """Losses and norms of the gradients of a batch of which little counts, and of so many steps."""
    layout = program.attention.layout
    counted = np.zeros((CONFIG.batch_size, CONFIG.seq_len), np.float32)
    # One device holds a single token that counts, and most hold none.
    counted[0, 3] = counted[3, 24:40] = 1
    uneven = batch(program, 0)
    weights = jax.device_put(layout.permute(counted), uneven.weights.sharding)
    _, metrics = program.train_step(
        placed(state, program.state_shapes), uneven._replace(weights=uneven.weights * weights)
    )
    losses = [(float(metrics.loss), float(metrics.gradient_norm))]
    others, _ = train_steps(program, state, (batch(program, step) for step in range(steps)))
    return np.array([*losses, *others])


@pytest.fixture(scope="module")
def one_device(initial_state):
    return losses_of(make_program(st.Degrees()), initial_state)


STARTRAIL = st.Degrees.startrail(8, c=2)
# Every scheme, every ZeRO level (over the whole mesh and a part), every remat: each with another.
SETTINGS = {
    "StarTrail": (STARTRAIL, {}),
    "Ring Attention, zero 1": (st.Degrees.ring_attention(8), {"zero": 1}),
    "all-gather, zero 2": (st.Degrees.all_gather(8), {"zero": 2}),
    "Ulysses, zero 3": (st.Degrees.ulysses(8), {"zero": 3}),
    "2D-Attention, full remat": (st.Degrees.loongtrain(8, head=2), {"remat": "full"}),
    "teams, attention saved, heads in parts": (
        st.Degrees(team=2, ring=4),
        {"remat": "attention_saved", "attention": AttentionConfig(head_chunks=2)},
    ),
    "tiles, projections saved, tiled": (
        *(st.Degrees(team=4, group=2), {"remat": "projections_saved", "tile": 8}),
    ),
    "StarTrail x Ulysses, accumulation": (
        st.Degrees.startrail(8, c=2, head=2),
        {"gradient_accumulation": 2},
    ),
    "data, zero 3, attention saved": (
        st.Degrees(data=2, team=2, group=2),
        {"zero": 3, "remat": "attention_saved", "attention": AttentionConfig(keep_gathered=True)},
    ),
    "zero 3, submesh": (STARTRAIL, {"zero": 3, "zero_axes": ("team",)}),
    "zero 2, submesh, accumulation": (
        STARTRAIL,
        {"zero": 2, "zero_axes": ("ring", "team"), "gradient_accumulation": 2},
    ),
    "zero 1, accumulation": (STARTRAIL, {"zero": 1, "gradient_accumulation": 2}),
    "tensor, products saved": (
        st.Degrees(tensor=2, team=2, ring=2),
        {"remat": "products_saved", "tile": 16},
    ),
    "tensor, few key heads, zero 3": (
        st.Degrees(tensor=4, head=2),
        {"zero": 3, "remat": "projections_saved", "tile": 16},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("degrees", "changes"), SETTINGS.values(), ids=SETTINGS.keys())
def test_losses_do_not_depend_on_how_it_runs(degrees, changes, one_device, initial_state):
    losses = losses_of(make_program(degrees, **changes), initial_state)
    assert losses[-1, 0] < losses[1, 0] - 0.5
    np.testing.assert_allclose(losses[0], one_device[0], rtol=1e-6)
    np.testing.assert_allclose(losses[:, 0], one_device[:, 0], rtol=1e-4)
    # Adam would hide a wrong factor of the gradients, so that their norms are compared too.
    # Rounding changes norms more than losses.
    np.testing.assert_allclose(losses[:, 1], one_device[:, 1], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [st.Degrees(), STARTRAIL, st.Degrees(data=2, head=2)])
def test_losses_on_kernels_for_packed_documents(degrees, initial_state, monkeypatch):
    """Those of 30 steps on plain XLA; the kernels are emulated."""
    fake_cudnn.install(monkeypatch)
    fake_cudnn.short_levels(monkeypatch)
    try:
        program = program_of(CONFIG, degrees)
        sizes = dict(seq_len=CONFIG.seq_len, heads=4, kv_heads=2, head_dim=8, packed=True)
        assert program.attention.explain(**sizes).backend == "cudnn"
        losses = losses_of(program, initial_state, steps=30)
    finally:
        jax.clear_caches()
    monkeypatch.undo()
    expected = losses_of(make_program(st.Degrees()), initial_state, steps=30)
    np.testing.assert_allclose(losses[:, 0], expected[:, 0], rtol=1e-4)
    np.testing.assert_allclose(losses[:, 1], expected[:, 1], rtol=1e-3)


def test_attention_has_the_options_of_the_config():
    options = AttentionConfig(gradient_dtype="bfloat16", keep_gathered=True, backend="fa4")
    attention = make_program(STARTRAIL, attention=options).attention
    assert {name: getattr(attention, name) for name in options.options} == options.options


@pytest.fixture(scope="module")
def dense_gradients(initial_state):
    """Loss and gradients of the first batch, by a model whose attention knows nothing of ours."""
    whole = next_token_batch(windows(0), layout=st.Layout("contiguous", 1), end_of_document=END)
    whole = jax.tree.map(jnp.asarray, whole)
    model = GPT(CONFIG.model, attention_fn=dense_attention, rngs=nnx.Rngs(0))
    graph = nnx.graphdef(model)

    @jax.jit
    @jax.value_and_grad
    def dense(weights):
        model = nnx.merge(graph, weights)
        logits = model(whole.tokens, whole.positions, whole.segment_ids)
        likely = jnp.take_along_axis(jax.nn.log_softmax(logits), whole.targets[:, :, None], 2)
        return -(likely[:, :, 0] * whole.weights).sum() / whole.weights.sum()

    return dense(initial_state.weights)


def dense_attention(query, key, value, *, segment_ids):
    length = query.shape[1]
    mask = jnp.tril(jnp.ones((length, length), bool))[None, None]
    mask &= segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return jax.nn.dot_product_attention(query, key, value, mask=mask)


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize(
    ("degrees", "changes"),
    [
        pytest.param(
            *(st.Degrees(data=2, group=2, team=2), {"zero": 1, "gradient_accumulation": 2}),
            marks=pytest.mark.quick,
        ),
        (st.Degrees(data=2, team=2, ring=2), {"zero": 2, "zero_axes": ("ring", "team")}),
        (st.Degrees(tensor=4, head=2), {"zero": 3, "tile": 7, "remat": "full"}),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_dense_model(degrees, changes, dense_gradients, initial_state):
    program = make_program(degrees, **changes)
    weights = placed(initial_state.weights, program.state_shapes.weights)
    actual = jax.jit(program.gradients)(weights, batch(program, 0))
    total, weight, _ = program.losses(weights, batch(program, 0))
    np.testing.assert_allclose(total / weight, dense_gradients[0], rtol=1e-5)
    leaves = jax.tree_util.tree_leaves_with_path(dense_gradients)
    for (path, wanted), given in zip(leaves, jax.tree.leaves(actual), strict=True):
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(given, wanted, atol=1e-5 * scale, rtol=1e-5, err_msg=str(path))


@pytest.mark.slow
def test_other_parts_of_the_model_run_alike():
    model = dataclasses.replace(CONFIG.model, mlp="gelu", tied_head=True)
    expected = make_program(st.Degrees(), model=model)
    state = jax.device_get(expected.initialise())
    degrees = st.Degrees(tensor=2, data=2, team=2)
    actual = make_program(degrees, model=model, zero=3, tile=16, gradient_accumulation=2)
    np.testing.assert_allclose(
        losses_of(actual, state, steps=6), losses_of(expected, state, steps=6), rtol=1e-4
    )


# Three local layers and a global one, with all else that layers of a pretrained model may have.
PATTERN = dataclasses.replace(
    CONFIG.model,
    layers=4,
    windows=(9, 9, 9, "none"),
    rope=RopeConfig(bases=(100.0, 100.0, 100.0, 1000.0)),
    qk_norm=True,
    qk_norm_over="heads",
    sinks=True,
    softcap=3.0,
    output_softcap=4.0,
    scale_dim=3,
    mlp="geglu",
    norms="both",
    norm_offset=True,
    scaled_embedding=True,
)


@pytest.mark.slow
def test_losses_of_layers_that_differ_do_not_depend_on_how_it_runs():
    expected = make_program(st.Degrees(), model=PATTERN)
    state = jax.device_get(expected.initialise())
    wanted = losses_of(expected, state, steps=2)
    assert wanted[-1, 0] < wanted[1, 0]
    for degrees, changes in (
        (STARTRAIL, {"zero": 3, "remat": "attention_saved", "tile": 8}),
        (st.Degrees(tensor=2, head=2, ring=2), {"zero": 2, "remat": "full"}),
    ):
        losses = losses_of(make_program(degrees, model=PATTERN, **changes), state, steps=2)
        np.testing.assert_allclose(losses[:, 0], wanted[:, 0], rtol=1e-4)
        np.testing.assert_allclose(losses[:, 1], wanted[:, 1], rtol=1e-3)


@pytest.mark.parametrize("degrees", [st.Degrees(), st.Degrees(ring=2, head=2)])
def test_layers_that_offload_have_the_gradients_of_layers_that_do_not(degrees):
    attention = st.Attention(
        st.make_mesh(degrees, "auto", jax.devices()[: degrees.num_devices]), causal=True
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 16, 20)).astype("f4")
    weights = rng.normal(size=(3, 20, 3, 4, 5)).astype("f4") / 5

    def layer(weights, x):
        query, key, value = jnp.einsum("btd,dcnh->cbtnh", x, weights)
        return x + attention(query, key, value).reshape(x.shape)

    def gradients(layer):
        def loss(weights, x):
            out, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, weights)
            return jnp.sum(jnp.sin(out))

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(weights, x)

    offloads = rematerialised(layer, remat="attention_saved", offload=True, gathers_weights=False)
    chex.assert_trees_all_close(gradients(offloads), gradients(layer), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_moments_on_the_host_change_nothing(kind, tmp_path):
    optimizer = dataclasses.replace(CONFIG.optimizer, kind=kind)
    plain, offloads = (
        make_program(STARTRAIL, zero=3, optimizer=optimizer, offload_optimizer=x)
        for x in (False, True)
    )
    start, batches = jax.device_get(plain.initialise()), [batch(plain, step) for step in range(2)]
    expected, state = train_steps(plain, start, batches)
    found, moved = train_steps(offloads, start, batches)
    np.testing.assert_array_equal(found, expected)
    arrays = [x for x in jax.tree.leaves(moved.optimizer) if x.ndim]
    assert {x.sharding.memory_kind for x in arrays} == {"pinned_host"}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(2, moved, {})
        on_device, _ = checkpoints.restore(plain.state_shapes)
        on_host, _ = checkpoints.restore(offloads.state_shapes)
    chex.assert_trees_all_equal(on_device, state)
    chex.assert_trees_all_equal(jax.device_get(on_host), jax.device_get(state))
    shardings = [jax.tree.map(lambda x: x.sharding, x) for x in (on_host, moved)]
    assert shardings[0] == shardings[1]


def test_program_does_not_grow_with_the_depth_of_a_pattern():
    def operations(layers):
        model = dataclasses.replace(PATTERN, layers=layers)
        program = make_program(st.Degrees(), model=model, remat="attention_saved")
        lowered = program.train_step.lower(program.state_shapes, program.batch_shapes)
        lines = lowered.as_text().splitlines()
        return sum(" = " in line and "stablehlo.constant" not in line for line in lines)

    # Other sizes are neither 12 nor 44: what has the same shape is lowered once.
    assert operations(12) == operations(44)


@pytest.mark.slow
def test_no_more_products_are_recomputed_than_remat_says():
    """Matrix products in the loops over layers, of which attention has none of these shapes."""

    def products(remat):
        program = make_program(st.Degrees(), remat=remat)
        text = program.train_step.lower(program.state_shapes, program.batch_shapes).as_text()
        return text.count("stablehlo.dot_general")

    least = products("none")
    assert products("products_saved") == least
    assert products("projections_saved") == least + 2
    assert products("attention_saved") == least + 2 + 4


def loss_of_61_tokens(degrees, initial_state):
    """Loss and norm of the gradient of rows that are no multiple of anything."""
    program = make_program(degrees, seq_len=61, data=DataConfig(mask_documents=False))
    layout = program.attention.layout
    whole = next_token_batch(windows(0)[:, :62], layout=layout)
    assert whole.tokens.shape == program.tokens_shape == (4, layout.padded_length(61))
    weights = placed(initial_state.weights, program.state_shapes.weights)
    loss, gradients = jax.jit(program.gradients)(weights, place(whole, program.batch_sharding))
    return jax.device_get((loss, optax.tree.norm(gradients)))


@pytest.fixture(scope="module")
def one_device_of_61_tokens(initial_state):
    return loss_of_61_tokens(st.Degrees(), initial_state)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [STARTRAIL, st.Degrees(tensor=4)], ids=str)
def test_sequences_of_any_length_have_the_loss_of_one_device(
    degrees, initial_state, one_device_of_61_tokens
):
    found = loss_of_61_tokens(degrees, initial_state)
    np.testing.assert_allclose(found, one_device_of_61_tokens, rtol=2e-5)


@pytest.mark.slow
def test_bfloat16_differs_by_its_rounding_alone(initial_state, one_device):
    model = dataclasses.replace(CONFIG.model, dtype="bfloat16")
    losses = [
        losses_of(make_program(degrees, model=model, **changes), initial_state)
        for degrees, changes in ((st.Degrees(), {}), (STARTRAIL, {"zero": 3, "tile": 8}))
    ]
    np.testing.assert_allclose(losses[0][:, 0], one_device[:, 0], rtol=2e-2)
    np.testing.assert_allclose(losses[1][:, 0], losses[0][:, 0], rtol=1e-2)


@pytest.mark.slow
def test_initial_weights_do_not_depend_on_the_mesh(initial_state):
    state = make_program(st.Degrees(tensor=2, data=2, team=2), zero=3).initialise()
    chex.assert_trees_all_equal(jax.device_get(state), initial_state)
    # Layers have different weights.
    kernels = initial_state.weights["blocks"]["mlp"]["up"]["kernel"]
    (kernel,) = jax.tree.leaves(kernels)
    assert (kernel[0] != kernel[1]).all()


def test_a_step_that_is_not_finite_changes_nothing(initial_state):
    program = make_program(STARTRAIL)
    infinite = jax.tree.map(lambda x: x + np.inf, initial_state.weights)
    broken = initial_state._replace(weights=infinite)
    after, metrics = program.train_step(placed(broken, program.state_shapes), batch(program, 0))
    assert not metrics.finite
    chex.assert_trees_all_equal(jax.device_get(after), broken)


@pytest.mark.slow
def test_weights_are_decayed_but_for_norms(initial_state):
    optimizer = dataclasses.replace(CONFIG.optimizer, weight_decay=1e4, warmup_fraction=0.0)
    program = make_program(st.Degrees(), optimizer=optimizer)
    state, _ = program.train_step(program.initialise(), batch(program, 0))
    before, after = (
        dict(nnx.to_flat_state(weights)) for weights in (initial_state.weights, state.weights)
    )
    for path, x in after.items():
        grown = np.abs(x[...]).max() / np.abs(before[path][...]).max()
        assert (grown > 50) == ("scale" not in path), path


def test_biases_and_sinks_are_not_decayed():
    model = dataclasses.replace(CONFIG.model, qkv_bias=True, sinks=True)
    optimizer = make_optimizer(CONFIG.optimizer, 10, gpt_weights(model))
    layer = {"query_bias": jnp.ones(3), "sinks": jnp.ones(3), "query": {"kernel": jnp.ones(3)}}
    weights = {"blocks": {"attention": layer}}
    gradients = jax.tree.map(jnp.zeros_like, weights)
    updates, _ = optimizer.update(gradients, optimizer.init(weights), weights)
    updates = updates["blocks"]["attention"]
    assert not updates["query_bias"].any()
    assert not updates["sinks"].any()
    assert (updates["query"]["kernel"] < 0).all()


@pytest.mark.slow
def test_program_is_freed_when_it_is_not_needed():
    """train() may be called hundreds of times in one process."""
    program = make_program.__wrapped__(st.Degrees(team=2), tile=8)
    program.losses.trace(program.state_shapes.weights, program.batch_shapes)
    program.train_step.trace(program.state_shapes, program.batch_shapes)
    freed = weakref.ref(program)
    del program
    gc.collect()
    assert freed() is None


def test_losses_of_an_evaluation_are_sums_over_all_parts_of_a_batch(initial_state):
    programs = [make_program(st.Degrees(), gradient_accumulation=parts) for parts in (1, 2)]
    whole, in_parts = (
        program.losses(placed(initial_state, program.state_shapes).result, batch(program, 0))
        for program in programs
    )
    np.testing.assert_allclose(in_parts[:2], whole[:2], rtol=1e-6)
