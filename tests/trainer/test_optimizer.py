"""Muon and the schedules: what an update is, whatever the mesh and however layers are stacked."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import startrail_jax as st
from configs import RECIPES
from models.weights import projection, stacked
from programs import SMALL, make_config, make_program, train_steps
from train import read_command_line
from trainer.config import OptimizerConfig
from trainer.data.batches import place
from trainer.gpt.batches import next_token_batch
from trainer.parallel.optimizer import learning_rate, make_optimizer
from trainer.parallel.partition import Partition, path_name

MUON = OptimizerConfig(kind="muon", learning_rate=1e-2, weight_decay=0.0)
RATE = OptimizerConfig(learning_rate=1.0, schedule="wsd")
CONFIG = make_config(SMALL, optimizer=MUON, seq_len=32)
STEPS = 5


def orthogonal(matrix):
    """Keller Jordan's five steps, in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


# Shape of a layer's weight, and the rows of its matrix. Sizes are distinct.
MATRICES = {
    "query/kernel": ((6, 2, 5), 6),
    "out/kernel": ((2, 5, 6), 10),
    "up/kernel": ((6, 7), 6),
    "query/lora_a": ((6, 3), 6),
    "out/lora_a": ((2, 5, 3), 10),
    "query/lora_b": ((3, 2, 5), 3),
    "expert_down/kernel": ((4, 6, 7), 6),
    "expert_down/lora_a": ((4, 6, 3), 6),
}
DECLARED = {
    "query/kernel": projection("width | heads head_dim"),
    "out/kernel": projection("heads head_dim | width"),
    "up/kernel": projection("width | mlp"),
    "expert_down/kernel": projection("experts: expert_mlp | width"),
}


@pytest.mark.quick
def test_muon_makes_every_matrix_orthogonal_by_itself():
    rng = np.random.default_rng(0)
    gradients = {x: rng.normal(size=(3, *shape)) for x, (shape, _) in MATRICES.items()}
    config = dataclasses.replace(MUON, warmup_fraction=0.0, clip_norm=1e9)
    optimizer = make_optimizer(config, 10, stacked("blocks", DECLARED))
    rate = float(learning_rate(config, 10)(0))

    @jax.jit
    def updates(gradients):
        tree = {
            x: {"blocks": {x.split("/")[0]: {x.split("/")[1]: y}}} for x, y in gradients.items()
        }
        return optimizer.update(tree, optimizer.init(tree), tree)[0]

    found = updates(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), gradients))
    for name, (_, rows) in MATRICES.items():
        matrices = gradients[name].reshape(12 if name.startswith("expert") else 3, rows, -1)
        (of_name,) = jax.tree.leaves(found[name])
        # The first moment after one step is along the gradient; only its direction counts.
        for matrix, got in zip(matrices, of_name.reshape(matrices.shape) / -rate, strict=True):
            expected = orthogonal(matrix) * 0.2 * np.sqrt(max(matrix.shape))
            np.testing.assert_allclose(got, expected, atol=2e-4)


def test_muon_leaves_all_but_the_projections_of_layers_to_adamw():
    moments = {"muon": set(), "adamw": set()}
    state = make_program(CONFIG, st.Degrees()).state_shapes.optimizer
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        for kind, found in moments.items():
            _, moment, name = path_name(path).partition("/mu/")
            if moment and f"/{kind}/" in path_name(path):
                found.add(name)
    layer = [f"attention/{x}" for x in ("query", "key", "value", "out")]
    layer += [f"mlp/{x}" for x in ("gate", "up", "down")]
    assert moments["muon"] == {f"blocks/{x}/kernel" for x in layer}
    assert {"embedding/embedding", "head/kernel"} < moments["adamw"]
    assert all("scale" in x for x in moments["adamw"] - {"embedding/embedding", "head/kernel"})


@pytest.mark.parametrize(
    "degrees", [st.Degrees.startrail(8, c=2), st.Degrees(tensor=2, team=2, ring=2)], ids=str
)
def test_muon_splits_its_products_over_the_devices(degrees):
    """Every device computes its share of the layers, and weights are exchanged, never gathered."""
    layers, width = 8, 64
    mesh = st.make_mesh(degrees, axis_type="auto", devices=jax.devices()[:8])
    declared = {"blocks/up/kernel": projection("layers: width | mlp")}
    partition = Partition(mesh, declared, level=3)
    kernel = jax.ShapeDtypeStruct((layers, width, width), jnp.float32)
    weights = partition.sharded({"blocks": {"up": {"kernel": kernel}}})

    def compiled(partition_of_optimizer):
        optimizer = make_optimizer(MUON, 10, declared, partition_of_optimizer)
        state = partition.sharded(jax.eval_shape(optimizer.init, weights))
        shardings = jax.tree.map(lambda x: x.sharding, (weights, state))
        step = jax.jit(optimizer.update, out_shardings=shardings)
        options = {"xla_backend_optimization_level": 0}
        return step.lower(weights, state, weights).compile(options)

    split, unsplit = compiled(partition), compiled(None)
    text = split.as_text()
    assert "all-to-all(" in text
    assert "all-gather" not in text
    # Five steps of three products, and what is done with every element.
    least = layers / 8 * 5 * 3 * 2 * width**3
    assert least <= split.cost_analysis()["flops"] < 1.25 * least
    sizes = [x.memory_analysis().temp_size_in_bytes for x in (split, unsplit)]
    assert sizes[0] < 0.7 * sizes[1]


SETTINGS = {
    "StarTrail, zero 3": (st.Degrees.startrail(8, c=2), {"zero": 3}),
    "tensor": (st.Degrees(tensor=2, team=2), {}),
}


LION = OptimizerConfig(kind="lion", learning_rate=3e-3, weight_decay=0.0)


def losses_of(program, state):
    rng = np.random.default_rng(0)

    def batch():
        steps = rng.integers(3, size=(CONFIG.batch_size, CONFIG.seq_len + 1))
        tokens = np.cumsum(steps, axis=1) % CONFIG.model.vocab_size
        made = next_token_batch(tokens, layout=program.attention.layout)
        return place(made, program.batch_sharding)

    return train_steps(program, state, (batch() for _ in range(STEPS)))[0][:, 0]


@pytest.fixture(scope="module", params=[MUON, LION], ids=lambda x: x.kind)
def one_device(request):
    config = dataclasses.replace(CONFIG, optimizer=request.param)
    program = make_program(config, st.Degrees())
    state = jax.device_get(program.initialise())
    return config, state, losses_of(program, state)


@pytest.mark.slow
@pytest.mark.parametrize(("degrees", "changes"), SETTINGS.values(), ids=SETTINGS.keys())
def test_losses_do_not_depend_on_the_mesh(degrees, changes, one_device):
    config, state, expected = one_device
    losses = losses_of(make_program(dataclasses.replace(config, **changes), degrees), state)
    assert losses[-1] < losses[0] - 0.3
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_wsd_rises_stays_and_falls():
    config = dataclasses.replace(RATE, final_share=0.1)
    rates = np.array([float(learning_rate(config, 20)(count)) for count in range(20)])
    assert rates[0] == 1  # 5 % of 20 steps are one step.
    np.testing.assert_allclose(rates[:16], 1)
    np.testing.assert_allclose(rates[15:], np.linspace(1, 0.1, 6)[:5], rtol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_learning_rate_of_a_flag_ends_at_the_share_of_the_recipe(recipe):
    flags = [recipe, "--optimizer.learning-rate", "2e-6"]
    changed = read_command_line(flags).settings.optimizer
    rates = learning_rate(changed, 1000)(np.arange(1000))
    assert rates.max() == pytest.approx(2e-6)
    own = RECIPES[recipe]().optimizer
    last = float(learning_rate(own, 1000)(999)) / own.learning_rate
    assert rates[-1] / 2e-6 == pytest.approx(last)


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        (dict(schedule="linear"), [1 / 2, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        (dict(schedule="linear", final_share=0.5), [1 / 2, 1, *(1 - n / 12 for n in range(1, 6))]),
        (dict(schedule="constant"), [1 / 2, 1, 1, 1, 1, 1, 1]),
        (dict(schedule="inverse_sqrt"), [1 / 2, 1, *((2 / n) ** 0.5 for n in range(3, 8))]),
        (dict(schedule="inverse_sqrt", warmup_steps=0), [n**-0.5 for n in range(1, 8)]),
        (dict(), [1 / 2, 1, *(0.5 + 0.5 * np.cos(np.pi * n / 6) for n in range(1, 6))]),
        (dict(schedule="wsd", decay_fraction=2 / 7), [1 / 2, 1, 1, 1, 1, 2 / 3, 1 / 3]),
    ],
    ids=str,
)
def test_rates_are_those_of_the_schedule(changes, rates):
    """Of 7 steps, 2 of which are the warm-up."""
    config = OptimizerConfig(**dict(learning_rate=3.0, warmup_steps=2) | changes)
    found = [float(learning_rate(config, 7)(count)) for count in range(7)]
    np.testing.assert_allclose(found, 3 * np.array(rates), rtol=1e-6)
    same = dataclasses.replace(config, warmup_steps=None, warmup_fraction=config.warmup(7) / 7)
    assert found == [float(learning_rate(same, 7)(count)) for count in range(7)]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--optimizer.warmup-steps 800", "warmup_steps=800, steps=800"),
        ("--optimizer.warmup-steps 8 --optimizer.warmup-fraction 0.1", "warmup_fraction=0.1"),
        ("--optimizer.schedule constant --optimizer.final-share 0.1", "schedule='constant'"),
        ("--optimizer.epsilon 0", "optimizer.epsilon must be above 0 and finite"),
    ],
)
def test_settings_of_rates_that_do_not_fit_raise(flags, words, capsys):
    with pytest.raises(SystemExit):
        read_command_line(["gpt_tiny", *flags.split()])
    shown = capsys.readouterr()
    assert words in " ".join((shown.out + shown.err).replace("│", " ").split())


def test_schedule_without_an_end_leaves_out_that_of_the_recipe():
    flags = ["llama3_8b", "--optimizer.schedule"]
    assert read_command_line([*flags, "constant"]).settings.optimizer.final_share is None
    assert read_command_line([*flags, "linear"]).settings.optimizer.final_share == 0.1


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_epsilon_is_that_of_adamw(kind):
    """In the first step, the moments without their bias are the gradient and its square."""
    config = OptimizerConfig(
        **dict(kind=kind, learning_rate=1.0, warmup_steps=0, weight_decay=0.0, epsilon=0.25)
    )
    optimizer, weights = make_optimizer(config, 10, {}), {"embedding": jnp.ones((2, 2))}
    gradients = {"embedding": jnp.asarray([[0.5, -0.25], [0.125, 0.0]])}
    updates, _ = optimizer.update(gradients, optimizer.init(weights), weights)
    x, rate = np.asarray(gradients["embedding"]), float(learning_rate(config, 10)(0))
    np.testing.assert_allclose(updates["embedding"], -rate * x / (np.abs(x) + 0.25), rtol=1e-5)


def test_lion_steps_by_the_sign_of_its_moment():
    """Two steps beside algorithm 2 of https://arxiv.org/abs/2302.06675, with decay of matrices."""
    config = OptimizerConfig(kind="lion", learning_rate=0.5, warmup_steps=0, clip_norm=1e9)
    declared = stacked("blocks", {"up/kernel": projection("width | mlp")})
    optimizer, rng = make_optimizer(config, 10, declared), np.random.default_rng(0)
    weights = {"blocks": {"up": {"kernel": jnp.asarray(rng.normal(size=(2, 3, 5)))}}}
    state, moment = optimizer.init(weights), 0.0
    for step in range(2):
        gradient = rng.normal(size=(2, 3, 5)).astype(np.float32)
        gradients = jax.tree.map(lambda _, x=gradient: jnp.asarray(x), weights)
        updates, state = optimizer.update(gradients, state, weights)
        (weight,), (update,) = (jax.tree.leaves(x) for x in (weights, updates))
        signs = np.sign(0.9 * moment + 0.1 * gradient)
        expected = -float(learning_rate(config, 10)(step)) * (signs + 0.1 * np.asarray(weight))
        np.testing.assert_allclose(update, expected, rtol=1e-6)
        moment = 0.95 * moment + 0.05 * gradient
        weights = jax.tree.map(jnp.add, weights, updates)


def test_wsd_may_have_neither_warm_up_nor_end():
    config = dataclasses.replace(RATE, warmup_fraction=0.0, decay_fraction=0.0)
    assert [float(learning_rate(config, 3)(count)) for count in range(3)] == [1, 1, 1]
    config = dataclasses.replace(RATE, warmup_fraction=0.5, decay_fraction=0.5)
    rates = [float(learning_rate(config, 4)(count)) for count in range(4)]
    np.testing.assert_allclose(rates, [1 / 2, 1, 2 / 3, 1 / 3], rtol=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_gradients_are_clipped_to_their_norm(kind):
    """The first moments after one step tell: updates do not depend on the scale of gradients."""
    config = OptimizerConfig(kind=kind, learning_rate=1.0, clip_norm=0.5)
    optimizer = make_optimizer(config, 10, stacked("blocks", DECLARED))
    weights = {"embedding": jnp.ones((4, 3)), "blocks": {"up": {"kernel": jnp.ones((2, 3, 4))}}}

    def moments(gradients):
        state = optimizer.update(gradients, optimizer.init(weights), weights)[1]
        return [
            x
            for path, x in jax.tree_util.tree_leaves_with_path(state)
            if "/mu/" in f"{path_name(path)}/"
        ]

    large = jax.tree.map(lambda x: 3 * x, weights)
    norm = float(np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(large))))
    clipped = moments(jax.tree.map(lambda x: x * (config.clip_norm / norm), large))
    assert len(clipped) > 1
    for x, y in zip(moments(large), clipped, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)
