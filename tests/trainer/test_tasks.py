"""The table of tasks: a third task needs one line in it, for train.py and for sample.py."""

import json
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sample
import startrail_jax as st
import train
from models.linear import linear
from programs import interrupt_after
from trainer import tasks
from trainer.checkpoints.checkpoint import restore_weights
from trainer.config import OptimizerConfig, TrainConfig
from trainer.data.dataset import Dataset
from trainer.parallel.step import Program
from trainer.task import SampleOptions, Task

# The third task is to learn which letter follows a letter in "abcdefgabcdefg...".
LETTERS = "abcdefg"


@dataclass(frozen=True, kw_only=True)
class AlphabetModelConfig:
    width: int = 8
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 8
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class AlphabetDataConfig:
    rows: int = 20


@dataclass(frozen=True, kw_only=True)
class AlphabetConfig(TrainConfig):
    kind: ClassVar[str] = "alphabet"
    causal: ClassVar[bool] = True

    model: AlphabetModelConfig = field(default_factory=AlphabetModelConfig)
    data: AlphabetDataConfig = field(default_factory=AlphabetDataConfig)
    length: int = 16

    @property
    def num_tokens(self):
        return self.length


@dataclass(frozen=True, kw_only=True)
class AlphabetOptions(SampleOptions):
    start: str = "a"
    letters: int = 3


class LetterBatch(NamedTuple):
    letters: Any
    targets: Any
    weights: Any


class Bigram(nnx.Module):
    def __init__(self, config, rngs):
        shape = (len(LETTERS), config.width)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), shape))
        self.head = linear(config.width, len(LETTERS), dtype=config.dtype, rngs=rngs)


class NextLetter:
    causal = True
    head = "head"
    flops_per_token = 1.0

    def __init__(self, config):
        self._config = config

    def make_model(self, attention_fn, hooks, rngs):
        return Bigram(self._config.model, rngs)

    def batch_shapes(self, layout):
        shape = (self._config.batch_size, self._config.length)
        letters = jax.ShapeDtypeStruct(shape, jnp.int32)
        return LetterBatch(letters, letters, jax.ShapeDtypeStruct(shape, jnp.float32))

    def prepare(self, batch, *, training):
        return batch

    def hidden(self, model, batch):
        return model.embedding[batch.letters]

    def outputs(self, model, hidden):
        return model.head(hidden)

    def losses(self, model, hidden, targets):
        return optax.softmax_cross_entropy_with_integer_labels(self.outputs(model, hidden), targets)


class AlphabetTask(Task[AlphabetConfig, AlphabetOptions]):
    config_class = AlphabetConfig
    options_class = AlphabetOptions

    def make_objective(self, config):
        return NextLetter(config)

    def open_data(self, config, layout):
        def collate(rows, numbers):
            rows = np.stack(rows)
            weights = np.ones((len(rows), config.length), np.float32)
            inputs, targets = layout.permute(rows[:, :-1]), layout.permute(rows[:, 1:])
            return LetterBatch(inputs, targets, weights)

        starts = np.arange(config.data.rows)[:, None]
        rows = ((starts + np.arange(config.length + 1)) % len(LETTERS)).astype(np.int32)
        return Dataset(
            train=rows, held_out=rows[:3], collate=collate, description="letters", loss_unit="nats"
        )

    def sample(self, run_dir, config, options, session):
        config = replace(config, batch_size=1)
        program = Program(config, st.Attention(session.mesh, causal=True), NextLetter(config))
        shapes = program.state_shapes.weights
        weights, _ = restore_weights(run_dir / "checkpoints", shapes)
        session.print(continue_letters(weights, options.start, options.letters))

    def sample_after_training(self, program, weights, data, interrupted):
        yield f"the alphabet: {continue_letters(weights, 'c', 2)}"


def continue_letters(weights, text, count):
    """What a trained model writes, computed from its weights alone."""
    embedding, kernel = (np.asarray(jax.tree.leaves(weights[x])[0]) for x in ("embedding", "head"))
    for _ in range(count):
        text += LETTERS[int(np.argmax(embedding[LETTERS.index(text[-1])] @ kernel))]
    return text


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "alphabet", AlphabetTask())
    return AlphabetConfig(
        optimizer=OptimizerConfig(learning_rate=0.1, weight_decay=0.0),
        devices=4,
        steps=30,
        batch_size=2,
        evaluate_every=100,
        validation_sequences=2,
        tensorboard=False,
        run_dir=tmp_path / "run",
    )


def test_third_task_learns_resumes_and_draws(config, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 10)
        first = train.train(config)
    assert (len(first.train), first.validation) == (10, None)
    path = config.run_dir / "config.json"
    assert json.loads(path.read_text())["kind"] == "alphabet"

    # Its config.json is a recipe, and the flags are those of its config.
    again = train.read_command_line([str(path), "--zero", "3", "--data.rows", "20"]).settings
    assert again == replace(config, zero=3)
    second = train.train(again)
    assert len(second.train) == 20
    assert second.train[-1] < 0.1 * first.train[0]
    assert second.validation < 0.1 * first.train[0]
    assert "the alphabet: cde" in capsys.readouterr().out

    sample.sample([str(config.run_dir), "--start", "f", "--letters", "4"])
    assert capsys.readouterr().out == "fgabc\n"


def test_unknown_kind_of_a_run_is_refused(config, tmp_path):
    path = tmp_path / "config.json"
    for kind in ("alphabets", ["gpt"]):
        path.write_text(json.dumps({"kind": kind}))
        with pytest.raises(ValueError, match=r"must hold the config of a run.*kind must be"):
            tasks.load_train_config(path)


def test_names_of_the_table_are_the_kinds_of_the_configs():
    assert {name: task.config_class.kind for name, task in tasks.TASKS.items()} == {
        "gpt": "gpt",
        "dit": "dit",
    }


def test_recipes_belong_to_tasks():
    from configs import RECIPES

    kinds = {recipe().kind for recipe in RECIPES.values()}
    assert kinds == set(tasks.TASKS)
