"""Weights by the names of their dimensions: they are those of the models, and all else follows."""

import ast
import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import startrail_jax as st
from configs import RECIPES
from models.config import ExpertsConfig, LinearConfig
from models.hooks import Hooks
from models.weights import OVER_TENSOR, Weight, find, projection, stacked, weight
from programs import make_config, make_program
from refusals import refused
from startrail_jax.errors import InputError
from trainer.config import LoraConfig
from trainer.parallel.abstract_step import AbstractStep
from trainer.parallel.partition import Partition, path_name, split_adapters
from trainer.tasks import TASKS

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
EVERYTHING = dict(
    **dict(heads=8, kv_heads=2, layers=4, qkv_bias=True, out_bias=True, qk_norm=True, sinks=True),
    **dict(attention_gate=True, norms="both", mlp="gelu"),
    mixers=("linear", "ssd", "attention", "ssd"),
    **dict(feed_forwards=("experts", "experts", "mlp"), qk_norm_over="heads", tied_head=True),
    experts=ExpertsConfig(biases=True, shared_width=24, shared_gate=True, balance_rate=0.1),
    linear=LinearConfig(heads=4, key_heads=2, value_dim=12, norms="after"),
)


def configs():
    small = RECIPES["gpt_tiny"]()
    model = dataclasses.replace(small.model, **EVERYTHING)
    lora = LoraConfig(rank=2, targets=("query", "beta", "up", "expert_down"))
    balanced = dataclasses.replace(model, experts=ExpertsConfig(biases=True, shared_width=24))
    return {
        **{name: make() for name, make in RECIPES.items()},
        "everything": dataclasses.replace(small, model=model),
        "with adapters": dataclasses.replace(small, model=balanced, lora=lora),
    }


@pytest.mark.parametrize("name", configs())
def test_declared_weights_are_those_of_the_model(name):
    config = configs()[name]
    objective = TASKS[config.kind].make_objective(config)
    hooks = Hooks(linear_attention=lambda rule: None)
    model = nnx.eval_shape(
        lambda: objective.make_model(jax.nn.dot_product_attention, hooks, nnx.Rngs(0))
    )
    adapters, arrays = split_adapters(nnx.state(model))
    shapes = {path_name(x): y.shape for x, y in jax.tree_util.tree_leaves_with_path(arrays)}
    declared, sizes = objective.weights, objective.sizes
    assert shapes.keys() == declared.keys()
    for path, shape in shapes.items():
        assert declared[path].shape(sizes.sizes_at(path)) == shape, path
    rank = {"rank": config.lora.rank} if name == "with adapters" else {}
    for path, x in jax.tree_util.tree_leaves_with_path(adapters):
        own, at = find(declared, path_name(path)), sizes.sizes_at(path_name(path))
        assert own.shape({**at, **rank}) == x.shape, path_name(path)
    assert bool(jax.tree.leaves(adapters)) == bool(rank)
    elements = sum(x.size for x in jax.tree.leaves((adapters, arrays)))
    assert objective.sizes.elements == elements


def test_weights_are_found_by_the_paths_of_moments_and_adapters():
    kernel = projection("width | heads head_dim")
    declared = stacked("blocks/attention", {"query/kernel": kernel})
    (path,) = declared
    assert find(declared, path) == find(declared, f"1/0/mu/{path}") == declared[path]
    assert declared[path].dims == ("layers", "width", "heads", "head_dim")
    a, b = (find(declared, f"0/nu/blocks/attention/query/{x}") for x in ("lora_a", "lora_b"))
    assert (a.dims, b.dims) == (
        ("layers", "width", "rank"),
        ("layers", "rank", "heads", "head_dim"),
    )
    # A device uses all of A, and its own heads of B.
    assert (a.shared, a.tensor_dim, b.shared, b.tensor_dim) == (True, None, False, 2)
    assert find(declared, "1/0/count") is None
    assert find(declared, "attention/query/kernel") is None


def test_text_is_read_as_names():
    assert weight("experts: expert_mlp | width") == Weight(
        ("experts",), ("expert_mlp",), ("width",)
    )
    assert weight("heads head_dim").dims == ("heads", "head_dim")
    copied = {"kv_heads": 2, "global_kv_heads": 2, "key_heads": 1}
    assert {x: len(y) for x, y in OVER_TENSOR.items() if y} == copied


def test_weights_that_are_not_declared_are_refused(monkeypatch):
    config = make_config()
    objective = type(make_program(config, st.Degrees()).objective)
    declared = objective(config).weights
    mesh = st.make_mesh(st.Degrees(), "auto", jax.devices()[:1])
    for changed, told in (
        ({"norm/scale": declared["norm/scale"]}, "got nothing for blocks/"),
        (declared | {"norm/scale": weight("width width")}, "got dimensions width width for norm"),
    ):
        partition = Partition(mesh, changed)
        arrays = jax.eval_shape(
            lambda: nnx.state(objective(config).make_model(lambda q, *_: q, Hooks(), nnx.Rngs(0)))
        )
        with refused(InputError, told):
            partition.check_declared(arrays)
    changed = declared | {"norm/scale": weight("heads", decays=False)}
    sizes = dataclasses.replace(objective(config).sizes, weights=changed)
    monkeypatch.setattr(objective, "sizes", sizes)
    with refused(InputError, "for norm/scale, of shape"):
        AbstractStep.of_degrees(config, objective(config), st.Degrees()).memory()


# Options of layers, without those that are called as a weight.
OPTIONS = (
    *("attention_gate", "qkv_bias", "qk_norm", "qk_norm_over", "norm_offset", "scaled_embedding"),
    *("scale_dim", "largest_beta", "balance_loss", "balance_over", "balance_rate", "z_loss"),
)


def test_an_option_of_a_layer_is_declared_in_one_place():
    """As a field of a class, or as the argument of a function."""
    places = {name: [] for name in OPTIONS}
    for path in (
        x for y in ("models", "trainer", "startrail_jax") for x in (ROOT / y).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_field = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            name = node.target.id if is_field else getattr(node, "arg", None)
            if (is_field or isinstance(node, ast.arg)) and name in places:
                places[name].append(str(path.relative_to(ROOT)))
    assert {name: len(found) for name, found in places.items()} == dict.fromkeys(OPTIONS, 1), places


def test_initial_values_follow_from_the_declaration():
    """Scales begin as 1, biases as 0, and outputs of projections have the variance of inputs."""
    config = make_config(dict(width=64, heads=8, head_dim=32, qkv_bias=True))
    objective = make_program(config, st.Degrees()).objective
    model = objective.make_model(jax.nn.dot_product_attention, Hooks(), nnx.Rngs(0))
    state = nnx.state(model)
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        declared = objective.weights[path_name(path)]
        if declared.init in ("zeros", "ones"):
            assert jnp.all(x == (declared.init == "ones")), path_name(path)
        elif declared.init == "normal":
            inputs = math.prod(objective.sizes.sizes[name] for name in declared.inputs)
            assert abs(float(jnp.var(x)) * inputs - 1) < 0.2, path_name(path)
