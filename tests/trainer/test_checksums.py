"""Checkpoints that rot: every flipped bit is noticed, and an older checkpoint is used."""

import os
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from startrail_jax.errors import InputError
from tests.programs import change_checksum, run_python, shapes_of
from tests.refusals import refused
from trainer import durable
from trainer.checkpoints import checksums
from trainer.checkpoints.checkpoint import CheckpointError, Checkpoints
from trainer.checkpoints.checksums import CHECKSUMS_FILE, Checksums, checksums_of
from trainer.checkpoints.reading import restore_weights

DATA_STATE = {"epoch": 3, "position": [5, 7]}
SETTINGS = {"seed": "--seed 0", "model.width": "--model.width 8"}


def tiny_state(step, sharding=None):
    """A state whose numbers depend on the step, of which `sharding` splits the matrix."""
    noise = np.random.default_rng(step).standard_normal((8, 13), np.float32)
    matrix = jnp.array(noise) if sharding is None else jax.device_put(noise, sharding)
    weights = {"matrix": matrix, "vector": jnp.full(5, step, jnp.bfloat16)}
    return {"weights": weights, "count": jnp.asarray(step)}


def split(num_devices):
    mesh = jax.make_mesh(
        (num_devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_devices]
    )
    return NamedSharding(mesh, PartitionSpec("x"))


def save(folder, steps, sharding=None):
    with Checkpoints(folder, keep=len(steps)) as checkpoints:
        for step in steps:
            state = tiny_state(step, sharding)
            checkpoints.save(step, state, {**DATA_STATE, "at": step}, SETTINGS)
    return shapes_of(tiny_state(0, sharding))


def same_bits(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def restore_after(folder, path, content, shapes, sharding):
    """Whether other content of a file was noticed; asserts that what is restored was saved."""
    harmed, where = folder / "harmed", path.relative_to(folder / "whole")
    shutil.copytree(folder / "whole", harmed)
    (harmed / where).write_bytes(content)
    notes = []
    with Checkpoints(harmed, keep=2, note=notes.append) as checkpoints:
        state, data_state = checkpoints.restore(shapes, SETTINGS)
        step = checkpoints.restored
        assert checkpoints.latest == step
    what = f"{where}, {len(content)} bytes: {notes}"
    assert step == (3 if notes else 5), what
    assert data_state == {**DATA_STATE, "at": step}, what
    assert same_bits(state, tiny_state(step, sharding)), what
    assert (harmed / "5").exists() != bool(notes), what
    shutil.rmtree(harmed)
    return bool(notes)


def harm_files(folder, num_flips, sharding):
    """Cuts each file short and flips bits; returns how many flips were noticed, not harmless."""
    shapes = save(folder / "whole", (3, 5), sharding)
    files = sorted(path for path in (folder / "whole" / "5").rglob("*") if path.is_file())
    sizes, chance = [path.stat().st_size for path in files], random.Random(0)
    for path, size in zip(files, sizes, strict=True):
        restore_after(folder, path, path.read_bytes()[: size // 2], shapes, sharding)
    noticed = 0
    for number in range(num_flips):
        (path,) = chance.choices(files, [size > 0 if number % 2 else size for size in sizes])
        content = bytearray(path.read_bytes())
        bit = chance.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        noticed += restore_after(folder, path, content, shapes, sharding)
    return noticed


@pytest.mark.parametrize("flips", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_flipped_bits_and_short_files_are_noticed_or_harmless(tmp_path, flips):
    # In a separate process, since threads that read the checkpoint complain on stderr.
    script = f"""
import jax
jax.config.update("jax_num_cpu_devices", 2)
from pathlib import Path
from tests.trainer.test_checksums import harm_files, split
print(harm_files(Path({str(tmp_path)!r}), {flips}, split(2)))
"""
    process = run_python("-c", script, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) >= 0.3 * flips


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "bool", "float8_e4m3fn"])
def test_checksum_notices_every_bit_and_no_sharding(dtype):
    host = np.array(jnp.arange(16).reshape(8, 2) % 2, dtype)
    expected = checksums_of({"a": jnp.asarray(host)})["a"]
    for sharding in (split(8), split(2)):
        assert checksums_of({"a": jax.device_put(host, sharding)})["a"] == expected
    found = {expected}
    bits = range(0, 8 * host.nbytes, 8 if dtype == "bool" else 1)
    for bit in bits:
        flipped = bytearray(host.tobytes())
        flipped[bit // 8] ^= 1 << bit % 8
        array = np.frombuffer(bytes(flipped), host.dtype).reshape(host.shape)
        found.add(checksums_of({"a": jnp.asarray(array)})["a"])
    assert len(found) == len(bits) + 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_checksum_takes_no_memory_beside_the_array(dtype):
    shape = jax.ShapeDtypeStruct((16, 32, 64), dtype, sharding=split(8))
    memory = checksums._sums.lower(shape).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1000


def test_checksum_notices_two_signs_and_two_places():
    values = np.arange(1.0, 7, dtype=np.float32)
    others = [values[::-1], values * [-1, -1, 1, 1, 1, 1], -values, values[[1, 0, 2, 3, 4, 5]]]
    found = {checksums_of({"a": jnp.asarray(x, jnp.float32)})["a"] for x in (values, *others)}
    assert len(found) == 5


def unreadable(_, monkeypatch):
    def refuse(folder):
        raise PermissionError(folder)

    monkeypatch.setattr(Checksums, "read", refuse)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda checkpoint, _: change_checksum(checkpoint), "/5"),
        (lambda checkpoint, _: (checkpoint / CHECKSUMS_FILE).unlink(), "is missing"),
        (unreadable, "/5"),
    ],
)
def test_damaged_checkpoint_that_is_alone_is_named_and_stays(damage, named, tmp_path, monkeypatch):
    shapes = save(tmp_path, (5,))
    damage(tmp_path / "5", monkeypatch)
    with Checkpoints(tmp_path, keep=1) as checkpoints, refused(CheckpointError, named):
        checkpoints.restore(shapes, SETTINGS)
    with refused(CheckpointError, named):
        restore_weights(tmp_path, shapes["weights"])
    assert [path.name for path in tmp_path.iterdir()] == ["5"]  # Nothing is renamed.


def test_damaged_checkpoint_is_removed_and_the_one_before_is_used_unless_strict(tmp_path):
    shapes, damaged = save(tmp_path, (3, 5)), f"The checkpoint {tmp_path / '5'} is damaged: "
    (tmp_path / "5" / CHECKSUMS_FILE).write_text("{}")
    way_out = "Without --checkpoint.strict, the same command goes on from step 3"
    with (
        Checkpoints(tmp_path, keep=2, strict=True) as checkpoints,
        refused(CheckpointError, damaged, way_out),
    ):
        checkpoints.restore(shapes)
    notes = []
    with Checkpoints(tmp_path, keep=2, note=notes.append) as checkpoints:
        assert checkpoints.restore(shapes)[1] == {**DATA_STATE, "at": 3}
        assert checkpoints.steps == [3]
    (note,) = notes
    assert note.startswith(f"WARNING: {damaged}")
    assert "It is removed, and the checkpoint of step 3 is used" in note
    assert note.endswith("steps 4 to 5 are lost, and done again.")


def test_checkpoint_that_may_be_whole_is_not_set_aside(tmp_path, monkeypatch):
    shapes = save(tmp_path, (3, 5))
    unreadable(tmp_path, monkeypatch)
    with Checkpoints(tmp_path, keep=2) as checkpoints, refused(CheckpointError, "/5"):
        checkpoints.restore(shapes)
    assert {path.name for path in tmp_path.iterdir()} == {"3", "5"}


def test_other_settings_are_refused(tmp_path):
    shapes = save(tmp_path, (5,))
    now = {"seed": "--seed 4", "model.width": "--model.width 8", "new": "--new"}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        with refused(InputError, "--seed"):
            checkpoints.restore(shapes, now)
        assert checkpoints.latest == 5
    with refused(InputError, "--seed"):
        restore_weights(tmp_path, shapes["weights"], now)


def test_samples_are_drawn_from_the_newest_whole_checkpoint(tmp_path):
    shapes = save(tmp_path, (3, 5))
    (tmp_path / "5" / CHECKSUMS_FILE).write_text("{}")
    notes = []
    weights, step = restore_weights(tmp_path, shapes["weights"], SETTINGS, note=notes.append)
    assert step == 3
    assert same_bits(weights, tiny_state(3)["weights"])
    assert len(notes) == 1
    assert notes[0].startswith(f"WARNING: The checkpoint {tmp_path / '5'} is damaged: ")
    assert notes[0].endswith("The checkpoint of step 3 is used.")
    assert {path.name for path in tmp_path.iterdir()} == {"3", "5"}  # It writes nothing.


def test_all_files_are_on_the_disk_before_an_older_checkpoint_goes(tmp_path, monkeypatch):
    flushed, events = set(), []

    def fsync(descriptor):
        flushed.add(os.fstat(descriptor).st_ino)
        events.append("flush")

    def rename(old, new):
        paths = [old, *old.rglob("*")]
        if new.name == "5":
            assert {path.stat().st_ino for path in paths} <= flushed
        flushed.clear()
        events.append(f"{old.name} to {new.name}")
        os.rename(old, new)

    def rmtree(path, ignore_errors):
        events.append(f"remove {path.name}")

    save(tmp_path, (3,))
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(type(tmp_path), "replace", rename)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, {"a": jnp.zeros(3)}, {})
        checkpoints.wait()
        assert checkpoints.steps == [5]
        costs = checkpoints.take_costs()
        assert checkpoints.take_costs() == {}
    assert costs["checkpoint_seconds"] > costs["checkpoint_flush_seconds"] > 0
    assert costs["checkpoint_checksum_seconds"] > 0
    assert tmp_path.stat().st_ino in flushed
    while events[0] == "flush":
        events.pop(0)
    assert events == [
        *("unflushed_5 to 5", "flush"),
        # A half-deleted folder never has the name of a whole one.
        *("remove 3.removed", "3 to 3.removed", "flush", "remove 3.removed"),
    ]


def test_each_process_flushes_what_it_wrote(tmp_path, monkeypatch):
    own = {"ocdbt.process_1/d", "ocdbt.process_1", "metadatas/process_1", "ocdbt.process_12/d"}
    for name in (*own, "metadatas/process_0", "_METADATA"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        if not name.startswith("ocdbt.process_1") or name.endswith("d"):
            path.write_text("")
    flushed = []
    monkeypatch.setattr(durable, "flush", lambda path: flushed.append(path.relative_to(tmp_path)))
    durable.flush_files(tmp_path, 1)
    assert {str(path) for path in flushed} == own - {"ocdbt.process_12/d"}
    flushed.clear()
    durable.flush_files(tmp_path, 0)
    assert {str(path) for path in flushed} == {".", "metadatas", "metadatas/process_0", "_METADATA"}


def test_what_a_kill_left_is_removed(tmp_path):
    shapes = save(tmp_path, (3,))
    for name in ("unflushed_5", "1.removed", "unflushed_7.orbax-checkpoint-tmp"):
        shutil.copytree(tmp_path / "3", tmp_path / name)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.steps == [3]
        checkpoints.restore(shapes)
    assert [path.name for path in tmp_path.iterdir()] == ["3"]
