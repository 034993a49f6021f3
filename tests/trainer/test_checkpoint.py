"""Checkpoints: restored on other meshes, with donated arrays, and after kills and full disks."""

import inspect
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from peak import Peak, needs_linux
from programs import run_python, shapes_of
from refusals import refused
from startrail_jax.errors import InputError
from trainer.checkpoints import checkpoint, reading
from trainer.checkpoints.checkpoint import CheckpointError, Checkpoints
from trainer.checkpoints.checksums import checksums_of

DATA_STATE = {"epoch": 3, "position": [5, 7], "source": None, "name": "ä"}

# The beginning of a child process; the source of `counting_state` below follows it.
CHILD = """
import resource, signal, sys, time
from pathlib import Path
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
from trainer.checkpoints.checkpoint import CheckpointError, Checkpoints

folder = Path(sys.argv[1])

"""


def counting_state(step):
    """A state all of whose numbers depend on the step, and which cannot be compressed."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    noise = jax.random.randint(jax.random.key(0), (8, 50_021), 0, 2**30)
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    return {"a": jax.device_put(noise + step, sharding), "b": jnp.full(13, step)}


def make_mesh(*shape):
    axes = ("x", "y")[: len(shape)]
    devices = jax.devices()[: np.prod(shape)]
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


class Model(nnx.Module):
    def __init__(self, width, rngs):
        self.blocks = nnx.List([nnx.Linear(24, width, rngs=rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(width, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs)


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(0.1)))


def make_state(width=16):
    parameters = nnx.state(Model(width, nnx.Rngs(0)))
    _, moved = OPTIMIZER.update(parameters, OPTIMIZER.init(parameters), parameters)
    return {"parameters": parameters, "optimizer": moved, "step": jnp.int32(17)}


def shardings_of(state, mesh, spec):
    """Shards matrices by `spec`, and replicates arrays with fewer dimensions."""
    return jax.tree.map(
        lambda x: NamedSharding(mesh, spec if x.ndim == 2 else PartitionSpec()), state
    )


def assert_same_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize(
    ("old", "old_spec", "new", "new_spec"),
    [
        ((8,), PartitionSpec("x"), (4,), PartitionSpec("x")),
        ((2, 4), PartitionSpec("x", "y"), (4,), PartitionSpec()),
        ((4,), PartitionSpec(), (2, 4), PartitionSpec("y", "x")),
        ((8,), PartitionSpec(None, "x"), (1,), PartitionSpec()),
    ],
)
@pytest.mark.slow_except_every(4)
def test_checkpoint_restores_on_another_mesh(tmp_path, old, old_spec, new, new_spec):
    state = make_state()
    state = jax.device_put(state, shardings_of(state, make_mesh(*old), old_spec))
    with Checkpoints(tmp_path / "run" / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(17, state, DATA_STATE)
    target = shardings_of(state, make_mesh(*new), new_spec)
    with Checkpoints(tmp_path / "run" / "checkpoints", keep=1) as checkpoints:
        restored, data_state = checkpoints.restore(shapes_of(jax.device_put(state, target)))
    assert data_state == DATA_STATE
    assert_same_bits(restored, state)
    assert jax.tree.map(lambda x: x.sharding, restored) == target
    donate = jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0)
    assert_same_bits(donate(restored), jax.tree.map(lambda y: y + 1, state))


@pytest.mark.slow
def test_save_is_asynchronous_and_arrays_may_be_donated(tmp_path):
    sharding = NamedSharding(make_mesh(8), PartitionSpec("x"))
    noise = np.random.default_rng(0).standard_normal((8, 1_000_003), np.float32)
    update = jax.jit(lambda x: jax.tree.map(lambda y: -y, x), donate_argnums=0)
    # A computation makes the arrays, since `device_put` may share memory with numpy, which bars
    # donation.
    state = update({"split": jax.device_put(-noise, sharding), "whole": jnp.array(-noise[:3])})
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        assert checkpoints.latest is None  # 44 MB are not yet on the disk.
        updated = update(state)
        checkpoints.wait()
        restored, _ = checkpoints.restore(shapes_of(updated))
        np.testing.assert_array_equal(restored["split"], noise)
        np.testing.assert_array_equal(restored["whole"], noise[:3])
        checkpoints.save(2, updated, {})
        assert checkpoints.latest == 1
        updated["split"].delete()
        restored, _ = checkpoints.restore(shapes_of(restored))
        assert checkpoints.latest == 2
        np.testing.assert_array_equal(restored["split"], -noise)


def test_newest_checkpoints_are_kept(tmp_path):
    shapes = shapes_of({"a": jnp.full(3, 0)})
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest is None
        with refused(CheckpointError, "There must"):
            checkpoints.restore(shapes)
        for step in (5, 10, 100, 1000):
            checkpoints.save(step, {"a": jnp.full(3, step)}, {"at": step})
        checkpoints.save(1000, {"a": jnp.full(3, 0)}, {"at": "again"})
        checkpoints.wait()
        assert checkpoints.steps == [100, 1000]
        assert checkpoints.latest == 1000
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.restore(shapes)[1] == {"at": 1000}
        checkpoints.save(2000, {"a": jnp.full(3, 0)}, {})
        checkpoints.wait()
        assert checkpoints.steps == [2000]


def assert_goes_on(folder, latest):
    """The latest checkpoint is whole, and the next save removes the unfinished one."""
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.latest == latest
        if latest:
            shapes = shapes_of(counting_state(0))
            restored, data_state = checkpoints.restore(shapes)
            assert data_state == {"at": latest}
            assert_same_bits(restored, counting_state(latest))
        later = (latest or 0) + 1
        checkpoints.save(later, counting_state(later), {})
        checkpoints.wait()
        assert checkpoints.latest == later
        assert {path.name for path in folder.iterdir()} <= {str(later), str(later - 1)}


@pytest.mark.slow
def test_failed_save_says_what_is_left_and_harms_nothing(tmp_path):
    # A limit on the size of files replaces a full disk, which a test cannot make everywhere.
    script = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for last, limit in enumerate((100_000, 0, 300)):
    try:
        with Checkpoints(folder / str(last), keep=1) as checkpoints:
            for step in range(1, last + 1):
                checkpoints.save(step, counting_state(step), {"at": step})
            checkpoints.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            checkpoints.save(last + 1, counting_state(last + 1), {})
            if last == 1:
                checkpoints.save(last + 2, counting_state(last + 2), {})
            if last == 2:
                checkpoints.wait()
    except CheckpointError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""
    source = CHILD + inspect.getsource(counting_state) + script
    process = run_python("-W", "error", "-c", source, tmp_path)
    assert process.returncode == 0, process.stderr
    assert "absl" not in process.stderr
    for last, line in zip(range(3), process.stdout.splitlines(), strict=True):
        assert f"The checkpoint of step {last + 1} could not be saved: " in line
        assert "File too large" in line
        earlier = f"The last whole one, of step {last}, is intact" if last else "no earlier one"
        assert f"{earlier}. Mend that, or free space in {tmp_path / str(last)}; then" in line
        assert line.endswith(f"then the same command goes on from step {last}.")
        assert_goes_on(tmp_path / str(last), last or None)


def half(parameters):
    return jax.tree.map(lambda x: x.astype(jnp.float16), parameters)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda state: make_state(width=32), "differs in 1"),
        (lambda state: state | {"parameters": half(state["parameters"])}, "float16[16] now"),
        (
            lambda state: (
                state | {"optimizer": optax.sgd(0.1, momentum=0.9).init(state["parameters"])}
            ),
            "float32[16]",
        ),
    ],
)
def test_checkpoint_of_another_model_names_the_arrays(tmp_path, change, named):
    state = make_state()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(17, state, {})
        checkpoints.wait()
        with refused(InputError, named, str(tmp_path / "17"), "another --run-dir"):
            checkpoints.restore(shapes_of(change(state)))
        assert checkpoints.latest == 17


@needs_linux
@pytest.mark.slow
def test_save_in_little_memory_takes_a_part_of_the_state_beside_it(tmp_path, monkeypatch):
    """Of numbers that cannot be compressed, other saves take all once more."""
    monkeypatch.setattr(checkpoint, "LEAST_LIMIT", 1)
    sharding = NamedSharding(make_mesh(8), PartitionSpec("x"))
    rng = np.random.default_rng(0)
    state = {
        f"{i}": jax.device_put(rng.integers(0, 1 << 32, (8, 1 << 18), np.uint32), sharding)
        for i in range(12)
    }
    shapes = shapes_of(state)
    share = sum(x.nbytes for x in state.values())
    assert checkpoint.write_limit(shapes) == share // 16
    checksums_of(state)  # Compiles.
    with Checkpoints(tmp_path, keep=1, in_little_memory=shapes) as checkpoints:
        with Peak() as peak:
            checkpoints.save(3, state, DATA_STATE)
            checkpoints.wait()
        # Allocators keep what they have used, in every thread.
        assert peak.anonymous < 0.6 * share
        assert peak.resident < 0.6 * share
        restored, _ = checkpoints.restore(shapes)
    for name, x in state.items():
        np.testing.assert_array_equal(restored[name], x, err_msg=name)


def test_limit_of_a_save_is_above_the_largest_part():
    split, whole = (NamedSharding(make_mesh(2), PartitionSpec(*axes)) for axes in (["x"], []))
    large = jax.ShapeDtypeStruct((1 << 20, 1 << 10), jnp.float32, sharding=split)
    assert checkpoint.write_limit({"a": large}) == (1 << 31) + 1
    assert checkpoint.write_limit([large] * 32) == 1 << 33
    small = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    assert checkpoint.write_limit([small]) == checkpoint.write_limit([]) == checkpoint.LEAST_LIMIT


def test_list_of_checkpoints_that_missed_the_new_one_is_made_again(tmp_path, monkeypatch):
    (tmp_path / "6").mkdir()
    glob, listed = Path.glob, []

    def glob_late(self, pattern):
        # The new checkpoint appeared, and the old one went, while the folder was listed.
        listed.append(self)
        return iter(()) if len(listed) == 1 else glob(self, pattern)

    monkeypatch.setattr(Path, "glob", glob_late)
    assert reading.whole_steps(tmp_path) == [6]
    (tmp_path / "6").rmdir()
    assert reading.whole_steps(tmp_path) == []


def test_check_space_counts_what_will_be_kept(tmp_path, monkeypatch):
    state = {"a": jnp.zeros((240, 1000)), "b": jnp.zeros(20_000, jnp.bfloat16)}  # 1 MB
    usage = {"free": 0}
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, usage["free"])
    )
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        usage["free"] = 2_900_000
        with refused(CheckpointError, "0.001 GB"):
            checkpoints.check_space(shapes_of(state))
        usage["free"] = 3_000_000
        checkpoints.check_space(shapes_of(state))
        for step in range(3):
            checkpoints.save(step, state, {})
        checkpoints.wait()
        usage["free"] = 900_000
        with refused(CheckpointError, "1 more"):
            checkpoints.check_space(shapes_of(state))
        usage["free"] = 1_000_000
        checkpoints.check_space(shapes_of(state))


@pytest.mark.parametrize("of_first", [{"step": 6}, {"number": 5}])
def test_processes_that_see_other_checkpoints_are_refused(of_first, tmp_path, monkeypatch):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.begin_after() == 0

        def gather(mine):
            return [list(({"number": mine[0], "step": mine[1]} | of_first).values()), mine]

        monkeypatch.setattr(checkpoint, "gather", gather)
        with refused(CheckpointError, "process 0"):
            checkpoints.begin_after()
        assert list(tmp_path.iterdir()) == []
