"""One training step: losses and gradients on every device, then the update of the state.

Losses and gradients are computed inside one `shard_map`, as the program of each device (see
`sharded_model.py`). The optimizer runs outside of it, on global arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float32

from startrail_jax.attention import Attention
from startrail_jax.devices.axes import device_kind
from startrail_jax.errors import InputError, UnsupportedError
from startrail_jax.xla.compiler import compiler_options, offload_options
from startrail_jax.xla.varying import vary
from trainer.config import TrainConfig
from trainer.data.batches import shardings
from trainer.data.parts import DeviceSplit, PartBatch
from trainer.objective import Objective
from trainer.parallel.abstract_step import AbstractStep, step_limit
from trainer.parallel.optimizer import learning_rate
from trainer.parallel.ordering import gradient_first
from trainer.parallel.partition import join_frozen, split_adapters, split_frozen
from trainer.parallel.remat import rematerialised
from trainer.parallel.row_sums import RowSums
from trainer.parallel.sharded_model import ShardedModel
from trainer.parallel.splits import make_parts
from trainer.parallel.state import (
    TrainState,
    batch_shapes,
    initial_state,
    moved,
    updated_average,
)
from trainer.parallel.tiling import in_tiles, summed_in_tiles
from trainer.planner.memory import REPEATS_MLP, SAVED


class StepMetrics(NamedTuple):
    """What a step reports, as scalars that every device has."""

    loss: Float32[Array, ""]
    """Mean loss of a token before the update, with auxiliary losses; for a GPT, in nats."""
    gradient_norm: Float32[Array, ""]
    """Global norm of the gradient before it was clipped."""
    finite: Bool[Array, ""]
    """Whether loss and norm are finite; if not, the step left the state as it was."""
    learning_rate: Float32[Array, ""]
    others: dict[str, Float32[Array, ""]]
    """The metrics of `Objective.metric_names`, and the means of `Objective.names_of_means`."""


class Evaluation(NamedTuple):
    """What an evaluation adds up over batches, as scalars that every device has."""

    loss: Any
    """Sum of the losses of the tokens, times their weights."""
    weight: Any
    """Sum of their weights."""
    sums: dict[str, Any]
    """The same as the loss, of the metrics of `Objective.names_of_means`."""


class _Counted(NamedTuple):
    """What the loss of a token by itself needs of a batch."""

    targets: Any
    weights: Array


class _Metrics(NamedTuple):
    """What a device reports of a part of a batch, beside the loss."""

    of_parts: dict[str, Array]
    """Scalars that are the same on all devices; of several parts, the mean is reported."""
    sums: dict[str, Array]
    """Weighted sums over the device's tokens."""


class Program(AbstractStep):
    """The compiled functions of a run, on one mesh."""

    def __init__(self, config: TrainConfig, attention: Attention, objective: Objective) -> None:
        """Prepares the functions; each is compiled when it is first called."""
        mesh: Any = attention.mesh
        prepared = jax.eval_shape(
            partial(objective.prepare, training=True), objective.batch_shapes(attention.layout)
        )
        self.tokens_shape: tuple[int, int] = prepared.weights.shape
        """(B, T) of a batch, with the tokens that fill a row up to a length of the layout."""
        platform, _ = device_kind(mesh)
        if config.offload and platform != "cuda":
            raise UnsupportedError(
                "offload needs GPUs, which have memory of their own; got devices of platform "
                f"{platform!r}. Leave --offload out."
            )
        limit = step_limit(mesh.devices.ravel().tolist()) if config.remat == "auto" else None
        super().__init__(config, attention, objective, limit)
        self._model = self._sharded_model(attention)
        self.parts = None
        """How batches are divided whose documents are whole; None for batches of rows."""
        # The models that parts of a training batch run: they differ in their attention alone.
        self._models = (self._model,)
        self._sums = RowSums(self.partition.of_row, self.tokens_shape[1])
        # The sums over rows of these parts.
        self._sums_of_parts = (self._sums,)
        if config.whole_documents:
            self.parts, attentions = make_parts(config, attention, objective)
            self._models = tuple(
                self._model if x is attention else self._sharded_model(x) for x in attentions
            )
            self._sums_of_parts = tuple(map(self._sums_of, self.parts.splits))
        if not optax.tree.get_all_with_path(self.state_shapes.optimizer, "count"):
            raise InputError(
                "The state of an optimizer must count its updates, as with a learning rate that is "
                f"a schedule; got none of {type(objective).__name__}.make_optimizer. Give it "
                "`trainer.parallel.optimizer.learning_rate(config.optimizer, config.steps)`."
            )
        self.batch_sharding = NamedSharding(mesh, attention.sequence_spec)

        shardings = jax.tree.map(lambda x: x.sharding, self.state_shapes)
        options = compiler_options(mesh)
        self.initialise: Callable[[], TrainState] = jax.jit(
            self._initialise, out_shardings=shardings
        )
        self.begin_with: Callable[[Any], TrainState] = jax.jit(
            self._initialise, out_shardings=shardings, donate_argnums=0
        )
        """`TrainState.base` -> the state before the first step, which takes their memory."""
        self.train_step: Callable[[TrainState, Any], tuple[TrainState, StepMetrics]] = jax.jit(
            self._train_step,
            donate_argnums=0,
            out_shardings=(shardings, None),
            compiler_options=options | self._offload_options(),
        )
        """(state, batch) -> new state, which takes the memory of the old one, and metrics."""
        self.losses: Callable[[Any, Any], Evaluation] = jax.jit(
            self._losses, compiler_options=options
        )
        """(`TrainState.model`, batch) -> what an evaluation adds up."""
        self.numbers: Callable[[Any, Any], Array] = jax.jit(self._numbers, compiler_options=options)
        """(`TrainState.model`, batch) -> `Objective.numbers` of every token, [B T n] in float32,
        sharded as the tokens."""

    def _offload_options(self) -> dict[str, bool | int]:
        config, options = self.config, {}
        if config.offload:
            memory = self.memory()
            options |= offload_options(
                device_bytes=memory.device_bytes - memory.state_bytes - memory["batch"],
                host_bytes=memory[SAVED],
            )
        if config.offload_optimizer and device_kind(self.attention.mesh)[0] == "cuda":
            # Otherwise a layer holds the whole gradients of the one before it.
            options["xla_gpu_enable_pipelined_reduce_scatter"] = False
        return options

    def _sharded_model(self, attention: Attention) -> ShardedModel:
        config, objective = self.config, self.objective
        # Beside adapters, weights are kept as they are, and none as it is used.
        gathers_weights = config.zero == 3 or config.has_adapters
        return ShardedModel(
            lambda attention_fn, hooks: objective.make_model(
                attention_fn, hooks, nnx.Rngs(config.seed)
            ),
            attention,
            self.partition,
            tile=config.tile if self.remat in REPEATS_MLP else None,
            frozen=config.frozen,
            remat=partial(
                rematerialised,
                remat=self.remat,
                offload=config.offload,
                gathers_weights=gathers_weights,
            ),
            linear_backend=config.attention.linear_backend,
        )

    def _sums_of(self, split: DeviceSplit) -> RowSums:
        assert self.parts is not None
        names = self.partition.replicas
        return RowSums(
            axes=self.partition.all,
            length=split.c * self.parts.share,
            split=names,
            rows=tuple(row for row, _ in split.places) if names else (),
        )

    @property
    def batch_shapes(self) -> Any:
        """Shapes and shardings of a batch to train on, to compile without data."""
        rows = batch_shapes(self.objective, self.attention)
        return rows if self.parts is None else self.parts.shapes(rows)

    # What is compiled, on global arrays.

    def _initialise(self, base: Any = None) -> TrainState:
        weights = nnx.state(self._model.make())
        if base is not None:
            weights = join_frozen(split_adapters(weights)[0], base)
        return initial_state(self.config, self.optimizer, weights)

    def _train_step(self, state: TrainState, batch: Any) -> tuple[TrainState, StepMetrics]:
        config = self.config
        if config.offload_optimizer:
            on_device = moved(state.optimizer, jax.memory.Space.Device)
            state = state._replace(optimizer=on_device)
        (loss, others), gradients = self._metrics_and_gradients(state.model, batch)
        norm = optax.tree.norm(self.objective.gradients_of_loss(gradients))
        updates, optimizer = self.optimizer.update(gradients, state.optimizer, state.weights)
        weights = optax.apply_updates(state.weights, updates)
        (_, count), *_ = optax.tree.get_all_with_path(state.optimizer, "count")
        average = None
        if config.ema_decay is not None:
            average = updated_average(config.ema_decay, state.average, weights, count)
        updated = TrainState(weights, optimizer, average)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        rate = learning_rate(config.optimizer, config.steps)(count)
        metrics = StepMetrics(loss, norm, finite, jnp.asarray(rate), others)
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state.changing)
        if config.offload_optimizer:
            kept = kept._replace(optimizer=moved(kept.optimizer, jax.memory.Space.Host))
        return kept._replace(frozen=state.frozen), metrics

    def gradients(self, weights: Any, batch: Any) -> tuple[Float32[Array, ""], Any]:
        """The mean loss of a batch, and float32 gradients of trained weights, sharded like them."""
        (loss, _), gradients = self._metrics_and_gradients(weights, batch)
        return loss, gradients

    def _metrics_and_gradients(
        self, weights: Any, batch: Any
    ) -> tuple[tuple[Float32[Array, ""], dict[str, Array]], Any]:
        """`gradients`, with other metrics beside the loss."""
        out_specs = ((PartitionSpec(), PartitionSpec()), self._model.trained_specs)
        if not isinstance(batch, PartBatch):
            batch = self._prepare(batch, training=True)
        return self._on_each_device(self._local_gradients, weights, batch, out_specs)

    def _losses(self, weights: Any, batch: Any) -> Evaluation:
        batch = self._prepare(batch, training=False)
        return self._on_each_device(self._local_losses, weights, batch, PartitionSpec())

    def outputs(self, weights: Any, batch: Any) -> Float32[Array, "B T out"]:
        """The model's output for every token of a prepared batch, sharded as the tokens."""

        def local(weights: Any, batch: Any) -> Array:
            model = self._model.local(self.partition.gather_once(weights, self._model.splits))
            return self.objective.outputs(model, self.objective.hidden(model, batch))

        out_specs = PartitionSpec(*self.batch_sharding.spec, None)
        return self._on_each_device(local, weights, batch, out_specs)

    def _numbers(self, weights: Any, batch: Any) -> Float32[Array, "B T n"]:
        def local(weights: Any, batch: Any) -> Array:
            gathered = self.partition.gather_once(weights, self._model.splits)
            hidden = self.objective.hidden(self._model.local(gathered), batch)
            name = self.objective.head
            head = self._model.gather(name, gathered[name])
            return self._numbers_in_tiles(self._model, head, hidden, batch)

        batch = self._prepare(batch, training=False)
        out_specs = PartitionSpec(*self.batch_sharding.spec, None)
        return self._on_each_device(local, weights, batch, out_specs)

    def _prepare(self, batch: Any, *, training: bool) -> Any:
        """The batch as the model takes it, each token on its device."""
        prepared = self.objective.prepare(batch, training=training)
        return lax.with_sharding_constraint(prepared, shardings(prepared, self.batch_sharding))

    def _on_each_device(
        self, function: Callable[..., Any], weights: Any, batch: Any, out_specs: Any
    ) -> Any:
        """Calls a function of (weights, prepared batch) as the program of each device."""

        def local(weights: Any, batch: Any) -> Any:
            # The devices of a sequence have the same times and labels. What a device computes from
            # them is added up over devices all the same, as its tokens are others.
            def varying(tree: Any) -> Any:
                return jax.tree.map(lambda x: vary(x, *self.partition.replicas), tree)

            if isinstance(batch, PartBatch):  # All devices are in the same split.
                return function(weights, batch._replace(parts=varying(batch.parts)))
            return function(weights, varying(batch))

        if isinstance(batch, PartBatch):
            assert self.parts is not None
            specs = self.parts.specs(batch)
        else:
            specs = jax.tree.map(lambda x: x.spec, shardings(batch, self.batch_sharding))
        run = self._model.on_each_device(local, in_specs=(specs,), out_specs=out_specs)
        return run(weights, batch)

    # What one device does.

    def _local_gradients(self, weights: Any, batch: Any) -> tuple[tuple[Array, Any], Any]:
        partition, splits = self.partition, self._model.trained_splits
        gathered = partition.gather_once(weights, self._model.splits)
        trained, _ = split_frozen(weights, self.config.frozen)
        slots = partition.gradient_slots(trained, splits)
        others = dict.fromkeys(self.objective.metric_names, jnp.zeros(()))
        own = vary(jnp.zeros(()), *self.partition.all)
        zero = (own, _Metrics(others, dict.fromkeys(self.objective.names_of_means, own))), slots

        def of(model: ShardedModel, sums: RowSums) -> Callable[..., Any]:
            return jax.value_and_grad(partial(self._local_sum, model, sums), has_aux=True)

        def add(so_far: Any, part: Any) -> tuple[Any, None]:
            new = of(self._model, self._sums)(slots, gathered, part)
            return jax.tree.map(jnp.add, so_far, new), None

        def add_part(k: Array, so_far: Any) -> Any:
            part = jax.tree.map(lambda x: x[k], batch.parts)
            programs = list(map(of, self._models, self._sums_of_parts))
            new = lax.switch(batch.split[k], programs, slots, gathered, part)
            return jax.tree.map(jnp.add, so_far, new)

        count: Any = 1
        if isinstance(batch, PartBatch):
            (loss, metrics), gradients = lax.fori_loop(0, batch.count, add_part, zero)
            batch, count = batch.parts, batch.count
        elif self.config.gradient_accumulation == 1:
            (loss, metrics), gradients = of(self._model, self._sums)(slots, gathered, batch)
        else:
            ((loss, metrics), gradients), _ = lax.scan(add, zero, self._parts(batch))
            count = self.config.gradient_accumulation
        # A batch without any weight has no gradient.
        total = self._total_weight(batch)
        total = jnp.where(total > 0, total, 1.0)
        gradients = partition.reduce(gradients, splits)
        loss = self._over_all(loss) / total
        others = {name: x / count for name, x in metrics.of_parts.items()}
        others |= {name: self._over_all(x) / total for name, x in metrics.sums.items()}
        return (loss, others), jax.tree.map(lambda x: x / total, gradients)

    def _local_losses(self, weights: Any, batch: Any) -> Evaluation:
        gathered = self.partition.gather_once(weights, self._model.splits)

        def of(part: Any) -> tuple[Array, dict[str, Array]]:
            loss, metrics = self._local_sum(self._model, self._sums, None, gathered, part)
            return loss, metrics.sums

        parts = lax.map(of, self._parts(batch))
        loss, sums = jax.tree.map(lambda x: self._over_all(jnp.sum(x)), parts)
        return Evaluation(loss, self._total_weight(batch), sums)

    def _parts(self, batch: Any) -> Any:
        """The parts of a batch of rows that are computed one after another: [parts, b, ...]. Rows
        take turns, so that a part has the same rows whatever the degree of data."""
        parts = self.config.gradient_accumulation if self.parts is None else self.parts.most
        return jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)

    def _local_sum(
        self, sharded: ShardedModel, sums: RowSums, slots: Any, weights: Any, batch: Any
    ) -> tuple[Float32[Array, ""], _Metrics]:
        """The weighted sum of the losses of this device's tokens, and other metrics."""
        objective, name = self.objective, self.objective.head
        model, auxiliary, others = sharded.local(weights, slots), None, {}
        if slots is None:
            hidden = objective.hidden(model, batch)
        else:
            hidden, auxiliary, others = objective.hidden_and_auxiliary(model, batch)
        head_slot = None if slots is None else slots.get(name)
        if name == "head" and head_slot is not None:
            # Otherwise the gradient of the head would wait, whole, until that of the embedding is
            # there, to be sent in one message with it.
            head_slot, hidden = gradient_first(head_slot, hidden)
        head = sharded.gather(name, weights[name], head_slot)
        tokens = batch if objective.of_rows else _Counted(batch.targets, batch.weights)
        if self.partition.tensor:
            # The devices along `tensor` have the same tokens: each computes the loss of some.
            head = jax.tree.map(self.partition.copy_to_tensor, head)
            hidden, auxiliary, tokens = self._own_tokens((hidden, auxiliary, tokens))
        if objective.of_rows:
            total, means = self._sum_of_rows(sharded, sums, head, hidden, tokens)
        else:
            means = {}

            def loss(head: Any, hidden: Array, targets: Array, token_weights: Array) -> Array:
                model = sharded.with_part(name, head)
                return jnp.sum(objective.losses(model, hidden, targets) * token_weights)

            summed = summed_in_tiles(
                loss, self.config.tile, self.config.model.dtype, differentiated=slots is not None
            )
            total = summed(head, hidden, tokens.targets, tokens.weights)
        if auxiliary is not None:
            total += jnp.sum(auxiliary * tokens.weights)
        return total, _Metrics(others, means)

    def _sum_of_rows(
        self, sharded: ShardedModel, sums: RowSums, head: Any, hidden: Array, batch: Any
    ) -> tuple[Float32[Array, ""], dict[str, Array]]:
        """The weighted sums of losses that depend on other tokens of their rows, and of metrics."""
        objective, counted = self.objective, batch.weights > 0
        found = self._numbers_in_tiles(sharded, head, hidden, batch)
        losses, metrics = objective.loss(
            jnp.where(counted[..., None], found, 0),
            batch,
            lambda x, ids: sums(x, ids, counted),
        )
        # What is not counted may be anything, also NaN.
        total, *means = (
            jnp.sum(jnp.where(counted, x, 0) * batch.weights)
            for x in (losses, *(metrics[name] for name in objective.names_of_means))
        )
        return total, dict(
            zip(objective.names_of_means, map(lax.stop_gradient, means), strict=True)
        )

    def _numbers_in_tiles(
        self, sharded: ShardedModel, head: Any, hidden: Array, batch: Any
    ) -> Float32[Array, "b t n"]:
        arrays, tree = jax.tree.flatten(batch)

        def numbers(hidden: Array, *arrays: Array) -> Array:
            model = sharded.with_part(self.objective.head, head)
            return self.objective.numbers(model, hidden, jax.tree.unflatten(tree, arrays))

        return in_tiles(numbers, self.config.tile, self.config.model.dtype)(hidden, *arrays)

    def _total_weight(self, batch: Any) -> Float32[Array, ""]:
        """The sum of the weights of a batch's tokens over all devices."""
        return self.partition.sum_over_tokens(jnp.sum(batch.weights))

    def _over_all(self, x: Array) -> Array:
        return lax.psum(x, self.partition.all) if self.partition.all else x

    def _own_tokens(self, arrays: Any) -> Any:
        """This device's share of arrays [b t ...] of tokens that all devices along `tensor` have.
        Where the devices do not divide them, the last share ends with zeros, which have no
        weight."""
        parts = self.partition.size(self.partition.tensor)

        def own(x: Array) -> Array:
            count = -(-x.shape[1] // parts)
            x = self.partition.copy_to_tensor(x)
            if missing := parts * count - x.shape[1]:
                x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
            return lax.dynamic_slice_in_dim(x, lax.axis_index("tensor") * count, count, 1)

        return jax.tree.map(own, arrays)
