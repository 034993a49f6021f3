"""Small training programs, lowered from shapes; runs that share programs or are cut off."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import jax
import numpy as np
from flax import nnx

import startrail_jax as st
from models.config import GPTConfig
from models.hooks import Hooks
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.checksums import Checksums
from trainer.config import OptimizerConfig
from trainer.data.batches import place
from trainer.dit.config import DiTConfig, DiTTrainConfig, ImageConfig
from trainer.dit.wan.config import WanConfig, WanTrainConfig
from trainer.gpt.config import GPTTrainConfig
from trainer.parallel.abstract_step import AbstractStep
from trainer.parallel.checks import make_attention
from trainer.parallel.partition import path_name
from trainer.parallel.step import Program
from trainer.run import metrics
from trainer.run.settings import save_config
from trainer.session import Session
from trainer.tasks import TASKS

SMALL = dict(vocab_size=48, width=24, layers=2, heads=8, kv_heads=2, head_dim=4, mlp_width=32)
# Flags of a run that takes a moment.
TINY = (
    "--model.width 16 --model.layers 1 --model.heads 2 --model.kv-heads 1 --model.head-dim 8 "
    "--model.mlp-width 32 --seq-len 32 --batch-size 2 --validation-sequences 2 --log-every 1 "
    "--sample.length 0 --no-tensorboard"
)
REPOSITORY = Path(st.__file__).parents[1]


def learnable_tokens(config, step, end):
    """Tokens [batch, seq + 1]: each is the one before plus 0, 1 or 2, or `end` of a document."""
    rng = np.random.default_rng(step)
    steps = rng.integers(3, size=(config.batch_size, config.seq_len + 1))
    tokens = 8 + np.cumsum(steps, axis=1) % (config.model.vocab_size - 8)
    return np.where(rng.random(tokens.shape) < 0.03, end, tokens)


def placed(arrays, shapes):
    """A copy of a state, or of a part of it, on the devices of a program."""
    return jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), arrays, shapes)


def train_steps(program, state, batches):
    """Losses and gradient norms of a step for each batch, and the state after the last."""
    state, losses = placed(state, program.state_shapes), []
    for batch in batches:
        state, metrics = program.train_step(state, batch)
        assert metrics.finite
        losses.append((float(metrics.loss), float(metrics.gradient_norm)))
    return np.array(losses), state


def whole_batch(program, *, alone=False):
    """All rollouts or pairs of a run as one batch: as their file is packed, or each in a row of its
    own."""
    data = TASKS[program.config.kind].open_data(program.config, program.attention.layout)
    rows = [data.train[number] for number in range(len(data.train))]
    if alone:
        rows = [[x] for row in rows for x in row]
    rows += [[]] * (program.config.batch_size - len(rows))
    return place(data.collate(rows, [*range(len(rows))]), program.batch_sharding)


def gradients_of(program, weights, batch):
    """Loss, metrics and gradients of a batch, on the host."""
    weights = placed(weights, program.state_shapes.weights)
    (loss, metrics), gradients = jax.jit(program._metrics_and_gradients)(weights, batch)
    return jax.device_get((loss, metrics, gradients))


def check_same_gradients(got, want, *, loss_atol=0.0, **metrics):
    """Two results of `gradients_of`: losses to 1e-6, gradients to 1e-5 of their largest, and
    `metrics` to what `assert_allclose` is given."""
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6, atol=loss_atol)
    for name, mean in want[1].items():
        np.testing.assert_allclose(got[1][name], mean, err_msg=name, **metrics)
    pairs = zip(jax.tree_util.tree_leaves_with_path(got[2]), jax.tree.leaves(want[2]), strict=True)
    for (path, x), y in pairs:
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max(), err_msg=path_name(path))


def saved_by_layers(jaxpr, turns):
    """What the first loop over layers, of so many turns, gives the backward pass: shapes."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan" and equation.params["length"] == turns:
            count, inner = equation.params["num_carry"], equation.params["jaxpr"].jaxpr
            # Some results are the same array twice.
            return [*{id(x): x.aval for x in inner.outvars[count:]}.values()]
        for value in equation.params.values():
            for part in value if isinstance(value, list | tuple) else [value]:
                part = getattr(part, "jaxpr", part)
                if hasattr(part, "eqns") and (found := saved_by_layers(part, turns)):
                    return found
    return []


def run_python(*arguments, **options):
    """A program in the root of the checkout, when it has ended."""
    command = [sys.executable, *map(str, arguments)]
    options = {"cwd": REPOSITORY, "capture_output": True, "text": True, "timeout": 300} | options
    return subprocess.run(command, check=False, **options)


def saved_steps(run_dir):
    return sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir())


def save_run(config, states):
    """The folder of a run that has saved these states, given by their steps."""
    config.run_dir.mkdir(exist_ok=True)
    with Checkpoints(config.run_dir / "checkpoints", keep=3) as checkpoints:
        for step, state in states.items():
            checkpoints.save(step, state, {})
    save_config(config, config.run_dir / "config.json")
    return config.run_dir


def change_checksum(checkpoint):
    """Has the checkpoint expect another value of one of its weights."""
    checksums = Checksums.read(checkpoint)
    name = next(x for x in checksums.arrays if x.startswith("weights/"))
    kind, value = checksums.arrays[name]
    checksums.arrays[name] = (kind, f"{int(value, 16) ^ 1:016x}")
    checksums.write(checkpoint)


def records_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def logged_steps(run_dir):
    return [x["step"] for x in records_of(run_dir) if "train_loss" in x]


COMMON = dict(steps=10, batch_size=4, run_dir=Path("unused"))


def make_config(model=None, **changes):
    sizes = dict(vocab_size=96, width=64, layers=3, heads=8, kv_heads=4, head_dim=8, mlp_width=80)
    settings = COMMON | dict(optimizer=OptimizerConfig(learning_rate=1e-3), seq_len=128)
    return GPTTrainConfig(model=GPTConfig(**sizes | (model or {})), **settings | changes)


OF_VIDEOS = COMMON | dict(optimizer=OptimizerConfig(learning_rate=1e-2), size=(2, 8, 8))


def make_dit_config(model=None, **changes):
    sizes = dict(channels=2, classes=3, width=32, layers=2, heads=8, mlp_width=48)
    return DiTTrainConfig(model=DiTConfig(**sizes | (model or {})), **OF_VIDEOS | changes)


def make_text_config(model=None, *, text_tokens=3, **changes):
    """A DiT of texts."""
    data = ImageConfig(text_tokens=text_tokens)
    return make_dit_config(dict(classes=0, text_dim=6) | (model or {}), data=data, **changes)


def make_wan_config(model=None, **changes):
    sizes = dict(channels=2, width=48, layers=2, heads=8, mlp_width=48, text_dim=6, text_tokens=3)
    return WanTrainConfig(model=WanConfig(**sizes | (model or {})), **OF_VIDEOS | changes)


def make_program(config, degrees, devices=None):
    devices = jax.devices()[: degrees.num_devices] if devices is None else devices
    mesh = st.make_mesh(degrees, axis_type="auto", devices=devices)
    objective = TASKS[config.kind].make_objective(config)
    return Program(config, make_attention(mesh, config, objective), objective)


def weight_shapes(config):
    """The shape of every weight by its path; those under `blocks` are stacked for all layers."""
    objective = TASKS[config.kind].make_objective(config)

    def make_model():
        return objective.make_model(jax.nn.dot_product_attention, Hooks(), nnx.Rngs(0))

    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(nnx.eval_shape(make_model)))
    return {path_name(path): x.shape for path, x in leaves}


def noted_hooks():
    """Hooks that do nothing, and the names of those that are called."""
    calls = []

    def noted(name):
        def wrap(x, *part):
            calls.append(name)
            return x

        return wrap

    names = [name for name, x in vars(Hooks()).items() if callable(x)]
    return Hooks(**{name: noted(name) for name in names}), calls


def shapes_of(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def session_of_one():
    """A program on one device."""
    return Session(devices=tuple(jax.devices()[:1]), description=())


def options(program):
    """A CPU's kernels need not be fast: that halves the time to compile."""
    gpus = st.compiler_options(program.attention.mesh)
    return gpus or {"xla_backend_optimization_level": 0}


def compile_step(program):
    lowered = program.train_step.lower(program.state_shapes, program.batch_shapes)
    return lowered.compile(options(program))


def compile_gradients(program):
    """(loss, gradients) of (weights, batch)."""
    gradients = jax.jit(program.gradients)
    lowered = gradients.lower(program.state_shapes.weights, program.batch_shapes)
    return lowered.compile(options(program))


# What no program is computed from; of `data`, only what follows below is.
NOT_COMPUTED_FROM = {
    *("run_dir", "checkpoint", "data", "validation_every", "validation_sequences", "log_every"),
    *("profile", "non_finite", "allow_changes", "sample", "tensorboard", "plan"),
    "verify",
    *("wandb", "mirror", "export"),
}


PREPARE = Program.__init__


@contextmanager
def shared_programs():
    """Has all programs that compute alike share what they trace and compile, from here on."""
    made = {}

    def prepare_once(self, config, attention, objective):
        settings = {k: v for k, v in vars(config).items() if k not in NOT_COMPUTED_FROM}
        for name in ("mask_documents", "longest_document", "text_tokens"):
            settings[name] = getattr(config.data, name, None)
        settings["drawn"] = config.documents_drawn
        key = type(config), repr(settings), attention
        if key not in made:
            PREPARE(self, config, attention, objective)
            made[key] = self
        vars(self).update(vars(made[key]), config=config)

    with mock.patch.object(Program, "__init__", prepare_once):
        yield


def interrupt_after(monkeypatch, step):
    """Has SIGTERM come while a step is reported."""
    advance = metrics.Reporter.advance

    def signalling(self, at, measured=None):
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)
        advance(self, at, measured)

    monkeypatch.setattr(metrics.Reporter, "advance", signalling)


def check_first_step(config, degrees):
    """Raises what the first step of a run would raise on a mesh, which need not be there."""
    AbstractStep.of_degrees(config, TASKS[config.kind].make_objective(config), degrees)
