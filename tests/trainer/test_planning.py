"""`train.py --plan`: the mesh that the planner finds for the devices at hand."""

import dataclasses
import math
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

import startrail_jax as st
from configs.gpt import gpt_tiny
from programs import make_config, make_program
from refusals import refused
from startrail_jax.errors import InputError
from train import read_command_line, train
from trainer import planning
from trainer.config import AttentionConfig, Distributed, LoraConfig, MeshConfig, OptimizerConfig
from trainer.gpt.config import DataConfig, TextSampleConfig
from trainer.mesh import choose_mesh
from trainer.parallel.abstract_step import SURE, AbstractStep, step_limit
from trainer.planner.hardware import GPUS, Cluster
from trainer.planner.search import REMAT
from trainer.planning import Planner
from trainer.run.folder import MESH_FILE, read_mesh, save_degrees
from trainer.session import agree, joined
from trainer.tasks import TASKS

ONE_NODE = Cluster(nodes=1, gpus_per_node=8, gpu=GPUS["h100"], port_rate=1e9, ports=8)
TWO_NODES = dataclasses.replace(ONE_NODE, nodes=2, gpus_per_node=4, ports=1)


def planner(**changes):
    config = make_config(**{"plan": "use", **changes})
    return Planner(config, TASKS[config.kind])


def found(cluster=ONE_NODE, count=4, **changes):
    return planner(**changes).forecasts(cluster, count)


def degrees_above_one(forecast):
    return {name: size for name, size in vars(forecast.degrees).items() if size > 1}


def test_meshes_of_a_plan_are_legal_and_the_fastest_first():
    """The batch of 4 and the 8 heads may be split; 3 layers of 80 MLP channels over 8 too."""
    meshes = found()
    assert len(meshes) == 4
    assert all(x.degrees.num_devices == 8 for x in meshes)
    seconds = [x.seconds for x in meshes]
    assert seconds == sorted(seconds)
    assert len({x.degrees for x in meshes}) == 4
    # Sequences that lie on devices of their own send no attention at all.
    assert degrees_above_one(meshes[0])["data"] == 4
    assert meshes[0].label.startswith("data 4")


@pytest.mark.slow
def test_a_plan_keeps_what_flags_give():
    for given in (dict(ring=8), dict(head=2, team=2), dict(data=2, group=1)):
        for mesh in found(mesh=MeshConfig(**given), count=2):
            assert given.items() <= vars(mesh.degrees).items()
    for mesh in found(zero=3, remat="full", gradient_accumulation=2, count=2):
        assert mesh.savings.zero == 3
        assert mesh.degrees.data <= 2
    order = ("data", "team", "ring", "head", "group", "tensor")
    where = dict(order=order, team=2, ring=4)
    (mesh,) = found(TWO_NODES, mesh=MeshConfig(**where, group=1))
    assert [x for x in mesh.order if where.get(x, 1) != 1] == ["team", "ring"]
    (double,) = found(TWO_NODES, mesh=MeshConfig(ring=8), attention=AttentionConfig(inner=4))
    assert double.inner == 4


def test_a_plan_for_the_rings_counts_what_they_send():
    asked = dict(model=dict(windows=(64,)), seq_len=2**16, mesh=MeshConfig(ring=8))
    (auto,), (rings,) = (
        found(TWO_NODES, 1, attention=AttentionConfig(exchange=x), **asked)
        for x in ("auto", "rings")
    )
    assert 2 * auto.across_bytes < rings.across_bytes


def test_remat_is_the_first_that_fits():
    """In the order of what they recompute, and of the memory that they need."""
    config = make_config(seq_len=2**14, zero=3)
    objective, degrees = TASKS[config.kind].make_objective(config), st.Degrees(ring=8)

    def size(remat):
        run = dataclasses.replace(config, remat=remat)
        return AbstractStep.of_degrees(run, objective, degrees).memory().device_bytes

    def chosen(limit, **changes):
        run = dataclasses.replace(config, **changes)
        return AbstractStep.of_degrees(run, objective, degrees, limit).remat

    sizes = [size(remat) for remat in REMAT]
    assert sizes == sorted(sizes, reverse=True)
    limits = {remat: math.ceil(size(remat) / SURE) for remat in REMAT}
    for remat, limit in limits.items():
        assert chosen(limit) == remat
        assert chosen(0, remat=remat) == remat
    assert chosen(0) == "full"
    assert chosen(0, attention=AttentionConfig(keep_gathered=True)) == "attention_saved"
    # A plan takes what fits, too, and says the memory of that.
    for remat in ("products_saved", "attention_saved"):
        (mesh,) = planner(seq_len=2**14, zero=3, mesh=MeshConfig(ring=8)).forecasts(
            ONE_NODE, 1, limits[remat]
        )
        assert (mesh.savings.remat, mesh.memory_bytes) == (remat, size(remat))
    assert make_program(config, degrees).remat == "products_saved"


def documents(lengths, path, **changes):
    """A plan of a run on documents of so many tokens, each 7 at its end."""
    np.save(path, np.concatenate([[*[5] * n, 7] for n in lengths]).astype(np.uint16))
    data = DataConfig(path=(path,), batches="documents", end_of_document=7)
    return planner(data=data, **{"batch_size": 8, **changes})


def test_a_plan_for_documents_knows_their_lengths(tmp_path):
    """Where ports are slow, short ones are the faster for being whole; long ones are as fast."""
    slow = dataclasses.replace(TWO_NODES, port_rate=1e5)
    found = {}
    for name, lengths in {"short": [9, 2, 14, 6] * 90, "long": [127] * 40}.items():
        asked = documents(lengths, tmp_path / f"{name}.npy", mesh=MeshConfig(ring=8))
        read = asked._sizes()
        assert read.lengths.max() == max(lengths)
        (found[name],) = asked.document_forecasts(slow, read, 4)
    short, long = (x.tokens_per_second / x.rows_tokens_per_second for x in found.values())
    assert short > 2
    assert long == pytest.approx(1, abs=0.05)
    assert found["short"].held.alone > 0.9 * found["short"].held.tokens


def test_meshes_for_documents_are_those_that_can_run_them(tmp_path):
    asked = documents([9, 127, 30] * 50, tmp_path / "tokens.npy")
    whole = asked.document_forecasts(TWO_NODES, asked._sizes(), 8)
    speeds = [x.tokens_per_second for x in whole]
    assert len(whole) > 2
    assert speeds == sorted(speeds, reverse=True)
    assert len({x.mesh.degrees.data * x.mesh.degrees.tensor for x in whole}) == len(whole)
    few_keys = dataclasses.replace(asked.config, mesh=MeshConfig(tensor=8))
    with refused(InputError, "--plan use needs a mesh"):
        Planner(few_keys, asked.task).document_forecasts(TWO_NODES, asked._sizes(), 1)


SMALL_GPU = dataclasses.replace(GPUS["h100"], memory_bytes=1 << 16)


@pytest.mark.parametrize(
    ("cluster", "changes", "words"),
    [
        (ONE_NODE, dict(mesh=MeshConfig(head=3)), ["--plan"]),
        (ONE_NODE, dict(attention=AttentionConfig(inner=3)), ["--attention.inner"]),
        (
            *(dataclasses.replace(ONE_NODE, gpu=SMALL_GPU), {}),
            ["got none for 8 devices of 0", "the smallest step takes 0.00", "of 4.58e-05 GiB"],
        ),
    ],
)
def test_a_plan_without_a_legal_mesh_that_fits_is_refused(cluster, changes, words):
    with refused(InputError, *words):
        found(cluster, **changes)


def test_a_plan_for_muon_is_refused_and_one_for_any_length_is_not():
    muon = planner(optimizer=OptimizerConfig(kind="muon", learning_rate=1e-2))
    with refused(InputError, "optimizer.kind='adamw'"):
        muon.choose(jax.devices())
    (mesh,) = found(seq_len=127, mesh=MeshConfig(ring=8), count=1)
    assert mesh.degrees.ring == 8


@pytest.mark.slow
def test_the_slowest_mesh_is_found_if_no_other_fits(monkeypatch):
    """All of them are looked at, however many there are."""
    sizes = []

    def of_degrees(config, objective, degrees, limit):
        sizes.append(degrees)
        size = SimpleNamespace(device_bytes=len(sizes) if given is None else degrees != given)
        return SimpleNamespace(remat=REMAT[-1], memory=lambda: size)

    monkeypatch.setattr(AbstractStep, "of_degrees", of_degrees)
    many, given = dataclasses.replace(TWO_NODES, nodes=8), None
    asked = planner(batch_size=8, seq_len=256)
    with refused(InputError, "--plan use needs"):
        asked.forecasts(many, 1, limit=0)
    assert len(sizes) > 100
    given = sizes[-1]
    assert [x.degrees for x in asked.forecasts(many, 1, limit=0)] == [given]


def gpu(**stats):
    return SimpleNamespace(platform="cuda", process_index=0, memory_stats=lambda: stats or None)


def limit_of(*devices):
    return step_limit(devices, GPUS["h100"].memory_bytes)


def test_a_step_may_take_what_jax_has_in_every_process(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    devices = gpu(bytes_limit=60 << 30), gpu(bytes_limit=59 << 30)
    assert limit_of(*devices) == 59 << 30
    with monkeypatch.context() as patch:
        gathered = lambda size: np.array([size, 1 << 10])  # noqa: E731
        patch.setattr(multihost_utils, "process_allgather", gathered)
        assert limit_of(*devices) == 1 << 30
    mebibytes = GPUS["h100"].memory_bytes >> 20
    assert limit_of(gpu()) >> 20 == int(0.75 * mebibytes)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert limit_of(gpu()) >> 20 == mebibytes // 2


@pytest.fixture
def measured(monkeypatch):
    """The devices count as H100, and nothing is measured."""
    asked = []

    def measure(devices, **options):
        asked.append(options)
        return dataclasses.replace(ONE_NODE, gpus_per_node=len(devices), ports=1)

    monkeypatch.setattr(planning, "measure_cluster", measure)
    return asked


def test_all_processes_take_the_plan_of_the_first(measured, monkeypatch):
    first = [vars(st.Degrees(ring=8)), ["ring", "data", "group", "team", "head", "tensor"]]
    monkeypatch.setattr(planning, "gather", lambda value: [first, value])
    mesh = planner().choose(jax.devices()[:8])
    assert (mesh.degrees, list(mesh.order)) == (st.Degrees(ring=8), first[1])


def test_a_plan_with_frozen_weights_is_one_of_a_faster_step(measured):
    of_all = found(count=1)[0]
    for changes in (dict(lora=LoraConfig(rank=4)), dict(frozen=("blocks/*",))):
        fewer = found(**changes, count=1)[0]
        for part in ("products", "optimizer", "zero waits"):
            assert fewer.parts[part] < of_all.parts[part]
    planner().choose(jax.devices()[:8])
    assert measured[0] == dict(devices_per_node=None, head_dim=8, itemsize=4, causal=True)


def join(config, folder):
    with joined(Distributed(), config.devices, folder) as session:
        former = agree(config, kind="a test", folder=folder)
        mesh, lines = choose_mesh(config, session.devices, former, TASKS[config.kind])
        return {role: n for role, n in mesh.shape.items() if n > 1}, lines


def test_a_run_takes_the_planned_mesh_and_keeps_it(measured, tmp_path):
    config = planner(devices=8).config
    shape, description = join(config, tmp_path)
    assert shape["data"] == 4
    assert description[-3].startswith("plan: measured in ")
    assert description[-2].startswith("plan: the fastest: data 4")
    assert description[-1].startswith("plan: the runner-up: ")
    order = ("data", "group", "ring", "team", "head", "tensor")
    save_degrees(tmp_path, vars(st.Degrees(head=4, ring=2)), order)
    assert read_mesh(tmp_path).order == order
    unplanned = dataclasses.replace(config, plan="off")
    for asked in (config, unplanned):
        assert join(asked, tmp_path)[0] == {"ring": 2, "head": 4}
    assert len(measured) == 1
    given = dataclasses.replace(unplanned, mesh=MeshConfig(head=8))
    assert join(given, tmp_path)[0] == {"head": 8}
    # A run that no plan began keeps its mesh too, and a ranking is shown for every run.
    save_degrees(tmp_path, vars(st.Degrees(ring=8)))
    assert join(config, tmp_path)[0] == {"ring": 8}
    shown = planner(devices=8, plan="show").config
    assert sum(line.startswith("plan: ") for line in join(shown, tmp_path)[1]) == 9
    (tmp_path / MESH_FILE).write_text('{"degrees": {"ring": 8}, "order": ["ring"]}')
    with refused(InputError, "must hold the degrees of a run"):
        read_mesh(tmp_path)


@pytest.mark.slow
def test_train_plans_for_documents(measured, tmp_path, capsys):
    asked = documents(np.arange(3, 90), tmp_path / "tokens.npy", devices=8, plan="show")
    changes = dict(run_dir=tmp_path / "run", sample=TextSampleConfig(), steps=1)
    config = dataclasses.replace(asked.config, **changes)
    assert train(config).validation is None
    shown = capsys.readouterr().out
    assert "documents of the data. In rows, " in shown
    best = re.search(r"plan: 1: (.*) \(.*tokens of documents in a second", shown)[1]
    assert not (tmp_path / "run").exists()
    assert len(train(dataclasses.replace(config, plan="use")).train) == 1
    assert f"plan: the fastest: {best} (" in capsys.readouterr().out


def test_train_shows_a_plan_and_makes_no_run(measured, tmp_path, capsys):
    flags = f"--plan show --devices 4 --run-dir {tmp_path / 'none'}"
    config = read_command_line(flags.split()).settings
    assert config == dataclasses.replace(
        gpt_tiny(), plan="show", devices=4, run_dir=tmp_path / "none"
    )
    assert train(config).validation is None
    assert "plan: 1: " in capsys.readouterr().out
    assert not (tmp_path / "none").exists()
