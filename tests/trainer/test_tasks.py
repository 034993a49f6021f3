"""The table of tasks: a third task needs a folder and one line in it, and no other file."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import plan
import sample
import startrail_jax as st
import train
from configs import RECIPES
from letters.config import LettersConfig
from letters.objective import LetterBatch
from letters.task import LettersTask
from models.hooks import Hooks
from plans import MODELS
from programs import interrupt_after, make_program
from refusals import refused
from startrail_jax.errors import InputError, UnsupportedError
from trainer import planning, tasks
from trainer.config import OptimizerConfig
from trainer.gpt.pretrained.plan_model import is_file_model
from trainer.loop import Losses
from trainer.parallel.abstract_step import AbstractStep
from trainer.planner.hardware import GPUS, Cluster
from trainer.run.settings import save_config
from trainer.task import Smaller


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "letters", LettersTask())  # The line.
    return LettersConfig(
        optimizer=OptimizerConfig(learning_rate=0.02, weight_decay=0.0),
        devices=4,
        steps=60,
        batch_size=8,
        validation_every=100,
        validation_sequences=2,
        tensorboard=False,
        run_dir=tmp_path / "run",
    )


@pytest.mark.slow
def test_third_task_learns_resumes_and_draws(config, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 10)
        first = train.train(config)
    assert (len(first.train), first.validation) == (10, None)
    path = config.run_dir / "config.json"
    assert json.loads(path.read_text())["kind"] == "letters"

    # Its config.json is a recipe, and the flags are those of its config.
    again = train.read_command_line([str(path), "--zero", "3", "--data.rows", "20"]).settings
    assert again == replace(config, zero=3)
    second = train.train(again)
    assert len(second.train) == 50
    assert second.train[-1] < 0.2 * first.train[0]
    assert second.validation < 0.2 * first.train[0]
    assert "first embedding: " in capsys.readouterr().out

    sample.sample([str(config.run_dir), "--text", "d__d_"])
    assert capsys.readouterr().out == "ddddd\n"


@pytest.mark.slow
def test_third_task_is_planned(config, monkeypatch, capsys):
    cluster = Cluster(nodes=1, gpus_per_node=4, gpu=GPUS["h100"], port_rate=1e9, ports=1)
    monkeypatch.setattr(planning, "measure_cluster", lambda *_, **given: cluster)
    assert train.train(replace(config, plan="show")) == Losses([], None)
    shown = capsys.readouterr().out
    assert "plan: 1: " in shown
    assert "diffusion" not in shown
    losses = train.train(replace(config, plan="use", steps=1))
    assert len(losses.train) == 1
    assert "plan: the fastest: data 4" in capsys.readouterr().out


def test_sizes_of_a_third_task_are_its_own(config):
    """It has neither the vocabulary of a GPT in front of a causal mask, nor modulated layers."""
    objective = LettersTask().make_objective(config)
    sizes = AbstractStep.of_degrees(config, objective, st.Degrees()).sizes.model
    assert (sizes.causal, sizes.modulated, sizes.mlp_matrices) == (False, False, 2)
    model = objective.sizes
    weights = jax.tree.leaves(make_program(config, st.Degrees()).state_shapes.weights["blocks"])
    assert model.matrices == sum(x.size for x in weights)
    assert AbstractStep.of_degrees(config, objective, st.Degrees()).memory().device_bytes > 0


def test_a_task_that_cannot_be_verified_says_what_it_lacks(config):
    for ask in (lambda x: x.smaller(config, Smaller()), lambda x: x.drawn_data(config, None)):
        with refused(UnsupportedError, "LettersTask"):
            ask(LettersTask())


def test_a_config_of_another_task_is_no_diffusion_transformer(config, tmp_path):
    path = tmp_path / "config.json"
    save_config(config, path)
    with refused(InputError, "'modulated'"):
        replace(MODELS["gpt_7b"], kind="dit")
    assert not is_file_model(str(path))
    # It is planned as it is, with jax where its task has no other way to its sizes.
    planned, sizes = plan.find_run(str(path)).sizes, LettersTask().sizes(config)
    assert replace(planned, name=sizes.name) == sizes


@pytest.mark.parametrize(
    ("degrees", "changes"),
    [
        (st.Degrees(data=2, ring=2, tensor=2), dict(zero=2, tile=3)),
        (st.Degrees(team=2, group=2, data=2), dict(zero=3, gradient_accumulation=2, remat="full")),
    ],
)
@pytest.mark.slow
def test_auxiliary_losses_are_trained_on_and_not_measured(config, degrees, changes):
    config = replace(config, batch_size=4, smallness=0.5, **changes)
    rng = np.random.default_rng(7)
    letters = rng.integers(0, 6, (2, 4, 16)).astype(np.int32)
    # Of a layout that is contiguous, as no mask is causal.
    batch = LetterBatch(*letters, rng.random((4, 16)).astype(np.float32))
    program = make_program(config, degrees)
    objective = program.objective
    state = program.initialise()
    model = objective.make_model(jax.nn.dot_product_attention, Hooks(), nnx.Rngs(0))
    graph = nnx.graphdef(model)

    @partial(jax.jit, static_argnames="auxiliary")
    def loss(weights, *, auxiliary):
        hidden = objective.hidden(nnx.merge(graph, weights), batch)
        losses = objective.losses(nnx.merge(graph, weights), hidden, batch.targets)
        losses += auxiliary * config.smallness * jnp.mean(hidden**2, axis=-1)
        return jnp.sum(losses * batch.weights) / jnp.sum(batch.weights)

    weights = jax.tree.map(jnp.asarray, jax.device_get(state.weights))
    wanted, gradients = jax.jit(jax.value_and_grad(partial(loss, auxiliary=1)))(weights)
    total, weight, _ = program.losses(state.model, batch)
    np.testing.assert_allclose(total / weight, loss(weights, auxiliary=0), rtol=1e-5)
    found, given = jax.jit(program.gradients)(state.weights, batch)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), given, gradients)

    # The groups of its own optimizer: plain gradient descent for the embedding alone.
    after, metrics = program.train_step(state, batch)
    rate = float(metrics.learning_rate)
    assert rate > 0
    moved = jax.tree.map(lambda new, old: new - old, jax.device_get(after.weights), weights)
    np.testing.assert_allclose(moved["embedding"], -rate * gradients["embedding"], atol=1e-6)
    head = moved["head"]["kernel"]
    np.testing.assert_allclose(np.abs(head), rate, rtol=1e-2)  # The first step of Adam.


def test_an_optimizer_must_count_its_updates(config, monkeypatch):
    objective = LettersTask().make_objective(config)
    monkeypatch.setattr(type(objective), "make_optimizer", lambda self, _: optax.sgd(0.1))
    with refused(InputError, "The state of an optimizer must"):
        make_program(config, st.Degrees())


def test_kinds_of_runs_are_the_names_of_the_table(config, tmp_path):
    path = tmp_path / "config.json"
    for kind in ("alphabets", ["gpt"]):
        path.write_text(json.dumps({"kind": kind}))
        with refused(InputError, "must hold the config of a run"):
            tasks.load_train_config(path)
    names = {"gpt", "dit", "wan", "letters"}
    assert {name: task.config_class.kind for name, task in tasks.TASKS.items()} == {
        name: name for name in names
    }
    assert {recipe().kind for recipe in RECIPES.values()} == names - {"letters"}
