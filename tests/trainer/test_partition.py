"""Which dimension of which array is split over which mesh axes, and what is sent for that."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import startrail_jax as st
from configs.gpt import gpt_tiny
from models.gpt import GPT
from models.parts.gpt import gpt_weights
from refusals import refused
from startrail_jax.analysis.messages import read_messages
from startrail_jax.devices.degrees import ROLES
from startrail_jax.devices.nodes import node_grid, nodes_of, resolve_order
from startrail_jax.errors import InputError
from startrail_jax.xla.varying import vary
from trainer.parallel.partition import Partition, path_name

pytestmark = pytest.mark.quick

KERNELS = {"query": 1, "key": 1, "value": 1, "out": 0, "gate": 1, "up": 1, "down": 0}
ALL = ("data", "group", "ring", "team", "head")


def model(**sizes):
    return dataclasses.replace(gpt_tiny().model, **dict(heads=6, kv_heads=2, layers=3) | sizes)


def shapes(**sizes):
    """Shapes of a GPT's weights and of Adam's moments."""
    config = model(**sizes)

    def initialise():
        attention_fn = jax.nn.dot_product_attention
        weights = nnx.state(GPT(config, attention_fn=attention_fn, rngs=nnx.Rngs(0)))
        return weights, optax.adam(1.0).init(weights)

    return jax.eval_shape(initialise)


def specs_of(level=0, zero_axes=ALL, sizes=None, **degrees):
    degrees = st.Degrees(**degrees)
    mesh = st.make_mesh(degrees, "auto", jax.devices()[: degrees.num_devices])
    weights = gpt_weights(model(**sizes or {}))
    specs = Partition(mesh, weights, level, zero_axes).specs(shapes(**sizes or {}))
    leaves = jax.tree_util.tree_leaves_with_path(specs)
    return {path_name(path): spec for path, spec in leaves}


def test_without_degrees_every_array_is_whole():
    assert set(specs_of().values()) == {P()}
    assert set(specs_of(level=3).values()) == {P()}
    assert set(specs_of(level=0, team=2).values()) == {P()}


def test_kernels_and_their_moments_are_split_over_tensor():
    count = 0
    for path, spec in specs_of(tensor=2).items():
        dim = next((dim for name, dim in KERNELS.items() if f"/{name}/" in path), None)
        # The first dimension counts layers.
        assert spec == (P() if dim is None else P(*[None] * (dim + 1), "tensor")), path
        count += dim is not None
    assert count == 3 * len(KERNELS)


def test_few_key_heads_stay_whole_over_tensor():
    specs = specs_of(tensor=3)
    split = {path.split("/")[3] for path, spec in specs.items() if spec and path[:8] == "0/blocks"}
    assert split == {"query", "out", "gate", "up", "down"}


def test_biases_and_sinks_are_split_as_the_heads_of_their_kernels():
    options = dict(qkv_bias=True, qk_norm=True, sinks=True)
    specs = specs_of(tensor=2, sizes=options)
    biases = {path: spec for path, spec in specs.items() if path.endswith("_bias")}
    assert set(biases.values()) == {P(None, "tensor")}
    assert len(biases) == 9
    assert {spec for path, spec in specs.items() if "_norm/" in path} == {P()}
    sinks = [spec for path, spec in specs.items() if path.endswith("sinks")]
    assert sinks == [P(None, "tensor")] * 3
    few = specs_of(tensor=3, sizes=options)
    split = {path.split("/")[-1] for path in biases if few[path]}
    assert split == {"query_bias"}


@pytest.mark.parametrize("level", [1, 2, 3])
def test_zero_splits_the_largest_dimension_that_it_divides(level):
    specs = specs_of(level, data=2, team=2, ring=2, tensor=2)
    axes = ("data", "ring", "team")
    assert {path: spec for path, spec in specs.items() if path[0] == "0"} == {
        "0/embedding/embedding": P(axes),  # 256 x 128
        "0/head/kernel": P(axes),  # 128 x 256
        "0/norm/scale": P(axes),
        "0/blocks/attention_norm/scale": P(None, axes),  # layers x 128
        "0/blocks/mlp_norm/scale": P(None, axes),
        "0/blocks/attention/query/kernel": P(None, axes, "tensor"),  # layers x 128 x 6 x 32
        "0/blocks/attention/key/kernel": P(None, axes, "tensor"),
        "0/blocks/attention/value/kernel": P(None, axes, "tensor"),
        "0/blocks/attention/out/kernel": P(None, "tensor", None, axes),  # layers x 6 x 32 x 128
        "0/blocks/mlp/gate/kernel": P(None, axes, "tensor"),
        "0/blocks/mlp/up/kernel": P(None, axes, "tensor"),
        "0/blocks/mlp/down/kernel": P(None, "tensor", axes),
    }
    for path, spec in specs.items():
        if path.startswith("1/0/mu/"):
            assert spec == specs["0/" + path.removeprefix("1/0/mu/")]


def test_zero_over_some_axes_leaves_the_others():
    specs = specs_of(3, ("team", "ring"), data=2, team=2, ring=2)
    assert specs["0/embedding/embedding"] == P(("ring", "team"))
    assert specs_of(3, ("ring",), data=2, team=2)["0/embedding/embedding"] == P()


def test_arrays_without_a_dimension_that_zero_divides_stay_whole_and_are_listed():
    mesh = st.make_mesh(st.Degrees(team=7), "auto", jax.devices()[:7])
    partition = Partition(mesh, gpt_weights(model()), 3)
    state = shapes(mlp_width=35)[0]
    specs = specs_of(3, team=7, sizes={"mlp_width": 35})
    assert specs["0/blocks/mlp/up/kernel"] == P(None, None, "team")
    unsplit = partition.unsplit(state)
    assert unsplit["embedding/embedding"] == 4 * 256 * 128
    assert "blocks/mlp/up/kernel" not in unsplit
    assert Partition(mesh, gpt_weights(model()), 0).unsplit(state) == {}


def test_indivisible_dimension_raises():
    with refused(InputError, tensor=2):
        specs_of(tensor=2, sizes={"mlp_width": 7})


@functools.cache
def bytes_through_a_port(degrees, order, level):
    """Of the busiest of 4 nodes of 4 devices, for gathered weights and summed gradients."""
    order = resolve_order(order)
    mesh = st.make_mesh(degrees, "auto", jax.devices()[:16], order=order, devices_per_node=4)
    partition = Partition(mesh, {}, level)
    weights = {"split": np.arange(96.0, dtype="float32").reshape(32, 3), "whole": np.ones(5, "f4")}
    splits, specs = partition.splits(weights), partition.specs(weights)

    def local(weights):
        # The sum over devices of 1, 2, ..., 16 times a weight.
        factor = 1.0 + lax.axis_index(partition.replicas)
        whole = partition.gather_once(weights, splits)
        whole = jax.tree.map(lambda x: vary(x, *partition.replicas), whole)
        return partition.reduce(jax.tree.map(lambda x: factor * x, whole), splits)

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=specs))
    placed = jax.device_put(weights, partition.shardings(weights))
    program = run.lower(placed).compile()
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, 136 * y), program(placed), weights)
    nodes = node_grid(degrees, order, nodes_of(range(16), 4)).ravel()
    return read_messages(program.as_text()).through(nodes).port_bytes


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize(
    ("degrees", "order"),
    [
        (st.Degrees(ring=4, team=4), "rings_inside"),
        (st.Degrees(ring=4, team=4), "collectives_inside"),
        (st.Degrees(ring=8, team=2), "rings_inside"),
        (st.Degrees(group=2, ring=2, team=2, head=2), "context_first"),
    ],
)
def test_gradients_enter_every_node_once_in_any_order_of_the_axes(degrees, order, level):
    """As where one axis joins all devices; in the order of the mesh, each hop may leave a node."""
    ring = bytes_through_a_port(st.Degrees(ring=16), ROLES, level)
    assert bytes_through_a_port(degrees, order, level) == ring
