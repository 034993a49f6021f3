"""Layers of experts against dense float64: every expert for every token, and no token dropped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.config import ExpertsConfig
from models.experts import Experts, _Dispatch, _expert, by_dispatch, by_group, tile_rows, tiles_of
from models.lora import narrow_matrices

SCALE = 0.75
SIZES = dict(count=6, top_k=2, width=12, balance_loss=0.0)


def same(x):
    return x


def make_layer(adapters=None, lower=0.0, **changes):
    config = ExpertsConfig(**SIZES | changes)
    layer = Experts(config, width=8, out_gain=1.0, dtype=jnp.float32, rngs=nnx.Rngs(0))
    projections = (layer.expert_gate, layer.expert_up, layer.expert_down) if adapters else ()
    for base in filter(None, projections):
        base.scale = SCALE
        base.lora_a, base.lora_b = narrow_matrices(
            base.kernel.shape, rank=adapters, stacked=1, contracted=1, rngs=nnx.Rngs(1)
        )
    rng = np.random.default_rng(0)
    for path, weight in nnx.iter_graph(layer):
        if isinstance(weight, nnx.Param) and any(x in str(path[-1]) for x in ("bias", "lora_b")):
            weight.set_value(jnp.asarray(rng.normal(size=weight.shape), jnp.float32))
    if layer.router_bias is not None:
        layer.router_bias[...] -= lower
    return layer


def dense(sizes, w, x, token_weights):
    """Output, auxiliary losses and the load of each expert, as the papers have them."""
    logits = x @ w["router"] + w.get("router_bias", 0)
    scores = jax.nn.softmax(logits) if sizes.scores == "softmax" else jax.nn.sigmoid(logits)
    order = scores + w.get("choice_bias", 0)
    if sizes.groups > 1:
        groups = order.reshape(len(x), sizes.groups, -1)
        best_two = jnp.sort(groups, axis=-1)[..., -2:].sum(-1)
        worst = jnp.sort(best_two, axis=-1)[:, -sizes.top_groups][:, None]
        order = jnp.where((best_two >= worst)[..., None], groups, -jnp.inf).reshape(order.shape)
    elif "choice_bias" not in w:
        order = logits
    chosen = jnp.argsort(-order, axis=-1, stable=True)[:, : sizes.top_k]
    taken = (chosen[:, :, None] == jnp.arange(sizes.count)).sum(1)
    shares = scores * taken
    if sizes.normalised:
        shares = shares / shares.sum(-1, keepdims=True)
    shares, out = sizes.share_scale * shares, 0.0

    def kernel(name, e):
        a, b = (w.get(f"expert_{name}/lora_{x}", np.zeros((99, 1, 1)))[e] for x in "ab")
        return w[f"expert_{name}/kernel"][e] + SCALE * a @ b

    tokens = x @ w.get("latent_in/kernel", np.eye(x.shape[1]))
    for e in range(sizes.count):
        up = tokens @ kernel("up", e) + w.get("expert_up_bias", np.zeros((99, 1)))[e]
        if sizes.activation != "relu2":
            gate = tokens @ kernel("gate", e) + w.get("expert_gate_bias", np.zeros((99, 1)))[e]
        if sizes.activation == "relu2":
            hidden = jnp.maximum(up, 0) ** 2
        elif sizes.activation == "swiglu":
            hidden = gate * jax.nn.sigmoid(gate) * up
        else:
            gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
            hidden = (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
        one = hidden @ kernel("down", e) + w.get("expert_down_bias", np.zeros((99, 1)))[e]
        out = out + shares[:, e : e + 1] * one
    out = out @ w.get("latent_out/kernel", np.eye(x.shape[1]))
    if sizes.shared_width:
        up, down = (w[f"shared/{x}/kernel"] for x in ("up", "down"))
        if sizes.activation == "relu2":
            common = jnp.maximum(x @ up, 0) ** 2 @ down
        else:
            gate = x @ w["shared/gate/kernel"]
            common = (gate * jax.nn.sigmoid(gate) * (x @ up)) @ down
        if sizes.shared_gate:
            common = common * jax.nn.sigmoid(x @ w["shared_gate/kernel"])
        out = out + common
    load = (token_weights[:, None] * taken).sum(0) / token_weights.sum()
    probabilities = scores / scores.sum(-1, keepdims=True)
    auxiliary = sizes.balance_loss * sizes.count * probabilities @ load
    auxiliary += sizes.z_loss * jnp.log(jnp.exp(logits).sum(-1)) ** 2
    return out, auxiliary, load


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(normalised=False, balance_loss=0.1, z_loss=0.01),
        dict(activation="clamped", biases=True, balance_loss=1.0),
        dict(scores="sigmoid", shared_width=10, shared_gate=True),
        dict(scores="sigmoid", biases=True, lower=120, balance_loss=0.1),
        dict(count=5, top_k=5, shared_width=4),
        pytest.param(dict(count=96, top_k=3), marks=pytest.mark.slow),
        dict(adapters=4),
        # Biases in the choice alone; all scores with them are below 0 in places.
        dict(scores="sigmoid", choice_bias=True, share_scale=2.5, balance_loss=0.1),
        dict(scores="sigmoid", choice_bias=True, count=9, top_k=3, groups=3, top_groups=2),
        dict(count=8, groups=4, top_groups=1, share_scale=0.5),
        dict(activation="relu2", shared_width=10, share_scale=2.5),
        dict(activation="relu2", latent_width=5, shared_width=10, scores="sigmoid", adapters=4),
        dict(latent_width=11),
    ],
    ids=str,
)
def test_a_layer_is_that_of_dense_experts(changes):
    layer = make_layer(**changes)
    graph, weights = nnx.split(layer)
    rng = np.random.default_rng(1)
    x, dout = (3 * rng.normal(size=(2, 17, 8)) for _ in range(2))
    counted = rng.choice([0.0, 1.0, 0.5], size=(2, 17))
    daux = rng.normal(size=(2, 17))

    def run(weights, x):
        layer = nnx.merge(graph, weights)
        route = layer.route(x, jnp.asarray(counted, jnp.float32), same)
        out = layer(x, route.chosen, route.shares, same, same)
        return (out, route.auxiliary), route.busiest

    def wanted(weights, x):
        out, auxiliary, load = dense(layer.config, weights, x.reshape(-1, 8), counted.ravel())
        return (out.reshape(x.shape), auxiliary.reshape(2, 17)), load

    def flat(tree):
        found = {}
        for path, value in jax.tree_util.tree_leaves_with_path(tree):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            found[name.removesuffix("/value")] = np.asarray(value, np.float64)
        return found

    with jax.default_matmul_precision("highest"):
        found, pull, busiest = jax.vjp(jax.jit(run), weights, jnp.asarray(x, "f4"), has_aux=True)
        gradients, dx = pull((jnp.asarray(dout, "f4"), jnp.asarray(daux, "f4")))
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        given = {name: jnp.asarray(value) for name, value in flat(weights).items()}
        right, pull, load = jax.vjp(jax.jit(wanted), given, jnp.asarray(x), has_aux=True)
        right_gradients, right_dx = pull((jnp.asarray(dout), jnp.asarray(daux)))
    pairs = {"out": (found[0], right[0]), "aux": (found[1], right[1]), "x": (dx, right_dx)}
    pairs |= {name: (y, right_gradients[name]) for name, y in flat(gradients).items()}
    for name, (given, wanted_value) in pairs.items():
        size = np.abs(np.asarray(wanted_value)).max() or 1
        np.testing.assert_allclose(given, wanted_value, rtol=0, atol=3e-6 * size, err_msg=name)
    assert busiest == pytest.approx(
        np.asarray(load).max() * layer.config.count / layer.config.top_k, rel=1e-5
    )


@pytest.mark.parametrize(
    "chosen",
    [
        np.full((40, 1), 3),
        np.tile([4, 0], (40, 1)),
        np.array([[5]]),
        np.array([[1, 2], [2, 5]]),
        np.arange(2000).reshape(500, 4) % 6,
    ],
    ids=["one expert", "two of six", "one token", "experts without tokens", "several tiles"],
)
def test_every_assignment_is_computed_once(chosen):
    """The shares of a token add up, whatever the experts: none is dropped, and none comes twice."""
    tiles = tiles_of(jnp.asarray(chosen, jnp.int32), 6)
    rows = np.asarray(tiles.row)
    filled = rows[rows < chosen.size]
    assert sorted(filled.tolist()) == list(range(chosen.size))
    owner = np.broadcast_to(np.asarray(tiles.expert)[:, None], rows.shape)[rows < chosen.size]
    np.testing.assert_array_equal(chosen.ravel()[filled], owner)
    size = rows.shape[1]
    assert size == tile_rows(chosen.size, 6)
    assert rows.size <= chosen.size + min(6, chosen.size) * (size - 1) + size


def test_equal_logits_choose_the_first_experts():
    layer = make_layer()
    layer.router.set_value(jnp.zeros(layer.router.shape))
    route = layer.route(jnp.ones((1, 3, 8)), None, same)
    np.testing.assert_array_equal(route.chosen, np.broadcast_to([0, 1], (1, 3, 2)))
    np.testing.assert_allclose(route.shares, 0.5, rtol=1e-6)


def test_gradients_of_weights_in_bfloat16_are_float32_sums():
    """4,096 equal tokens: a sum in bfloat16 would stop growing at 256 of them."""
    tokens = 4096
    x = jnp.full((tokens, 8), 0.5, jnp.bfloat16)
    weights = {"w": jnp.ones((2, 8, 8))}

    def expert(weights, x, shares):
        return shares[:, None] * jnp.matmul(x.astype(jnp.float32), weights["w"])

    def total(weights):
        chosen, shares = jnp.zeros((tokens, 1), jnp.int32), jnp.ones((tokens, 1))
        return jnp.sum(by_group(expert, weights, x, chosen, shares))

    gradient = jax.grad(total)(weights)["w"]
    np.testing.assert_array_equal(
        gradient, np.stack([np.full((8, 8), tokens / 2), np.zeros((8, 8))])
    )


def test_rows_of_a_tile_suit_the_mean_expert():
    rows = functools.partial(tile_rows, experts=128)
    assert [rows(x) for x in (1, 131_072, 262_144, 1 << 20, 1 << 24)] == [8, 512, 1024, 2048, 2048]


def test_a_bias_counts_in_the_choice_alone_and_learns_from_the_load():
    layer = make_layer(balance_rate=0.1, balance_loss=0.5)
    graph, weights = nnx.split(layer)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(1, 40, 8)), jnp.float32)
    plain = layer.route(x, None, same)
    other = make_layer(balance_rate=0.1)
    other.choice_bias.set_value(jnp.asarray([9.0, 0, 0, 0, 0, -9.0]))
    moved = other.route(x, None, same)
    assert (moved.chosen == 0).any(-1).all()
    assert not (moved.chosen == 5).any()
    logits = np.asarray(x[0] @ layer.router[...], np.float64)
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    shares = np.take_along_axis(scores, np.asarray(moved.chosen[0]), -1)
    shares /= shares.sum(-1, keepdims=True)
    np.testing.assert_allclose(moved.shares[0], shares, rtol=1e-5)

    def loss(weights):
        return jnp.mean(nnx.merge(graph, weights).route(x, None, same).auxiliary)

    value, gradients = jax.value_and_grad(loss)(weights)
    assert value == pytest.approx(float(jnp.mean(plain.auxiliary)), rel=1e-6)
    counts = np.bincount(np.asarray(plain.chosen).ravel(), minlength=6) / 40
    np.testing.assert_allclose(gradients["choice_bias"][...], counts - 2 / 6, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("chosen", "messages"),
    [
        (np.arange(480).reshape(240, 2) % 16, 4),
        (np.tile([3, 2], (240, 1)), 30),
        (np.where(np.arange(240) < 30, 0, np.arange(240) % 15 + 1)[:, None], 30),
        (np.arange(8)[:, None] * 2, 1),
    ],
    ids=["balanced", "one device", "uneven", "one token each"],
)
def test_tokens_that_are_sent_to_experts_have_the_outputs_of_all(chosen, messages):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)
    shapes = {"gate": (16, 8, 12), "up": (16, 8, 12), "down": (16, 12, 8)}
    weights = {x: jnp.asarray(rng.normal(size=y) / 3, jnp.float32) for x, y in shapes.items()}
    x, dout = (jnp.asarray(rng.normal(size=(len(chosen), 8)), jnp.float32) for _ in range(2))
    shares = jnp.asarray(rng.random(chosen.shape), jnp.float32)
    expert = functools.partial(_expert, "swiglu", ())
    chosen, spec = jnp.asarray(chosen, jnp.int32), jax.P(("a", "b"))

    def on_device(weights, x, chosen, shares):
        count = _Dispatch(("a", "b"), 2, chosen).messages
        return by_dispatch(expert, ("a", "b"), weights, x, chosen, shares), count

    sent = jax.shard_map(on_device, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec, jax.P()))
    given = weights, x, shares
    found, pull, count = jax.vjp(
        jax.jit(lambda w, x, s: sent(w, x, chosen, s)), *given, has_aux=True
    )
    right, pull_right = jax.vjp(jax.jit(lambda w, x, s: by_group(expert, w, x, chosen, s)), *given)
    assert int(count) == messages
    for a, b in zip(
        *map(jax.tree.leaves, ((found, pull(dout)), (right, pull_right(dout)))), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * np.abs(b).max())
