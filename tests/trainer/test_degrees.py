"""How the degrees that the flags of a run leave open are filled in."""

import pytest

from benchmarks import memory as memory_benchmark
from configs.gpt import gpt_8b_gqa
from programs import make_config, make_program
from startrail_jax.analysis.settings import all_degrees
from startrail_jax.mesh import ROLES
from trainer.config import MeshConfig
from trainer.gpt.objective import NextToken
from trainer.parallel.degrees import (
    choose_degrees,
    describe_degrees,
)
from trainer.parallel.step_sizes import footprint

pytestmark = pytest.mark.quick


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


def test_memory_benchmark_takes_the_mesh_of_train_and_refuses_what_train_refuses(capsys):
    def title_and_row(*flags):
        arguments = ["--arithmetic", "--recipes", "gpt_8b_gqa", "--rows", "recipe", *flags]
        memory_benchmark.main(arguments)
        _, _, title, _, row, *_ = capsys.readouterr().out.splitlines()
        return title, row

    title, row = title_and_row("--devices", "16")
    named = ", ".join(
        f"{role} {n}" for role, n in degrees_of(16, **vars(gpt_8b_gqa().mesh)).items()
    )
    assert title.endswith(f"16 x h200: {named}")
    assert row.endswith("yes")
    for flags, message in (
        ("--mesh.data 2", "batch_size must be divisible by data * accumulation"),
        ("--mesh.tensor 64 --mesh.team 1", "heads must be divisible by head * tensor"),
        ("--mesh.head 2 --seq-len 1000000", "seq_len must be divisible by 2 * sequence"),
        ("--mesh.team 8 --mesh.group 1 --seq-len 196608", "tile must divide"),
    ):
        _, row = title_and_row(*flags.split())
        assert f"train.py refuses it: {message}" in row


def test_estimate_refuses_what_the_program_refuses():
    """With the same message, for every setting of all six degrees."""
    model = dict(vocab_size=32, width=8, layers=1, heads=6, kv_heads=2, head_dim=4, mlp_width=6)
    config = make_config(
        model, seq_len=24, batch_size=2, tile=3, zero=1, zero_axes=("team", "ring")
    )
    outcomes = {}
    for degrees in all_degrees(4, roles=ROLES):
        attempts = (
            lambda degrees=degrees: make_program(config, degrees),
            lambda degrees=degrees: footprint(config, NextToken(config), degrees),
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
