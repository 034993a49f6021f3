"""How the degrees that the flags of a run leave open are filled in."""

import json

import pytest

import startrail_jax as st
from benchmarks.compiled import run as benchmark
from configs.gpt import gpt_7b, gpt_tiny, llama3_8b
from programs import make_config, make_program
from refusals import refused
from startrail_jax.devices.degrees import ROLES
from startrail_jax.devices.nodes import nodes_of
from startrail_jax.errors import InputError
from startrail_jax.traffic.settings import all_degrees
from trainer.config import MeshConfig
from trainer.gpt.objective import NextToken
from trainer.mesh import new_degrees
from trainer.parallel.abstract_step import AbstractStep
from trainer.parallel.degrees import choose_order, default_degrees, describe_nodes, keep_degrees
from trainer.planner.hardware import GPUS
from trainer.planner.here import jax_share
from trainer.run.folder import read_mesh, save_degrees
from trainer.run.settings import load_config

pytestmark = pytest.mark.quick


TINY = gpt_tiny().attention_call
GPT = gpt_7b().attention_call
GQA = llama3_8b().attention_call


def degrees_of(num_devices, *, call=TINY, devices_per_node=None, data=1, **mesh):
    degrees = default_degrees(
        MeshConfig(**mesh), num_devices, call, devices_per_node=devices_per_node, data=data
    )
    return {name: degree for name, degree in vars(degrees).items() if degree > 1}


# 4 query heads and 2 key heads.
@pytest.mark.parametrize(
    ("num_devices", "given", "expected"),
    [
        (1, {}, {}),
        (8, {}, {"head": 2, "ring": 4}),
        (7, {}, {"ring": 7}),
        (16, dict(devices_per_node=8), {"head": 2, "ring": 8}),
        (16, dict(devices_per_node=8, fast_ports=True), {"head": 4, "ring": 4}),
        (8, {"data": 4}, {"data": 4, "head": 2}),
        (8, {"tensor": 2}, {"tensor": 2, "ring": 4}),
        (128, {}, {"head": 2, "team": 2, "ring": 32}),
        (8, {"default_c": 2}, {"team": 2, "group": 2, "ring": 2}),
        (8, {"default_c": 2, "tensor": 2}, {"tensor": 2, "team": 2, "group": 2}),
        (2, {"default_c": 2}, {"head": 2}),
        (8, {"default_c": 2, "head": 1}, {"ring": 8}),
        # What is given in part is filled up with a ring.
        (16, {"head": 2}, {"head": 2, "ring": 8}),
        (8, {"group": 1}, {"ring": 8}),
        (8, {"group": 8}, {"group": 8}),
        (8, {"team": 4}, {"team": 4, "ring": 2}),
        (8, {"team": 4, "group": 1, "data": 2}, {"data": 2, "team": 4}),
        (8, {"ring": 8}, {"ring": 8}),
        (8, {"ring": 2}, {"ring": 2, "team": 4}),
        (8, {"ring": 2, "team": 2}, {"ring": 2, "team": 2, "group": 2}),
        (64, {"c": 4}, {"team": 4, "group": 4, "ring": 4}),
        (8, {"c": 1}, {"ring": 8}),
    ],
)
def test_default_degrees_fill_what_is_left_open(num_devices, given, expected):
    assert degrees_of(num_devices, **given) == expected


@pytest.mark.parametrize(
    ("num_devices", "given", "named"),
    [
        (8, {"c": 4}, "Use --mesh.team 4 in place of --mesh.c 4, or --devices 16"),
        (8, {"c": 3}, "Change a degree"),
        (8, {"data": 3}, "data=3"),
        (8, {"ring": 3}, "ring=3"),
        (6, {"team": 4}, "team=4"),
        (8, {"team": 3, "group": 1}, "team=3"),
        (8, {"team": 1, "group": 1, "ring": 1}, "must be the number of devices"),
        (8, {"team": 1, "group": 1, "ring": 1, "data": 16}, "--devices"),
    ],
)
def test_degrees_that_miss_the_devices_raise(num_devices, given, named):
    with refused(InputError, named):
        default_degrees(MeshConfig(**given), num_devices, TINY)


def test_degrees_of_one_in_older_settings_are_open(tmp_path):
    for values, expected in (
        (dict(data=1, head=1, tensor=2, team=1), MeshConfig(tensor=2, team=1)),
        (dict(data=1, fast_ports=False), MeshConfig(data=1)),
    ):
        (tmp_path / "mesh.json").write_text(json.dumps(values))
        assert load_config(MeshConfig, tmp_path / "mesh.json") == expected


def test_former_degrees_of_a_run_are_kept_unless_flags_say_otherwise(tmp_path):
    assert read_mesh(tmp_path) is None
    assert keep_degrees(MeshConfig(), 16, None) is None

    former = st.Degrees(ring=4, team=4)
    save_degrees(tmp_path, vars(former))
    assert keep_degrees(MeshConfig(), 16, read_mesh(tmp_path)) == former
    for num_devices, given in ((8, {}), (16, {"c": 4}), (16, {"ring": 8}), (16, {"data": 2})):
        assert keep_degrees(MeshConfig(**given), num_devices, read_mesh(tmp_path)) is None
    assert keep_degrees(MeshConfig(team=4, data=1), 16, read_mesh(tmp_path)) == former


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"degrees": {"ring": 0}}', '{"degrees": [2]}'])
def test_a_broken_note_of_degrees_is_refused(tmp_path, text):
    (tmp_path / "mesh.json").write_text(text)
    with refused(InputError, "mesh.json"):
        read_mesh(tmp_path)


def test_log_says_which_axes_cross_nodes():
    degrees, nodes = st.Degrees(ring=8, team=2), nodes_of(range(16), 8)
    order = choose_order(MeshConfig(), degrees, nodes, GQA)
    assert describe_nodes(degrees, order, nodes) == (
        "2 of 8 devices; axes from slow to fast: ring, team; across nodes: ring; inside: team"
    )
    order = choose_order(MeshConfig(order=("rings_inside",)), degrees, nodes, GQA)
    assert describe_nodes(degrees, order, nodes).endswith("across nodes: team; inside: ring")
    order = choose_order(MeshConfig(order=ROLES), degrees, nodes, GQA)
    assert order == ROLES


def test_benchmark_takes_the_mesh_of_train_and_refuses_what_train_refuses(capsys):
    def arithmetic(*flags):
        benchmark.main(["llama3_8b", "--arithmetic", *flags])
        title, _, row = capsys.readouterr().out.splitlines()
        return title, row

    title, row = arithmetic("--devices", "16")
    config, limit = llama3_8b(), int(jax_share() * GPUS["h200"].memory_bytes)
    degrees = new_degrees(config, NextToken(config), 16, limit=limit)
    named = ", ".join(f"{role} {n}" for role, n in vars(degrees).items() if n > 1)
    assert f" 16 x h200: {named}; remat " in title
    *_, peak, formula = row.split()
    assert peak == formula
    with pytest.raises(SystemExit):
        arithmetic("--mesh.data", "2")
    assert (
        "batch_size must be divisible by mesh.data * gradient_accumulation"
        in capsys.readouterr().err
    )
    with pytest.raises(InputError, match=r"heads must be divisible by head \* tensor"):
        arithmetic("--mesh.tensor", "64", "--mesh.c", "1")


@pytest.mark.slow
def test_estimate_refuses_what_the_program_refuses():
    """With the same message, for every setting of all six degrees."""
    model = dict(vocab_size=32, width=8, layers=1, heads=6, kv_heads=2, head_dim=4, mlp_width=6)
    config = make_config(model, seq_len=24, batch_size=2, zero=1, zero_axes=("team", "ring"))
    objective, outcomes = NextToken(config), {}
    for degrees in all_degrees(4, roles=ROLES):
        attempts = (
            lambda degrees=degrees: make_program(config, degrees),
            lambda degrees=degrees: AbstractStep.of_degrees(config, objective, degrees).memory(),
        )
        messages = []
        for attempt in attempts:
            try:
                attempt()
                messages.append(None)
            except ValueError as error:
                messages.append(str(error))
        assert messages[0] == messages[1]
        outcomes[degrees] = messages[0]
    reasons = {str(message).split(";")[0].split(" (")[0] for message in outcomes.values()}
    assert None in outcomes.values()
    assert len(reasons) >= 4
