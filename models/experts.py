"""A feed-forward of experts: a router sends each token to a few of many small MLPs.

No token is dropped, whatever the router chooses, and all shapes are static: the rows of each expert
are filled up to whole tiles, and a loop over tiles takes the weights of the expert of each tile. So
at most (experts) * (rows of a tile - 1) rows are computed for nothing.

References:
    Switch Transformers, https://arxiv.org/abs/2101.03961, equations (4) to (6) for the balancing
    loss, over all tokens of a batch, https://arxiv.org/abs/2501.11873; balance without a loss,
    https://arxiv.org/abs/2408.15664; ST-MoE, https://arxiv.org/abs/2202.08906, equation (5) for the
    z-loss; the clamped activation of gpt-oss, https://arxiv.org/abs/2508.10925; experts that are
    given, https://arxiv.org/abs/2510.11370.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Integer, Shaped

from models.layers import MLP, give_weights, relu2
from models.linear import project, project_adapted
from models.parts import experts
from models.parts.experts import ExpertsConfig
from startrail_jax.xla.varying import vary, varying_axes

MOST_ROWS = 2048
"""Most rows of a tile."""
FILLED = 2
"""Tiles that the mean expert fills, at least (see `tile_rows`). On an H100, a tile of 128 rows of
Qwen3-30B-A3B took 0.12 ms in both passes, most of it in kernels that larger tiles do not slow."""
_OF_EXPERTS = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=0)
CLAMP, SHARPNESS = 7.0, 1.702
"""For the clamped activation: the limit of its inputs, and the factor in its sigmoid."""


class Balance(NamedTuple):
    """Distribution of the tokens of a layer, or of all layers, over the experts."""

    load: Float32[Array, " experts"]
    """Tokens of each expert for each token of the batch, over all devices; without gradients."""
    probability: Float32[Array, " experts"]
    """The mean probability of each expert over the tokens of this device."""


class Route(NamedTuple):
    """The experts of the tokens of a layer."""

    chosen: Int32[Array, "B T k"]
    """The experts of each token: those given, or of the highest logits, the first among equals."""
    shares: Float32[Array, "B T k"]
    """Factor of the output of each of these experts."""
    auxiliary: Float32[Array, "B T"]
    """Auxiliary loss of the layer for each token."""
    balance: Balance
    """Distribution of the tokens of the layer over the experts."""
    busiest: Float32[Array, ""]
    """Tokens of the busiest expert, over the mean of all experts."""


class ExpertLinear(nnx.Module):
    """A projection of each expert, to which `models.lora` may add adapters."""

    def __init__(self, kernel: Float32[Array, "experts inputs outputs"]) -> None:
        self.kernel = nnx.Param(kernel)
        self.lora_a: nnx.Param | None = nnx.data(None)
        self.lora_b: nnx.Param | None = nnx.data(None)
        self.scale = 0.0

    def weights(self, name: str) -> dict[str, Array]:
        """The kernel under `name`, and matrices of adapters under names such as "up/a"."""
        every = {name: self.kernel, f"{name}/a": self.lora_a, f"{name}/b": self.lora_b}
        return {x: weight[...] for x, weight in every.items() if weight is not None}


class Experts(nnx.Module):
    """sum_i share_i expert_i(x) over the chosen experts, and the shared expert of all tokens."""

    router: nnx.Param
    expert_gate: ExpertLinear | None = None
    expert_up: ExpertLinear
    expert_down: ExpertLinear
    choice_bias: nnx.Param | None = None
    router_bias: nnx.Param | None = None
    expert_gate_bias: nnx.Param | None = None
    expert_up_bias: nnx.Param | None = None
    expert_down_bias: nnx.Param | None = None
    latent_in: nnx.LinearGeneral | None = None
    latent_out: nnx.LinearGeneral | None = None
    shared: MLP | None = None
    shared_gate: nnx.LinearGeneral | None = None

    def __init__(
        self, config: ExpertsConfig, *, width: int, out_gain: float, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        """Builds the router, float32, and the projections of all experts, [experts, ...].

        Args:
            config: sizes and options of the layer, the width of an expert among them.
            width: channels of inputs and outputs.
            out_gain: standard deviation of the outputs of an expert for inputs of variance 1.
            dtype: type of activations and matrix products.
            rngs: source of the initial weights.
        """
        self.config = config
        sizes = experts.sizes_of(config) | {"width": width}
        down = nnx.initializers.variance_scaling(out_gain**2, "fan_in", "normal", batch_axis=0)
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        for path, weight in experts.weights_of(config).items():
            name, _, leaf = path.partition("/")
            if weight.of_experts and leaf:
                init = down if weight.init == "out" else _OF_EXPERTS
                shape = weight.shape(sizes)
                setattr(self, name, ExpertLinear(init(rngs.params(), shape, jnp.float32)))
            elif name != "shared":
                give_weights(self, {path: weight}, sizes, **options)
            elif self.shared is None:
                shared = dict(width=width, hidden=config.shared_width, out_gain=out_gain)
                self.shared = MLP("swiglu" if config.is_gated else "relu2", **shared, **options)

    def route(
        self,
        x: Float[Array, "B T width"],
        token_weights: Float32[Array, "B T"] | None,
        total: Callable[[Array], Array],
        given: Integer[Array, "B T k"] | None = None,
    ) -> Route:
        """Chooses the experts of each token, in float32.

        Args:
            x: inputs of the layer.
            token_weights: weight of each token in the loss and in the balance; None for 1.
            total: the sum over the devices that have different tokens of the batch.
            given: the experts of each token, each once, in place of the router's choice. Their
                shares are the router's all the same, and the balance is that of these experts.
        """
        # A GPU would round float32 products to TF32, by which other experts would win.
        logits = jnp.einsum("btc,ce->bte", x.astype(jnp.float32), self.router[...],
                            precision="highest")  # fmt: skip
        if self.router_bias is not None:
            logits = logits + self.router_bias[...][None, None]
        if self.config.scores == "softmax":
            scores, logarithms = jax.nn.softmax(logits), logits
        else:
            scores, logarithms = jax.nn.sigmoid(logits), jax.nn.log_sigmoid(logits)
        if given is None:
            bias = self.choice_bias
            order = logits if bias is None else scores + bias[...][None, None]
            if self.config.groups > 1:
                order = self._of_best_groups(scores if bias is None else order)
            chosen = lax.top_k(order, self.config.top_k)[1]
        else:
            chosen = given.astype(jnp.int32)
        if self.config.normalised:
            # By their logarithms: all scores of a token may be too small for float32.
            shares = jax.nn.softmax(jnp.take_along_axis(logarithms, chosen, axis=-1))
        else:
            shares = jnp.take_along_axis(scores, chosen, axis=-1)
        shares = self.config.share_scale * shares
        if token_weights is None:
            token_weights = jnp.ones(x.shape[:2], jnp.float32)
        counts = jnp.zeros(self.config.count).at[chosen].add(token_weights[..., None])
        sums = total(jnp.append(counts, jnp.sum(token_weights)))
        # Tokens of each expert, for each token of the batch.
        load = lax.stop_gradient(sums[:-1] / jnp.maximum(sums[-1], 1e-30))
        probabilities = jax.nn.softmax(logarithms)
        of_layer = self.config.balance_loss if self.config.balance_over == "layer" else 0.0
        auxiliary = of_layer * self.config.count * (probabilities @ load)
        weight = jnp.maximum(jnp.sum(token_weights), 1e-30)
        balance = Balance(load, jnp.einsum("bt,bte->e", token_weights, probabilities) / weight)
        if self.config.z_loss:
            auxiliary += self.config.z_loss * jnp.square(jax.nn.logsumexp(logits, axis=-1))
        if self.choice_bias is not None and self.config.balance_rate:
            # Value 0; its gradient is the expert's excess load.
            bias = self.choice_bias[...] - lax.stop_gradient(self.choice_bias[...])
            auxiliary += bias @ (load - jnp.mean(load))
        busiest = jnp.max(load) * self.config.count / self.config.top_k
        return Route(chosen, shares, auxiliary, balance, busiest)

    def _of_best_groups(
        self, order: Float32[Array, "B T experts"]
    ) -> Float32[Array, "B T experts"]:
        """The scores by which experts are chosen, -inf outside of the best groups."""
        groups = order.reshape(*order.shape[:2], self.config.groups, -1)
        sums = jnp.sum(lax.top_k(groups, 2)[0], axis=-1)
        best = lax.top_k(sums, self.config.top_groups)[1]
        is_best = jnp.any(jax.nn.one_hot(best, self.config.groups, dtype=bool), axis=-2)
        return jnp.where(is_best[..., None], groups, -jnp.inf).reshape(order.shape)

    def __call__(
        self,
        x: Float[Array, "B T width"],
        chosen: Int32[Array, "B T k"],
        shares: Float32[Array, "B T k"],
        copy: Callable[[Array], Array],
        reduce: Callable[[Array], Array],
        axes: tuple[str, ...] = (),
    ) -> Float[Array, "B T width"]:
        """The output of the layer.

        Args:
            x: its inputs.
            chosen, shares: of a `Route`.
            copy, reduce: `Hooks.copy_to_tensor` and `Hooks.reduce_from_tensor`.
            axes: `Hooks.expert_axes`.
        """
        inputs = x if self.latent_in is None else self.latent_in(x)
        tokens = inputs.reshape(-1, inputs.shape[-1])
        to, by = (y.reshape(-1, self.config.top_k) for y in (chosen, shares))
        projections = {"up": self.expert_up, "down": self.expert_down}
        projections |= {} if self.expert_gate is None else {"gate": self.expert_gate}
        weights: dict[str, Array] = {}
        for name, projection in projections.items():
            weights |= projection.weights(name)
        if self.expert_gate_bias is not None and self.expert_up_bias is not None:
            weights |= {
                "gate_bias": self.expert_gate_bias[...],
                "up_bias": self.expert_up_bias[...],
            }
        scales = tuple((name, x.scale) for name, x in projections.items())
        expert = functools.partial(_expert, self.config.activation, scales)
        arguments = (weights, copy(tokens), to, copy(by))
        out: Any = by_dispatch(expert, axes, *arguments) if axes else by_group(expert, *arguments)
        # Sums over devices, too, are of float32 numbers.
        out = reduce(out)
        if self.expert_down_bias is not None:
            # As a product, which is smaller than the biases of all choices.
            places = jnp.arange(len(to))[:, None], to
            each = jnp.zeros((len(tokens), self.config.count)).at[places].add(by)
            out += jnp.matmul(each, self.expert_down_bias[...], precision="highest")
        out = out.reshape(inputs.shape)
        if self.latent_out is not None:
            out = self.latent_out(out.astype(x.dtype)).astype(jnp.float32)
        if self.shared is not None:
            common = reduce(self.shared(copy(x))).astype(jnp.float32)
            if self.shared_gate is not None:
                common *= jax.nn.sigmoid(self.shared_gate(x).astype(jnp.float32))
            out += common
        return out.astype(x.dtype)


def _expert(
    activation: str,
    scales: tuple[tuple[str, float], ...],
    weights: dict[str, Array],
    x: Float[Array, "rows width"],
    shares: Float32[Array, " rows"],
) -> Float32[Array, "rows width"]:
    """The output of an expert, added to the outputs of its tokens."""

    def projected(x: Any, name: str, out_dtype: Any = None) -> Any:
        if f"{name}/a" not in weights:
            return project(x, weights[name], 1, out_dtype)
        kernel, a, b = (weights[f"{name}{x}"] for x in ("", "/a", "/b"))
        return project_adapted(x, kernel, a, b, dict(scales)[name], out_dtype=out_dtype)

    up = projected(x, "up")
    gate: Any = None if activation == "relu2" else projected(x, "gate")
    if "gate_bias" in weights:
        gate, up = (
            (y.astype(jnp.float32) + weights[name][None]).astype(x.dtype)
            for y, name in ((gate, "gate_bias"), (up, "up_bias"))
        )
    if activation == "relu2":
        hidden: Any = relu2(up)
    elif activation == "swiglu":
        hidden = jax.nn.silu(gate) * up
    else:
        gate, up = jnp.minimum(gate, CLAMP), jnp.clip(up, -CLAMP, CLAMP)
        hidden = (up + 1) * gate * jax.nn.sigmoid(SHARPNESS * gate)
    # So the backward pass needs no output.
    hidden = (hidden.astype(jnp.float32) * shares[:, None]).astype(x.dtype)
    return projected(hidden, "down", jnp.float32)


def tile_rows(assignments: int, experts: int) -> int:
    """Rows of a tile: a power of two, at least 8 and at most `MOST_ROWS`. The mean expert fills
    `FILLED` tiles if it has enough rows."""
    mean = max(assignments // (FILLED * experts), 1)
    return min(max(1 << (mean.bit_length() - 1), 8), MOST_ROWS)


class Tiles(NamedTuple):
    """Rows of tokens, sorted by expert, in tiles of one expert each."""

    expert: Int32[Array, " tiles"]
    row: Int32[Array, "tiles rows"]
    """The assignment of a token to an expert in each row, token * k + choice; tokens * k for an
    empty row."""


def tiles_of(chosen: Int32[Array, "tokens k"], experts: int) -> Tiles:
    """The tiles of all experts. There are as many as any choice may need; the last may be empty."""
    count = chosen.size
    rows = tile_rows(count, experts)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.zeros(experts, jnp.int32).at[flat].add(1)
    ends, tiles = jnp.cumsum(sizes), -(-sizes // rows)
    last = jnp.cumsum(tiles)
    # Each expert with rows has one tile that may not be full.
    most = (count + min(experts, count) * (rows - 1)) // rows
    number = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(last, number, side="right"), experts - 1)
    within = (number - (last - tiles)[expert]) * rows
    place = within[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
    filled = place < sizes[expert][:, None]
    place = place + (ends - sizes)[expert][:, None]
    row = jnp.where(filled, order[jnp.minimum(place, count - 1)], count)
    return Tiles(expert.astype(jnp.int32), row.astype(jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_group(
    expert: Callable[..., Array],
    weights: Any,
    x: Float[Array, "tokens width"],
    chosen: Int32[Array, "tokens k"],
    shares: Float32[Array, "tokens k"],
) -> Float32[Array, "tokens width"]:
    """sum_i expert(weights[chosen_i], x, shares_i) for each token, in float32.

    The backward pass computes each tile again, and saves nothing but the arguments.

    Args:
        expert: a function (weights of one expert, x [rows width], shares [rows]) of some tokens of
            that expert, each by itself, which is 0 for shares of 0.
        weights: tree of arrays [experts, ...], float32, whose matrices have values of the type of
            x. Their gradients are added up in float32.
        x: tokens.
        chosen: the experts of each token, each once; a number beyond the last expert for none.
        shares: factors that `expert` applies.
    """
    narrow, tiles = _narrow(weights, x.dtype), tiles_of(chosen, _count(weights))

    def step(out: Array, tile: Tiles) -> tuple[Array, None]:
        token, rows, share = _rows(tile, x, shares)
        new = expert(_weights_of(narrow, tile.expert), rows, share)
        return out.at[token].add(new, mode="drop", unique_indices=True), None

    return lax.scan(step, _zeros(x.shape, weights, x, shares), tiles)[0]


def _backward(expert: Any, arguments: Any, dout: Array) -> tuple[Any, ...]:
    weights, x, chosen, shares = arguments
    narrow, tiles = _narrow(weights, x.dtype), tiles_of(chosen, _count(weights))

    def step(sums: Any, tile: Tiles) -> tuple[Any, None]:
        dweights, dx, dshares = sums
        token, rows, share = _rows(tile, x, shares)
        of_rows = dout.at[token].get(mode="fill", fill_value=0)
        pull = jax.vjp(expert, _weights_of(narrow, tile.expert), rows, share)[1]
        of_expert, of_x, of_shares = pull(of_rows)
        dweights = jax.tree.map(lambda x, y: x.at[tile.expert].add(y), dweights, of_expert)
        options: Any = {"mode": "drop", "unique_indices": True}
        dx = dx.at[token].add(of_x.astype(jnp.float32), **options)
        return (dweights, dx, dshares.at[tile.row].set(of_shares, **options)), None

    first = _zero_gradients(weights, x, shares, dout)
    (dweights, dx, dshares), _ = lax.scan(step, first, tiles)
    return dweights, dx.astype(x.dtype), None, dshares.reshape(shares.shape)


by_group.defvjp(lambda expert, *arguments: (by_group(expert, *arguments), arguments), _backward)


DISPATCHES = 4
"""Messages in which each device sends its assignments to the others, if all of them get as many."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def by_dispatch(
    expert: Callable[..., Array],
    axes: tuple[str, ...],
    weights: Any,
    x: Float[Array, "tokens width"],
    chosen: Int32[Array, "tokens k"],
    shares: Float32[Array, "tokens k"],
) -> Float32[Array, "tokens width"]:
    """`by_group` where each device has some of the experts, in their order.

    Tokens are sent to the devices of their experts, and outputs back, in the type of x. Messages
    have one size, and there are as many as the busiest pair of devices needs: no token is dropped.

    Args:
        axes: the mesh axes over which experts are divided, inside a `shard_map`.
        weights: the weights of the experts of this device.
        expert, x, chosen, shares: as in `by_group`, with the experts of all devices.
    """
    dispatch = _Dispatch(axes, _count(weights), chosen)

    def step(number: Array, out: Array) -> Array:
        rows, token = dispatch.rows(number)
        received, to, by = dispatch.sent(rows, token, x, shares)
        back: Any = by_group(expert, weights, received, to, by)
        back = dispatch.exchange(back.astype(x.dtype).reshape(*rows.shape, -1))
        return out.at[token].add(back.astype(jnp.float32), mode="drop")

    return lax.fori_loop(0, dispatch.messages, step, _zeros(x.shape, weights, x, shares))


def _dispatch_backward(expert: Any, axes: Any, arguments: Any, dout: Array) -> tuple[Any, ...]:
    weights, x, chosen, shares = arguments
    dispatch = _Dispatch(axes, _count(weights), chosen)

    def step(number: Array, sums: Any) -> Any:
        dweights, dx, dshares = sums
        rows, token = dispatch.rows(number)
        received, to, by = dispatch.sent(rows, token, x, shares)
        of_rows = dout.astype(x.dtype).at[token].get(mode="fill", fill_value=0)
        of_rows = dispatch.exchange(of_rows).reshape(received.shape).astype(jnp.float32)
        of_weights, of_x, _, of_shares = _backward(expert, (weights, received, to, by), of_rows)
        of_x, of_shares = (
            dispatch.exchange(y.reshape(*rows.shape, *y.shape[1:])) for y in (of_x, of_shares[:, 0])
        )
        dx = dx.at[token].add(of_x.astype(jnp.float32), mode="drop")
        dshares = dshares.at[rows].set(of_shares, mode="drop")
        return jax.tree.map(jnp.add, dweights, of_weights), dx, dshares

    first = _zero_gradients(weights, x, shares, dout)
    dweights, dx, dshares = lax.fori_loop(0, dispatch.messages, step, first)
    return dweights, dx.astype(x.dtype), None, dshares.reshape(shares.shape)


by_dispatch.defvjp(
    lambda expert, axes, *arguments: (by_dispatch(expert, axes, *arguments), arguments),
    _dispatch_backward,
)


class _Dispatch:
    """Divides the assignments of this device into messages, each with some for every device, in
    order."""

    def __init__(self, axes: tuple[str, ...], experts: int, chosen: Int32[Array, "tokens k"]):
        self._axes, self._experts, self._chosen = axes, experts, chosen
        devices = lax.axis_size(axes)
        self._size = -(-chosen.size // (devices * DISPATCHES))
        device = chosen.reshape(-1) // experts
        self._order = jnp.argsort(device, stable=True)
        self._counts = jnp.zeros(devices, jnp.int32).at[device].add(1)
        self._first = jnp.cumsum(self._counts) - self._counts
        # The same number on all devices, which take part in every message.
        busiest = jnp.max(self._counts)
        self.messages = -(-lax.pmax(busiest, tuple(varying_axes(busiest))) // self._size)

    def rows(self, number: Array) -> tuple[Int32[Array, "P rows"], Int32[Array, "P rows"]]:
        """The assignments of a message, as in `Tiles`, and their tokens; beyond the last for
        none."""
        place = number * self._size + jnp.arange(self._size, dtype=jnp.int32)[None]
        filled = place < self._counts[:, None]
        place = jnp.minimum(self._first[:, None] + place, self._chosen.size - 1)
        rows = jnp.where(filled, self._order[place], self._chosen.size)
        tokens, k = self._chosen.shape
        return rows, jnp.where(filled, rows // k, tokens)

    def sent(self, rows: Array, token: Array, x: Array, shares: Array) -> tuple[Array, ...]:
        """The rows that this device gets: tokens, their experts among its own, and their shares."""
        options: Any = {"mode": "fill", "fill_value": 0}
        expert = self._chosen.reshape(-1).at[rows].get(**options) % self._experts
        expert = jnp.where(rows < self._chosen.size, expert, self._experts)
        share = shares.reshape(-1).at[rows].get(**options)
        received = self.exchange(x.at[token].get(**options)).reshape(-1, x.shape[1])
        return received, *(self.exchange(y).reshape(-1, 1) for y in (expert, share))

    def exchange(self, x: Shaped[Array, "P ..."]) -> Shaped[Array, "P ..."]:
        """Sends part i to device i, and puts the part received from device i in its place."""
        return lax.all_to_all(x, self._axes, 0, 0, tiled=True)


def _rows(tile: Tiles, x: Array, shares: Array) -> tuple[Array, Array, Array]:
    """The tokens of a tile, x of each, and its share; zeros for rows without any."""
    token = jnp.where(tile.row < shares.size, tile.row // shares.shape[1], len(x) + 1)
    share = shares.reshape(-1).at[tile.row].get(mode="fill", fill_value=0)
    return token, x.at[token].get(mode="fill", fill_value=0), share


def _count(weights: Any) -> int:
    return len(jax.tree.leaves(weights)[0])


def _narrow(weights: Any, dtype: Any) -> Any:
    """The matrices in the type of the products: the loop over tiles then has no wider copy."""
    return jax.tree.map(lambda w: w.astype(dtype) if w.ndim > 2 else w, weights)


def _weights_of(narrow: Any, expert: Array) -> Any:
    return jax.tree.map(
        lambda w: lax.dynamic_index_in_dim(w, expert, keepdims=False).astype(jnp.float32), narrow
    )


def _zero_gradients(weights: Any, x: Array, shares: Array, dout: Array) -> tuple[Any, Array, Array]:
    """Zeros to which the gradients of weights, x and shares are added; shares have a single row."""
    arrays = (weights, x, shares, dout)
    of_weights = jax.tree.map(lambda w: _zeros(w.shape, arrays), weights)
    return of_weights, _zeros(x.shape, arrays), _zeros(shares.size, arrays)


def _zeros(shape: Any, *like: Any) -> Float32[Array, "..."]:
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(like)))
    return vary(jnp.zeros(shape, jnp.float32), *axes)
