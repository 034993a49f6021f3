"""The training program: flags, degrees, sharding, sampling, and the same losses on every mesh."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tyro
from flax import nnx
from jax.sharding import PartitionSpec

import startrail_jax as st
import train
from configs.gpt import gpt_tiny
from models.gpt import GPT
from startrail_jax.training.config import MeshConfig, TrainConfig
from startrail_jax.training.devices import select_devices
from startrail_jax.training.sampling import choose_token, continue_tokens
from startrail_jax.training.sharding import choose_degrees, describe_degrees, state_shardings

REPOSITORY = Path(train.__file__).parent
TINY = (
    "--model.width 24 --model.layers 2 --model.heads 4 --model.kv-heads 2 --model.head-dim 8 "
    "--model.mlp-width 32 --seq-len 64 --batch-size 2 --validation-windows 2 "
)


def parse(flags):
    return tyro.cli(TrainConfig, default=gpt_tiny(), args=flags.split())


def degrees_of(num_devices, **mesh):
    degrees = choose_degrees(MeshConfig(**mesh), num_devices)
    return {name: degree for name, degree in vars(degrees).items() if degree > 1}


@pytest.mark.parametrize(
    ("num_devices", "given", "expected"),
    [
        (8, {}, {"team": 2, "group": 2, "ring": 2}),
        (1, {}, {}),
        (2, {}, {"team": 2}),
        (4, {}, {"team": 2, "group": 2}),
        (6, {}, {"team": 2, "ring": 3}),
        (7, {}, {"ring": 7}),
        (8, {"data": 4}, {"data": 4, "team": 2}),
        (8, {"head": 2}, {"head": 2, "team": 2, "group": 2}),
        (8, {"tensor": 2}, {"tensor": 2, "team": 2, "group": 2}),
        (8, {"group": 1}, {"team": 2, "ring": 4}),
        (8, {"group": 8}, {"group": 8}),
        (8, {"team": 1}, {"ring": 8}),
        (8, {"ring": 8}, {"ring": 8}),
        (8, {"ring": 4}, {"ring": 4, "team": 2}),
        (8, {"team": 4, "group": 1}, {"team": 4, "ring": 2}),
        (64, {"team": 4}, {"team": 4, "group": 4, "ring": 4}),
    ],
)
def test_choose_degrees_fills_what_is_left_open(num_devices, given, expected):
    assert degrees_of(num_devices, **given) == expected


@pytest.mark.parametrize(
    ("num_devices", "given", "message"),
    [
        (8, {"team": 4}, r"must divide.*team=4 \* group=4.* = 16 for 8 devices.*--mesh.group 1"),
        (8, {"data": 3}, r"must divide.*data=3.* = 3 for 8 devices.*--devices 3"),
        (8, {"ring": 3}, r"must be the number.*ring=3.* for 8 devices.*Leave out --mesh.ring"),
        (6, {"team": 2}, r"must divide.*= 4 for 6 devices.*--mesh.group 1 with --mesh.team 2"),
        (8, {"team": 3, "group": 1}, r"must divide.*team=3.* = 3 for 8.*Change a degree"),
        (8, {"team": 1, "group": 1, "ring": 1, "data": 16}, r"= 16 for 8 devices.*--devices 16"),
    ],
)
def test_choose_degrees_that_miss_the_devices_raise(num_devices, given, message):
    with pytest.raises(ValueError, match=message):
        choose_degrees(MeshConfig(**given), num_devices)


def test_describe_degrees_says_when_the_default_does_not_fit():
    def describe(num_devices, **given):
        mesh = MeshConfig(**given)
        return describe_degrees(mesh, choose_degrees(mesh, num_devices))

    assert describe(8) == "data 1, group 2, ring 2, team 2, head 1, tensor 1"
    assert describe(6).endswith("(team = group = 2 does not fit the devices and the degrees given)")
    assert "not fit" not in describe(6, team=1)


def test_flags_set_the_config():
    config = parse("--mesh.team 4 --mesh.group 1 --steps 7 --model.kv-heads 4")
    assert config.mesh == MeshConfig(team=4, group=1)
    assert (config.steps, config.model.kv_heads) == (7, 4)
    assert parse("") == gpt_tiny()
    assert gpt_tiny().seq_len >= 1024


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (None, {"steps": 0}, r"steps must be at least 1; got steps=0"),
        (None, {"seed": -1}, r"seed must be at least 0; got seed=-1"),
        (None, {"devices": 0}, r"devices must be at least 1; got devices=0"),
        (None, {"sample_length": 1024}, r"sample_length must be below seq_len.*=1024. Use 512"),
        (None, {"mesh": MeshConfig(data=3)}, r"batch_size must be divisible.*data=3. Use .*=3"),
        ("mesh", {"team": 0}, r"mesh.team must be at least 1; got mesh.team=0"),
        ("model", {"vocab_size": 255}, r"vocab_size must be at least 256"),
        ("model", {"kv_heads": 3}, r"kv_heads must divide model.heads.*kv_heads=3, heads=4"),
        ("model", {"head_dim": 5}, r"head_dim must be even.*head_dim=5. Use 6"),
        ("optimizer", {"learning_rate": 0.0}, r"learning_rate must be above 0; got .*=0.0"),
        ("optimizer", {"warmup_fraction": 1.0}, r"warmup_fraction must be .* below 1; got .*=1.0"),
    ],
)
def test_config_that_cannot_be_raises(part, change, message):
    config = gpt_tiny()
    with pytest.raises(ValueError, match=message):
        replace(config if part is None else getattr(config, part), **change)


def test_select_devices_takes_the_first():
    assert select_devices(3) == jax.devices()[:3]
    assert select_devices(None) == jax.devices()


def test_select_devices_beyond_what_there_is_raises():
    with pytest.raises(ValueError, match=r"devices=65, and there are 64 \(cpu\).*--devices 64"):
        select_devices(65)


def specs_of(tensor, **sizes):
    """PartitionSpecs of a GPT's parameters and Adam's moments, by path."""
    sizes = vars(gpt_tiny().model) | {"heads": 6, "kv_heads": 2, "layers": 1} | sizes

    def initialise():
        attention_fn = jax.nn.dot_product_attention
        parameters = nnx.state(GPT(**sizes, attention_fn=attention_fn, rngs=nnx.Rngs(0)))
        return parameters, optax.adam(1.0).init(parameters)

    mesh = st.make_mesh(st.Degrees(tensor=tensor), "auto", jax.devices()[:tensor])
    shardings = state_shardings(jax.eval_shape(initialise), mesh)
    leaves = jax.tree_util.tree_leaves_with_path(shardings)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x.spec for path, x in leaves}


def test_state_shardings_split_kernels_and_their_moments_over_tensor():
    specs = specs_of(tensor=2)
    split_dims = {"query": 1, "key": 1, "value": 1, "out": 0, "gate": 1, "up": 1, "down": 0}
    count = 0
    for path, spec in specs.items():
        dim = next((dim for name, dim in split_dims.items() if f"/{name}/" in path), None)
        expected = PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, "tensor")
        assert spec == expected, path
        count += dim is not None
    assert count == 3 * len(split_dims)
    assert set(specs_of(tensor=1).values()) == {PartitionSpec()}


def test_state_shardings_keep_few_key_heads_whole():
    split = {
        path.split("/")[4] for path, spec in specs_of(tensor=3).items() if spec and "0/b" in path
    }
    assert split == {"query", "out", "gate", "up", "down"}


def test_state_shardings_indivisible_raise():
    with pytest.raises(
        ValueError, match=r"must divide.*tensor=2 for dimension 0 of .*/down, of size 7"
    ):
        specs_of(tensor=2, mlp_width=7)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_continue_tokens_counts_on_in_every_layout(kind):
    layout = st.Layout(kind, 3)
    tokens = np.tile(np.where(np.arange(12) < 5, np.arange(12), 0), (2, 1))
    tokens[1, :5] += 20
    positions = np.tile(layout.positions(12), (2, 1))
    result = continue_tokens(
        lambda tokens, positions: 100.0 * jax.nn.one_hot(tokens + 1, 64),
        jnp.asarray(layout.permute(tokens), jnp.int32),
        jnp.asarray(positions),
        start=5,
        temperature=1.0,
        key=jax.random.key(0),
    )
    expected = np.arange(12) + np.array([[0], [20]])
    np.testing.assert_array_equal(layout.unpermute(jax.device_get(result)), expected)


def test_choose_token_at_temperature_0_is_the_likeliest():
    logits = jnp.array([[0.0, 2.0, 1.0], [1.0, 0.0, 0.5]])
    key = jax.random.key(0)
    np.testing.assert_array_equal(choose_token(logits, 0.0, key), [1, 0])
    np.testing.assert_array_equal(choose_token(logits, 1e-3, key), [1, 0])
    hot = choose_token(jnp.tile(logits[:1], (100, 1)), 100.0, key)
    assert set(hot.tolist()) == {0, 1, 2}


@pytest.fixture(scope="module")
def one_device_losses():
    return train_losses("--devices 1")


def train_losses(flags):
    return train.train(parse(f"{TINY} --steps 20 --sample-length 0 {flags}"))


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--mesh.team 1", id="ring"),
        pytest.param("", id="startrail"),
        pytest.param("--mesh.head 2", id="head"),
        pytest.param("--mesh.group 1", id="group_1"),
        pytest.param("--mesh.tensor 2", id="tensor"),
    ],
)
def test_train_losses_do_not_depend_on_the_mesh(flags, one_device_losses):
    losses = train_losses(f"--devices 8 {flags}")
    assert len(losses.train) == 20
    assert losses.train[-1] < losses.train[0] - 0.5
    np.testing.assert_allclose(losses.train, one_device_losses.train, rtol=0, atol=1e-4)
    np.testing.assert_allclose(losses.validation, one_device_losses.validation, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mesh.head 8", r"heads must be divisible by head \* tensor.*heads=4.*head=8"),
        ("--seq-len 1000", r"seq_len must be divisible by 2 \* sequence degree.*Pad to 1008"),
        ("--mesh.ring 3", r"product of the mesh degrees must be.* for 8 devices"),
    ],
)
def test_train_refuses_what_does_not_fit_the_mesh(flags, message):
    with pytest.raises(ValueError, match=message):
        train.train(parse(f"--devices 8 {flags}"))


def run_program(flags):
    return subprocess.run(
        [sys.executable, "train.py", *flags.split()],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_program_trains_evaluates_and_samples():
    flags = (
        "--steps 3 --log-every 1 --evaluate-every 2 --sample-length 32 --devices 4 --mesh.data 2"
    )
    result = run_program(TINY + flags)
    assert result.returncode == 0, result.stderr
    assert "mesh: data 2, group 1, ring 1, team 2" in result.stdout
    assert "step 3/3  train loss" in result.stdout
    assert "step 2: validation loss" in result.stdout
    lines = result.stdout.splitlines()
    last = [line for line in lines if line.startswith("validation loss")]
    assert len(last) == 1
    words = last[0].split()
    assert words[:2] + words[3:] == ["validation", "loss", "nats/byte"]
    assert 4.0 < float(words[2]) < 6.0
    assert "--- held-out text" in lines[lines.index(last[0]) + 1 :]
    assert "--- continued by the model" in lines[lines.index(last[0]) + 1 :]


def test_program_help_lists_the_flags():
    result = run_program("--help")
    assert result.returncode == 0
    for name in ("data", "team", "ring", "group", "head", "tensor"):
        assert f"--mesh.{name}" in result.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [("--mesh.teams 2", "--mesh.team "), ("--steps 0", "steps must be at least 1; got steps=0")],
)
def test_program_refuses_wrong_flags(flags, message):
    result = run_program(flags)
    assert result.returncode == 2
    assert message in result.stderr
