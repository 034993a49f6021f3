"""One training step: losses and gradients on every device, then the update of the state.

The model runs inside one `shard_map` over the whole mesh, as the program of one device, so that
every message is one that is written here, in `partition.py` or in the attention. The optimizer runs
outside, on global arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float32

from models.hooks import Hooks
from startrail_jax.attention import Attention
from startrail_jax.compiler import compiler_options
from startrail_jax.mesh import device_kind
from startrail_jax.ordering import gradient_first
from startrail_jax.sizes import check_heads
from startrail_jax.varying import vary
from trainer.config import TrainConfig
from trainer.data.batches import sharding_of
from trainer.objective import Objective
from trainer.parallel.optimizer import (
    learning_rate,
    make_optimizer,
)
from trainer.parallel.partition import (
    STACKED,
    Partition,
)
from trainer.parallel.remat import rematerialised
from trainer.parallel.tiling import (
    check_tile,
    in_tiles,
    summed_in_tiles,
)


class TrainState(NamedTuple):
    """What training changes."""

    weights: Any
    """float32."""
    optimizer: Any
    """Adam's moments and its count of steps."""
    average: Any = None
    """Exponential moving average of the weights, float32; None where the run keeps none."""

    @property
    def result(self) -> Any:
        """The weights that the run is for: their average, where there is one."""
        return self.weights if self.average is None else self.average


class StepMetrics(NamedTuple):
    """What a step reports, as scalars on all devices."""

    loss: Float32[Array, ""]
    """Mean loss of a token of the batch before the update: of a GPT, in nats."""
    gradient_norm: Float32[Array, ""]
    """Global norm of the gradient before it was clipped."""
    finite: Bool[Array, ""]
    """Whether both are finite; if not, the state is as it was before the step."""
    learning_rate: Float32[Array, ""]
    """Of the update."""


class _Weight(NamedTuple):
    """What `Partition.use` makes the weight of: a layer's, until the layer runs."""

    source: Any
    sink: Any


class Program:
    """The compiled functions of a run, on one mesh."""

    def __init__(self, config: TrainConfig, attention: Attention, objective: Objective) -> None:
        """Prepares the functions; each is compiled when it is called first.

        Args:
            config: model, loss, optimizer, ZeRO, rematerialisation, tiles, accumulation, seed.
            attention: on a mesh of the devices to run on, or to compile for.
            objective: model and loss of the run.

        Raises:
            ValueError: if the mesh does not divide the model or the batch, or the tile what a
                device has of it.
            NotImplementedError: if the state cannot be offloaded from these devices.
        """
        mesh: Any = attention.mesh
        self.config = config
        self.attention = attention
        self.objective = objective
        self.tokens_shape = self._tokens_shape()
        """(B, T) of a batch."""
        _check_tokens(config, attention, self.tokens_shape[1])
        self.optimizer = make_optimizer(config.optimizer, config.steps)
        self.partition = Partition(mesh, config.zero, config.zero_axes, config.model.dtype)
        if config.zero and self.partition.replicas and not self.partition.zero:
            raise ValueError(
                f"zero={config.zero} needs an axis of degree above 1 among zero_axes; got "
                f"zero_axes={config.zero_axes} on a mesh with {attention.degrees}. "
                f"Use --zero-axes {' '.join(self.partition.replicas)}."
            )
        self._graph = nnx.graphdef(nnx.eval_shape(self._make_model))
        self.state_shapes = self._state_shapes()
        self._splits = self.partition.splits(self.state_shapes.weights)
        self._specs = self.partition.specs(self.state_shapes.weights)
        shardings = jax.tree.map(lambda x: x.sharding, self.state_shapes)
        self.batch_sharding = NamedSharding(mesh, attention.sequence_spec)

        compiled = functools.partial(jax.jit, compiler_options=compiler_options(mesh))
        self.initialise: Callable[[], TrainState] = jax.jit(
            self._initialise, out_shardings=shardings
        )
        self.train_step: Callable[[TrainState, Any], tuple[TrainState, StepMetrics]] = compiled(
            self._train_step, donate_argnums=0, out_shardings=(shardings, None)
        )
        """Takes the state's memory for the new state."""
        self.losses: Callable[[Any, Any], tuple[Array, Array]] = compiled(self._losses)
        """(weights, batch) -> sum of the losses of its tokens, and of their weights."""

    # State.

    def _make_model(self) -> nnx.Module:
        hooks = Hooks(
            layer=self._layer,
            tokens=self._tokens,
            spread=self.partition.spread,
            join=self.partition.join,
        )
        return self.objective.make_model(self._attend, hooks, nnx.Rngs(self.config.seed))

    def _initialise(self) -> TrainState:
        weights = nnx.state(self._make_model())
        average = None if self.config.ema_decay is None else weights
        return TrainState(weights, self.optimizer.init(weights), average)

    def _state_shapes(self) -> TrainState:
        shapes = jax.eval_shape(self._initialise)
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shapes,
            self.partition.shardings(shapes),
        )

    @property
    def batch_shapes(self) -> Any:
        """A batch of the run, as shapes: to compile without data."""

        def placed(x: Any) -> Any:
            sharding = sharding_of(self.batch_sharding, len(x.shape))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(placed, self.objective.batch_shapes(self.attention.layout))

    def _tokens_shape(self) -> tuple[int, int]:
        batch = self.objective.batch_shapes(self.attention.layout)
        prepare = functools.partial(self.objective.prepare, training=True)
        return jax.eval_shape(prepare, batch).weights.shape

    # Steps, on global arrays.

    def _train_step(self, state: TrainState, batch: Any) -> tuple[TrainState, StepMetrics]:
        loss, gradients = self.gradients(state.weights, batch)
        norm = optax.tree.norm(gradients)
        updates, optimizer = self.optimizer.update(gradients, state.optimizer, state.weights)
        weights = optax.apply_updates(state.weights, updates)
        (_, count), *_ = optax.tree.get_all_with_path(state.optimizer, "count")
        updated = TrainState(weights, optimizer, self._averaged(state.average, weights, count))
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        rate = learning_rate(self.config.optimizer, self.config.steps)(count)
        metrics = StepMetrics(loss, norm, finite, jnp.asarray(rate))
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state), metrics

    def _averaged(self, average: Any, weights: Any, count: Array) -> Any:
        """The moving average after update `count`, from 0: of few weights at first, then of more.

        Its decay rises to that of the config, so that the first weights are soon forgotten.
        """
        if self.config.ema_decay is None:
            return None
        decay = jnp.minimum(self.config.ema_decay, (1.0 + count) / (10.0 + count))
        return jax.tree.map(lambda mean, new: mean + (1 - decay) * (new - mean), average, weights)

    def gradients(self, weights: Any, batch: Any) -> tuple[Float32[Array, ""], Any]:
        """Mean loss and its float32 gradients, sharded as the weights; whole at level 0."""
        return self._sharded(
            self._local_gradients,
            weights,
            self._prepare(batch, training=True),
            out_specs=(PartitionSpec(), self._specs),
        )

    def _losses(self, weights: Any, batch: Any) -> tuple[Array, Array]:
        specs = (PartitionSpec(), PartitionSpec())
        batch = self._prepare(batch, training=False)
        return self._sharded(self._local_losses, weights, batch, out_specs=specs)

    def outputs(self, weights: Any, batch: Any) -> Float32[Array, "B T out"]:
        """What the model says of every token of a prepared batch, sharded as the tokens."""

        def local(weights: Any, batch: Any) -> Array:
            model = self._model(*self._sources_and_sinks(weights))
            return self.objective.outputs(model, self.objective.hidden(model, batch))

        spec = PartitionSpec(*self.batch_sharding.spec, None)
        return self._sharded(local, weights, batch, out_specs=spec)

    def _prepare(self, batch: Any, *, training: bool) -> Any:
        """What the model is shown, each token where it is to be."""
        prepared = self.objective.prepare(batch, training=training)

        def placed(x: Array) -> Array:
            return lax.with_sharding_constraint(x, sharding_of(self.batch_sharding, x.ndim))

        return jax.tree.map(placed, prepared)

    def _sharded(
        self, function: Callable[..., Any], weights: Any, batch: Any, *, out_specs: Any
    ) -> Any:
        """Calls a function of (weights, prepared batch) as the program of each device."""

        def local(weights: Any, batch: Any) -> Any:
            # Times and labels are the same on all devices of a sequence, and what is made of them
            # is not: gradients by weights differ.
            return function(
                weights, jax.tree.map(lambda x: vary(x, *self.partition.replicas), batch)
            )

        batch_specs = jax.tree.map(lambda x: sharding_of(self.batch_sharding, x.ndim).spec, batch)
        return jax.shard_map(
            local,
            mesh=self.attention.mesh,
            in_specs=(self._specs, batch_specs),
            out_specs=out_specs,
        )(weights, batch)

    # What one device does.

    def _sources_and_sinks(self, weights: Any) -> tuple[Any, Any]:
        partition = self.partition
        return partition.sources(weights, self._splits), partition.sinks(weights, self._splits)

    def _local_gradients(self, weights: Any, batch: Any) -> tuple[Array, Any]:
        sources, sinks = self._sources_and_sinks(weights)
        loss_and_gradients = jax.value_and_grad(self._local_sum)

        def add(so_far: Any, part: Any) -> tuple[Any, None]:
            new = loss_and_gradients(sinks, sources, part)
            return jax.tree.map(jnp.add, so_far, new), None

        if self.config.accumulation == 1:
            loss, gradients = loss_and_gradients(sinks, sources, batch)
        else:
            zero = vary(jnp.zeros(()), *self._all_axes)
            (loss, gradients), _ = lax.scan(add, (zero, sinks), self._parts(batch))
        # A batch without any weight has no gradient.
        total = jnp.maximum(self._total_weight(batch), 1.0)
        gradients = self.partition.reduce(gradients, self._splits)
        return self._over_all(loss) / total, jax.tree.map(lambda x: x / total, gradients)

    def _local_losses(self, weights: Any, batch: Any) -> tuple[Array, Array]:
        sources, sinks = self._sources_and_sinks(weights)
        parts = lax.map(lambda part: self._local_sum(sinks, sources, part), self._parts(batch))
        return self._over_all(jnp.sum(parts)), self._total_weight(batch)

    def _parts(self, batch: Any) -> Any:
        """The batch as it is treated, one part after another: [accumulation, b, ...]."""
        parts = self.config.accumulation
        return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)

    def _local_sum(self, sinks: Any, sources: Any, batch: Any) -> Float32[Array, ""]:
        """The weighted sum of this device's losses."""
        hidden = self.objective.hidden(self._model(sources, sinks), batch)
        targets, weights, name = batch.targets, batch.weights, self.objective.head
        sink = sinks[name]
        if name == "head":
            # Else its gradient waits, whole, to be sent with that of the embedding.
            sink, hidden = gradient_first(sink, hidden)
        head = self.partition.use(sources[name], sink, self._splits[name])
        if self.partition.tensor:
            # The devices along `tensor` know the same tokens: each takes the loss of some.
            head = jax.tree.map(self.partition.spread, head)
            hidden, targets, weights = map(self._own_tokens, (hidden, targets, weights))

        def loss(head: Any, hidden: Array, targets: Array, weights: Array) -> Array:
            # It needs no other weights: of those, the shapes will do.
            state = {other: x for other, x in self.state_shapes.weights.items() if other != name}
            model = nnx.merge(self._graph, nnx.State(state | {name: head}))
            return jnp.sum(self.objective.losses(model, hidden, targets) * weights)

        summed = summed_in_tiles(loss, self.config.tile, self.config.model.dtype)
        return summed(head, hidden, targets, weights)

    def _model(self, sources: Any, sinks: Any) -> Any:
        """The model of one device; its layers collect their weights when they run."""
        state = {}
        for name in sources:
            if name == STACKED:
                state[name] = jax.tree.map(_Weight, sources[name], sinks[name])
            else:
                state[name] = self.partition.use(sources[name], sinks[name], self._splits[name])
        return nnx.merge(self._graph, nnx.State(state))

    def _total_weight(self, batch: Any) -> Float32[Array, ""]:
        """The sum of the weights of a batch over all devices."""
        total = jnp.sum(batch.weights)
        replicas = self.partition.replicas
        return lax.psum(total, replicas) if replicas else total

    def _over_all(self, x: Array) -> Array:
        return lax.psum(x, self._all_axes) if self._all_axes else x

    @property
    def _all_axes(self) -> tuple[str, ...]:
        return (*self.partition.replicas, *self.partition.tensor)

    def _own_tokens(self, x: Array) -> Array:
        count = x.shape[1] // self.partition.size(self.partition.tensor)
        first = lax.axis_index("tensor") * count
        return lax.dynamic_slice_in_dim(self.partition.spread(x), first, count, 1)

    # What the model leaves open.

    def _attend(
        self, query: Array, key: Array, value: Array, segment_ids: Array | None = None
    ) -> Array:
        return self.attention.local(query, key, value, segment_ids, segment_ids)[0]

    def _layer(self, block: Callable[..., Array]) -> Callable[..., Array]:
        splits = self.partition.of_layer(self._splits[STACKED])

        def run(weights: Any, x: Array, *context: Any) -> Array:
            sources = jax.tree.map(lambda x: x.source, weights, is_leaf=_is_weight)
            sinks = jax.tree.map(lambda x: x.sink, weights, is_leaf=_is_weight)
            return block(self.partition.use(sources, sinks, splits), x, *context)

        return rematerialised(
            run,
            remat=self.config.remat,
            offload=self.config.offload,
            collects_weights=self.config.zero == 3,
        )

    def _tokens(self, function: Callable[..., Array]) -> Callable[..., Array]:
        return in_tiles(function, self.config.tile)


def _check_tokens(config: TrainConfig, attention: Attention, tokens: int) -> None:
    """Raises where the first step would, but with a way out.

    Args:
        tokens: of a row of a batch.
    """
    degrees = attention.degrees
    check_heads(degrees, config.model.heads, config.model.kv_heads)
    length = tokens // degrees.sequence
    if length % degrees.tensor:
        shards = degrees.sequence * degrees.tensor
        name, way_out = "seq_len", f"Use a multiple of {shards}."
        if config.kind == "dit":
            name = "The number of patches, filled up to a multiple of the sequence degree,"
            way_out = "Use another --size, --model.patch or --mesh.tensor."
        raise ValueError(
            f"{name} must be divisible by sequence degree * tensor, whose devices share the loss; "
            f"got {tokens}, sequence degree={degrees.sequence}, tensor={degrees.tensor}. {way_out}"
        )
    rows = config.batch_size // (degrees.data * config.accumulation)
    check_tile(config.tile, rows * length)
    check_tile(config.tile, rows * length // degrees.tensor)
    platform = device_kind(attention.mesh)[0]
    if config.offload and platform != "cuda":
        raise NotImplementedError(
            "offload needs GPUs, which have memory of their own; got devices of platform "
            f"{platform!r}. Leave --offload out."
        )


def _is_weight(x: Any) -> bool:
    return isinstance(x, _Weight)
