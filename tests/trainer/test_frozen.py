"""Weights frozen by patterns of their names: in steps, on every mesh, in runs and in exports."""

import dataclasses
import json
import re
import shutil
from fnmatch import fnmatchcase

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import pretrained
import startrail_jax as st
import train
from models.config import ExpertsConfig
from programs import (
    SMALL,
    make_config,
    make_dit_config,
    make_program,
    make_wan_config,
    train_steps,
)
from refusals import refused
from startrail_jax.errors import InputError
from trainer.config import LoraConfig, OptimizerConfig
from trainer.data.batches import place
from trainer.gpt.batches import next_token_batch
from trainer.gpt.export.writing import export_run
from trainer.gpt.objective import NextToken
from trainer.parallel.optimizer import make_optimizer
from trainer.parallel.partition import path_name
from trainer.parallel.state import bytes_of_device, describe_state
from trainer.pretrained import import_pretrained
from trainer.run.folder import open_run
from trainer.run.settings import save_config
from trainer.tasks import TASKS, load_train_config
from trainer.weights.adapters import restore_model

STEPS = 4
RATE = dict(learning_rate=3e-2, schedule="constant", warmup_fraction=0.0, clip_norm=0.5)
FROZEN = ("embed*", "*norm/scale", "blocks/attention/[qk]*")
CONFIG = make_config(
    SMALL | dict(tied_head=True),
    seq_len=64,
    steps=STEPS,
    optimizer=OptimizerConfig(**RATE),
    frozen=FROZEN,
)
MUON = dataclasses.replace(CONFIG, optimizer=OptimizerConfig(**RATE, kind="muon"))
EXPERTS = dataclasses.replace(
    make_config(
        SMALL | dict(feed_forwards=("mlp", "experts"), experts=ExpertsConfig(count=4, width=32)),
        seq_len=64,
    ),
    **dict(steps=STEPS, optimizer=OptimizerConfig(**RATE)),
    frozen=("*/expert_[ud]*", "expert_blocks/attention/*", "head*"),
)
MESHES = {
    "one device": (CONFIG, st.Degrees(), {}),
    "zero 1": (CONFIG, st.Degrees(data=2), dict(zero=1, gradient_accumulation=2)),
    "Muon": (MUON, st.Degrees(data=2), dict(zero=3)),
    "zero 3": (CONFIG, st.Degrees(data=2, ring=2, tensor=2), dict(zero=3, remat="full")),
    "zero 2": (
        *(CONFIG, st.Degrees.startrail(8, c=2)),
        dict(zero=2, gradient_accumulation=2, remat="attention_saved", tile=8),
    ),
    "sent to experts": (EXPERTS, st.Degrees(data=2, tensor=2), dict(zero=3, experts="dispatch")),
}


def random_batch(program, seed):
    tokens = np.random.default_rng(seed).integers(48, size=(4, 65))
    batch = next_token_batch(tokens, layout=program.attention.layout)
    return place(batch, program.batch_sharding)


def named(tree):
    """Arrays of a tree by their names."""
    return {path_name(x): np.asarray(y) for x, y in jax.tree_util.tree_leaves_with_path(tree)}


def matches(name, patterns):
    return any(fnmatchcase(name, x) for x in patterns)


@pytest.fixture(scope="module")
def references():
    """By config: a state, and losses and norms of the steps of a plain loop."""
    return {}


def reference(config, found):
    """All gradients of the whole model, of which those of frozen weights are set to zero."""
    if config in found:
        return found[config]
    whole = make_program(dataclasses.replace(config, frozen=()), st.Degrees())
    weights = whole.initialise().weights
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda x: x + rng.normal(size=x.shape).astype(x.dtype) / 8, weights)
    state = make_program(config, st.Degrees()).begin_with(jax.tree.map(np.asarray, weights))
    is_frozen = jax.tree_util.tree_map_with_path(
        lambda path, _: matches(path_name(path), config.frozen), weights
    )
    if config.optimizer.kind == "adamw":
        decayed = jax.tree_util.tree_map_with_path(
            lambda path, _: "scale" not in path_name(path), weights
        )
        optimizer = optax.adamw(3e-2, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed)
    else:
        # The clipped norm is that of the gradients below.
        loose = dataclasses.replace(config.optimizer, clip_norm=1e9)
        optimizer = make_optimizer(loose, STEPS, whole.objective.weights)
    first, moments, values = jax.device_get(state), optimizer.init(weights), []
    for step in range(STEPS):
        loss, gradients = jax.jit(whole.gradients)(weights, random_batch(whole, step))
        gradients = jax.tree.map(lambda x, y: 0 * x if y else x, gradients, is_frozen)
        norm = sum(float((x.astype(np.float64) ** 2).sum()) for x in named(gradients).values())
        norm **= 0.5
        values.append((float(loss), norm))
        gradients = jax.tree.map(lambda x, n=norm: x * min(1, 0.5 / n), gradients)
        updates, moments = optimizer.update(gradients, moments, weights)
        updates = jax.tree.map(lambda x, y: 0 * x if y else x, updates, is_frozen)
        weights = optax.apply_updates(weights, updates)
    found[config] = first, np.array(values)
    return found[config]


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize(("config", "degrees", "changes"), MESHES.values(), ids=MESHES.keys())
def test_steps_are_those_of_a_loop_that_masks_gradients(references, config, degrees, changes):
    """Losses and norms; frozen weights keep their bits, and all others move."""
    state, expected = reference(config, references)
    assert (expected[:, 1] > 0.5).all()  # All are clipped.
    losses, last = train_steps(
        (program := make_program(dataclasses.replace(config, **changes), degrees)),
        state,
        (random_batch(program, step) for step in range(STEPS)),
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    before, after = named(state.model), named(last.model)
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert np.array_equal(x, after[name]) == matches(name, config.frozen), name


def test_frozen_weights_have_no_moments_and_no_gradients():
    """In the state, in the program that XLA gets, and in the closed form, to the byte."""
    patterns = ("blocks/mlp/*", "head*")
    config = make_config(ema_decay=0.9, frozen=patterns, remat="none")
    program = make_program(config, st.Degrees())
    shapes, whole = program.state_shapes, make_program(make_config(), st.Degrees()).state_shapes
    names = [
        path_name(path)
        for part in (shapes.optimizer, shapes.average, shapes.weights)
        for path, _ in jax.tree_util.tree_leaves_with_path(part)
    ]
    assert not [x for x in names if "mlp/" in x or "head" in x]
    text = program.train_step.lower(shapes, program.batch_shapes).as_text()
    products = set(re.findall(r"dot_general.* -> tensor<(\S+)>", text))
    mlp, head = {"64x80xf32", "80x64xf32"}, {"64x96xf32", "96x64xf32"}
    assert not products & (mlp | head)

    formula = program.memory()
    assert formula.state_bytes == bytes_of_device(shapes)
    assert formula["frozen weights"] == bytes_of_device(shapes.frozen)
    trained = bytes_of_device(shapes.weights)
    assert formula["gradients"] == formula["weights"] == formula["average"] == trained
    assert formula["optimizer"] == pytest.approx(2 * trained, abs=16)
    assert formula["gradient of head, whole"] == 0
    without_average = [bytes_of_device(x._replace(average=None)) for x in (shapes, whole)]
    assert without_average[1] - without_average[0] == 2 * bytes_of_device(shapes.frozen)
    lines = describe_state(shapes)
    assert lines[0] == "model: 0.10 million parameters, of which some are trained: 0.04 million"
    assert lines[1] == (
        "frozen: blocks/mlp/down/kernel, blocks/mlp/gate/kernel, blocks/mlp/up/kernel, head/kernel"
    )


@pytest.mark.parametrize("make", [make_dit_config, make_wan_config])
def test_diffusion_transformers_keep_frozen_weights_out_of_the_average(make):
    config = make(frozen=("blocks/*", "time*"), ema_decay=0.9, zero=3)
    program = make_program(config, st.Degrees(data=2))
    shapes = program.state_shapes
    assert set(shapes.average) == set(shapes.weights) == set(shapes.model) - set(shapes.frozen)
    exact = program.memory()
    assert exact.state_bytes == bytes_of_device(shapes)
    assert named_shapes(shapes.result) == named_shapes(shapes.model)
    text = program.train_step.lower(shapes, program.batch_shapes).as_text()
    assert "all_gather" in text


def named_shapes(tree):
    return {path_name(x): y.shape for x, y in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frozen")
    changes = dict(devices=2, frozen=("embed*", "*/mlp/*"), ema_decay=0.5)
    with pretrained.three_steps(folder, **changes) as run_and_losses:
        yield run_and_losses


def test_run_goes_on_to_the_same_bits_and_is_exported_whole(run, tmp_path):
    config, losses = run
    assert losses.train[2] < losses.train[0]
    checkpoints = config.run_dir / "checkpoints"
    last = (checkpoints / "3" / "checksums.json").read_text()
    one = dataclasses.replace(config, zero=0, devices=1)
    for again, exact in ((config, True), (one, False)):
        shutil.rmtree(checkpoints / "3")
        # The frozen weights are those that the run has saved.
        found = train.train(again)
        np.testing.assert_allclose(found.train, losses.train[2:], rtol=0 if exact else 1e-5)
        np.testing.assert_allclose(found.validation, losses.validation, rtol=0 if exact else 1e-5)
        assert not exact or (checkpoints / "3" / "checksums.json").read_text() == last
    kinds = [json.loads(x)["arrays"] for x in (last, frozen_checksums(config.run_dir))]
    changing, fixed = ({x.removesuffix("/value") for x in kind} for kind in kinds)
    frozen = [f"blocks/mlp/{x}/kernel" for x in ("down", "gate", "up")]
    assert fixed == {f"frozen/{x}" for x in (*frozen, "embedding/embedding")}
    assert not [x for x in changing if "mlp/" in x or "embedding" in x]

    done = export_run(
        config.run_dir, load_train_config(config.run_dir / "config.json"), tmp_path / "out"
    )
    assert (done.step, done.files) == (3, 1)
    assert (tmp_path / "out" / "config.json").is_file()
    original = load_file(config.init_from.parent / "model.safetensors")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == original.keys()
    for name, x in original.items():
        is_frozen = "embed_tokens" in name or "mlp." in name
        assert np.array_equal(x, exported[name]) == is_frozen, name
    with refused(InputError, merge=True):
        export_run(config.run_dir, config, tmp_path / "merged", merge=True)


def frozen_checksums(run_dir):
    return (run_dir / "frozen" / "0" / "checksums.json").read_text()


def test_import_keeps_frozen_weights_apart(tmp_path):
    model = pretrained.REFERENCES / "llama"
    options = dict(steps=0, devices=1, tensorboard=False)
    found = []
    for name, frozen in (("whole", ()), ("parts", ("embed*",))):
        config = pretrained.make_config(model, run_dir=tmp_path / name, frozen=frozen, **options)
        import_pretrained(config)
        shapes = make_program(config, st.Degrees()).state_shapes.model
        weights, _ = restore_model(config.run_dir, config, shapes, note=print)
        found.append(named(weights))
    assert "embedding" in frozen_checksums(tmp_path / "parts")
    assert found[0].keys() == found[1].keys()
    for name, x in found[0].items():
        np.testing.assert_array_equal(x, found[1][name], err_msg=name)


@pytest.mark.quick
def test_patterns_that_do_not_fit_raise(tmp_path):
    def objective(model=None, make=make_config, **changes):
        config = make(model, **changes)
        return TASKS[config.kind].make_objective(config).sizes

    with refused(
        InputError, "embedding/embedding; got 'embd*', which matches none", "embedding/embedding"
    ):
        objective(frozen=("head*", "embd*"))
    with refused(InputError, "blocks/attention/key/kernel, ", "got 'BLOCKS/*'"):
        objective(frozen=("BLOCKS/*",))
    with refused(InputError, "must leave some weights to train; got 'blocks/*' '[a-z]*'", "all 13"):
        objective(make=make_dit_config, frozen=("blocks/*", "[a-z]*"))
    with refused(InputError, "got frozen=embed* head* and lora.rank"):
        make_config(frozen=("embed*", "head*"), lora=LoraConfig(rank=2))
    experts = dict(feed_forwards=("experts",), experts=ExpertsConfig(count=4, balance_rate=0.1))
    with refused(InputError, "*/choice_bias", "balance_rate=0.1, frozen=embed* expert_blocks/*"):
        objective(experts, frozen=("embed*", "expert_blocks/*"))
    assert objective(experts, frozen=("*/expert_*",)).frozen.experts == 1

    arguments = ["gpt_tiny", "--frozen", "embed*", "*norm/scale", "--run-dir", str(tmp_path)]
    config = train.read_command_line(arguments).settings
    assert config.frozen == ("embed*", "*norm/scale")
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    save_config(config, tmp_path / "config.json")
    for frozen, told in ((("embed*",), "embed*"), ((), "now")):
        other = dataclasses.replace(config, frozen=frozen, allow_changes=True)
        words = "--frozen 'embed*' '*norm/scale' there", "'embed*' '*norm/scale' to go on with"
        with refused(InputError, told, *words), open_run(other):
            pass


@pytest.mark.quick
def test_frozen_matrices_take_two_products_of_three():
    def flops(*frozen, **model):
        return NextToken(make_config(model, frozen=frozen)).flops_per_token

    layer = 64 * 80
    assert flops() - flops("*/mlp/*") == 2 * 3 * 3 * layer
    assert flops() - flops("*/mlp/up/*", "head*") == 2 * (3 * layer + 64 * 96)
    # No layer has a backward pass, in which a token sees 64.5 keys on average.
    whole, one = 6 * (3 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * layer) + 64 * 96), 3 * 4 * 64 * 64.5
    assert flops() == whole + 3 * one
    assert flops("embed*", "blocks/*") == whole / 3 + 4 * 64 * 96 + one
    # A table of ids is looked up, and norms are no matrices; a tied head is one.
    assert flops() == flops("embed*", "*norm/scale")
    assert flops(tied_head=True) - flops("embed*", tied_head=True) == 2 * 64 * 96
