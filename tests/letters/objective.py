"""To tell which letter a row repeats: a model that sees both ways, with an auxiliary loss and two
optimizers."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from models.layers import MLP
from models.linear import linear
from models.parts import mlp
from models.weights import below, projection, stacked, weight
from trainer.objective import Objective
from trainer.parallel.optimizer import learning_rate
from trainer.parallel.partition import path_name
from trainer.planner.models import ModelSizes


class LetterBatch(NamedTuple):
    letters: Any
    targets: Any
    weights: Any


class Block(nnx.Module):
    def __init__(self, model, attention_fn, hooks, rngs):
        self.attention_fn, self.hooks = attention_fn, hooks
        options, heads = dict(dtype=model.dtype, rngs=rngs), (model.heads, model.head_dim)
        self.query, self.key, self.value = (linear(model.width, heads, **options) for _ in range(3))
        self.out = linear(heads, model.width, **options)
        self.mlp = MLP("gelu", width=model.width, hidden=model.mlp_width, out_gain=0.5, **options)

    def __call__(self, x):
        copy, reduce = self.hooks.copy_to_tensor, self.hooks.reduce_from_tensor
        seen = copy(x)
        heads = (project(seen) for project in (self.query, self.key, self.value))
        x += reduce(self.out(self.attention_fn(*heads)))
        return x + self.hooks.tiled(lambda x: reduce(self.mlp(copy(x))))(x)


class Letters(nnx.Module):
    def __init__(self, config, attention_fn, hooks, rngs):
        model, outputs = config.model, len(config.alphabet)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (outputs, model.width)))
        make_block = nnx.vmap(lambda rngs: Block(model, attention_fn, hooks, rngs))
        self.blocks = make_block(rngs.split(model.layers))
        self.head = linear(model.width, outputs, dtype=model.dtype, rngs=rngs)
        self.wrap_layer = hooks.wrap_layer

    def __call__(self, letters):
        graph, weights = nnx.split(self.blocks)
        layer = self.wrap_layer(lambda weights, x: nnx.merge(graph, weights)(x))
        x = self.embedding[...][letters]
        return lax.scan(lambda x, weights: (layer(weights, x), None), x, weights)[0]


def weights():
    heads = projection("width | heads head_dim")
    layer = {f"{name}/kernel": heads for name in ("query", "key", "value")}
    layer["out/kernel"] = projection("heads head_dim | width")
    layer |= below("mlp", mlp.weights_of("mlp", gated=False))
    outside = {"embedding": weight("outputs width"), "head/kernel": weight("width | outputs")}
    return stacked("blocks", layer) | outside


class MissingLetter(Objective):
    causal = False
    head = "head"
    flops_per_token = 1.0

    def __init__(self, config):
        self._config = config

    @property
    def sizes(self):
        model, outputs = self._config.model, len(self._config.alphabet)
        names = {"width": "width", "heads": "heads", "head_dim": "head_dim", "mlp": "mlp_width"}
        return ModelSizes(
            name="letters",
            kind="letters",
            causal=False,
            weights=weights(),
            sizes={"outputs": outputs} | {x: getattr(model, y) for x, y in names.items()},
            layers=model.layers,
            outputs=outputs,
            itemsize=4,
        )

    def make_model(self, attention_fn, hooks, rngs):
        return Letters(self._config, attention_fn, hooks, rngs)

    def batch_shapes(self, layout):
        shape = (self._config.batch_size, self._config.length)
        letters = jax.ShapeDtypeStruct(shape, jnp.int32)
        return LetterBatch(letters, letters, jax.ShapeDtypeStruct(shape, jnp.float32))

    def prepare(self, batch, *, training):
        return batch

    def hidden(self, model, batch):
        return model(batch.letters)

    def hidden_and_auxiliary(self, model, batch):
        hidden = self.hidden(model, batch)
        return hidden, self._config.smallness * jnp.mean(hidden**2, axis=-1), {}

    def outputs(self, model, hidden):
        return model.head(hidden)

    def losses(self, model, hidden, targets):
        return optax.softmax_cross_entropy_with_integer_labels(self.outputs(model, hidden), targets)

    def make_optimizer(self, default):
        rate = learning_rate(self._config.optimizer, self._config.steps)
        groups = {"embedding": optax.sgd(rate), "others": default}

        def group(path, _):
            return path_name(path) if path_name(path) in groups else "others"

        return optax.partition(groups, partial(jax.tree_util.tree_map_with_path, group))
