"""The mesh of a run: what is chosen, kept and said."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

import startrail_jax as st
from configs import RECIPES
from programs import check_first_step, make_config
from refusals import refused
from startrail_jax.errors import InputError
from trainer.config import Distributed, MeshConfig, OptimizerConfig
from trainer.mesh import advice, choose_mesh, mesh_of_flags, new_degrees
from trainer.parallel.abstract_step import AbstractStep
from trainer.run.commands import command
from trainer.run.folder import FormerMesh
from trainer.session import agree, joined
from trainer.tasks import TASKS

ROOMY = 60 << 30
"""Bytes that hold any step of a test."""


def objective_of(config):
    return TASKS[config.kind].make_objective(config)


def chosen(num_devices=8, limit=ROOMY, devices_per_node=None, **changes):
    """The degrees above 1 of a run with a batch of 4, 8 heads and 4 key heads."""
    config = make_config(**changes)
    options = dict(limit=limit, devices_per_node=devices_per_node)
    degrees = new_degrees(config, objective_of(config), num_devices, **options)
    assert degrees.num_devices == num_devices
    return {role: degree for role, degree in vars(degrees).items() if degree > 1}


def test_rows_of_their_own_come_first_where_the_memory_is_known():
    assert chosen() == {"data": 4, "head": 2}
    assert chosen(gradient_accumulation=2) == {"data": 2, "head": 4}
    assert chosen(limit=None) == {"head": 4, "ring": 2}
    assert chosen(limit=1) == {"head": 4, "ring": 2}
    assert chosen(mesh=MeshConfig(data=2)) == {"data": 2, "head": 4}
    assert chosen(mesh=MeshConfig(data=1)) == {"head": 4, "ring": 2}
    assert chosen(mesh=MeshConfig(default_c=2)) == {"team": 2, "group": 2, "ring": 2}
    assert chosen(mesh=MeshConfig(ring=4)) == {"ring": 4, "team": 2}
    muon = OptimizerConfig(kind="muon", learning_rate=1e-2)
    assert chosen(optimizer=muon) == {"head": 4, "ring": 2}
    assert chosen(num_devices=16, devices_per_node=4, mesh=MeshConfig(data=1)) == {
        **{"head": 4, "ring": 4}
    }


@pytest.mark.parametrize("fast_ports", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_default_mesh_of_every_recipe_is_one_that_it_can_have(recipe, fast_ports):
    config = RECIPES[recipe]()
    mesh = dataclasses.replace(config.mesh, fast_ports=fast_ports)
    config = dataclasses.replace(config, mesh=mesh)
    for num_devices in (1, 2, 4, 8, 16, 64, 256):
        degrees = new_degrees(config, objective_of(config), num_devices, devices_per_node=8)
        assert degrees.num_devices == num_devices
        check_first_step(config, degrees)


def test_fewer_shards_of_the_batch_are_taken_if_more_do_not_fit(monkeypatch):
    """A batch of 4 over 4 devices has fewer gathered keys on each than over 2 of two devices."""
    sizes = {4: 3, 2: 1}

    def step(config, objective, degrees, limit):
        return SimpleNamespace(fits=lambda limit: sizes[degrees.data] < limit)

    monkeypatch.setattr(AbstractStep, "of_degrees", step)
    assert chosen(limit=2) == {"data": 2, "head": 4}


def test_eight_nodes_have_the_mesh_of_the_rule_and_the_log_says_so(tmp_path):
    """Eight of eight emulated devices: 17.5 + 31.5 shares of keys, where `head` 1 sends 28 + 70."""
    model = dict(heads=32, kv_heads=8)
    config = make_config(model, devices=64, mesh=MeshConfig(devices_per_node=8), run_dir=tmp_path)
    devices = [
        SimpleNamespace(id=i, process_index=i // 8, platform="cpu", device_kind="cpu")
        for i in range(64)
    ]
    degrees = new_degrees(config, objective_of(config), 64, devices_per_node=8)
    assert degrees == st.Degrees.recommended(64, heads=32, kv_heads=8, devices_per_node=8)
    assert degrees == st.Degrees(head=8, ring=8)
    (line,) = advice(config, degrees, devices, 8)
    assert line == (
        "default mesh: by the rule of docs/planner.md; all meshes by time: "
        f"{command('plan.py', tmp_path / 'config.json')} --nodes 8 --gpus-per-node 8 "
        "--gpu YOUR_GPU --port YOUR_PORT"
    )


def join(config, folder, former=None):
    with joined(Distributed(), config.devices, folder) as session:
        former = former or agree(config, kind="a test", folder=folder)
        mesh, lines = choose_mesh(config, session.devices, former, TASKS[config.kind])
        return {role: n for role, n in mesh.shape.items() if n > 1}, lines


def test_a_run_keeps_its_mesh_where_that_fits_the_flags(tmp_path):
    former = FormerMesh(vars(st.Degrees(team=2, ring=2)))
    for mesh, kept in ((MeshConfig(), True), (MeshConfig(team=2), True), (MeshConfig(c=2), False)):
        config = make_config(devices=4, mesh=mesh, run_dir=tmp_path)
        shape, lines = join(config, tmp_path, former)
        assert (shape == {"team": 2, "ring": 2}) is kept
        assert not any("default mesh" in line for line in lines)


def test_the_log_of_a_recipe_with_startrail_says_so(tmp_path):
    config = make_config(devices=4, mesh=MeshConfig(default_c=2), run_dir=tmp_path)
    shape, lines = join(config, tmp_path)
    assert shape == {"team": 2, "group": 2}
    assert lines[-1].startswith(
        "default mesh: StarTrail, by --mesh.default-c 2; all meshes by time: "
    )
    assert lines[-1].endswith(" --nodes 1 --gpus-per-node 4 --gpu YOUR_GPU")


def test_samples_adapt_to_the_devices_only_if_no_flag_says_otherwise():
    devices, call = jax.devices()[:2], make_config().attention_call
    flags = MeshConfig(ring=4)
    mesh, lines = mesh_of_flags(flags, devices, None, call, adapts=True)
    assert mesh.size == 2
    assert lines[0] == "the mesh of the run does not fit 2 devices: another is used"
    with refused(InputError, "ring=4"):
        mesh_of_flags(flags, devices, None, call)


@pytest.mark.parametrize("lost", [False, True])
def test_a_run_that_lost_its_mesh_says_so(lost, tmp_path):
    config = make_config(devices=4, run_dir=tmp_path)
    if lost:
        (tmp_path / "config.json").touch()
    _, lines = join(config, tmp_path)
    warning = f"WARNING: {tmp_path} holds a run without mesh.json: it was lost."
    assert lines[0].startswith(warning) is lost


def test_order_and_nodes_of_the_flags_place_the_devices(tmp_path):
    flags = dict(team=2, group=1, devices_per_node=2)
    for order, ids, across in (
        (("rings_inside",), [0, 2, 1, 3], "team; inside: ring"),
        (("data", "group", "ring", "team", "head", "tensor"), [0, 1, 2, 3], "ring; inside: team"),
        (None, [0, 1, 2, 3], "ring; inside: team"),
    ):
        call, devices = make_config().attention_call, jax.devices()[:4]
        mesh, lines = mesh_of_flags(MeshConfig(order=order, **flags), devices, None, call)
        assert [device.id for device in mesh.devices.flat] == ids
        assert lines[-1].startswith("nodes: 2 of 2 devices; axes from slow to fast: ")
        assert lines[-1].endswith(f"across nodes: {across}")
    with refused(InputError, devices_per_node=3):
        mesh_of_flags(MeshConfig(devices_per_node=3), devices, None, call)
