"""The GPU benchmark on a CPU: devices at once do the work of the mesh; what its rows say is so."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import oracle
import startrail_jax as st
from benchmarks.compiled import deviceless
from benchmarks.gpu import errors, report, speed
from benchmarks.gpu import run as gpu
from gpu_compiler import needs_gpu_compiler

QUICK = {"xla_backend_optimization_level": 0}


@pytest.mark.slow
@needs_gpu_compiler
def test_program_for_a_gpu_has_kernels_of_forward_and_backward():
    device = deviceless.gpu_topology("h200", 1).devices[:1]
    mesh = jax.make_mesh((1,), ("device",), axis_types=(AxisType.Auto,), devices=device)
    check = errors.Check(backend="cudnn", degrees=st.Degrees.startrail(8, c=2))
    arrays = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, jax.P())),
        check.inputs(),
    )
    text = jax.jit(errors.ours(check, mesh)).lower(*arrays).compile().as_text()
    for kernel in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
        assert text.count(f'"{kernel}"') > 0


@pytest.mark.parametrize(
    ("degrees", "causal", "packed"),
    [
        (st.Degrees.startrail(8, c=2), True, False),
        (st.Degrees(team=3, ring=2), False, False),
        (st.Degrees(ring=2), True, True),
    ],
    ids=str,
)
@pytest.mark.slow
def test_devices_at_once_compute_the_attention(degrees, causal, packed):
    check = errors.Check(
        backend="xla", dtype="float32", heads=2, kv_heads=1, head_dim=8, seq_len=96,
        causal=causal, packed=packed, degrees=degrees,
    )  # fmt: skip
    mesh = st.make_mesh(st.Degrees(), devices=jax.devices()[:1])
    q, k, v, dout, ids = check.inputs()
    found = jax.jit(errors.ours(check, mesh), compiler_options=QUICK)(q, k, v, dout, ids)
    mask = dict(causal=causal, segment_ids=np.asarray(ids) if packed else None)
    out, _ = oracle.attention(q, k, v, **mask)
    wanted = (out, *oracle.gradients(q, k, v, dout, **mask))
    assert max(errors.errors(found, wanted)) < 2e-6


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_reference_computes_what_the_row_says(causal):
    options = dict(window=30, packed=True) if causal else dict(value_head_dim=5)
    check = errors.Check(
        backend="xla", dtype="float32", causal=causal, heads=4, kv_heads=2, head_dim=8,
        seq_len=96, **options,
    )  # fmt: skip
    *arrays, ids = check.inputs()
    mask = dict(segment_ids=np.asarray(ids), window=check.window, causal=causal)
    out, _ = oracle.attention(*arrays[:3], **mask)
    expected = (out, *oracle.gradients(*arrays, **mask))
    compute = errors.jax_attention(check, "xla")
    results = jax.jit(compute, compiler_options=QUICK)(*arrays, ids)
    assert max(errors.errors(results, expected)) < 2e-6


@pytest.mark.parametrize(
    ("causal", "options"),
    [(True, {}), (True, dict(window=5)), (True, dict(rows=3, documents=4)), (False, dict(rows=2))],
)
def test_useful_work_counts_visible_pairs(causal, options):
    sizes = dict(heads=4, kv_heads=2, head_dim=8, value_head_dim=6)
    problem = speed.Problem(12, causal, **sizes, **options)
    mask = dict(causal=causal, window=problem.window, segment_ids=problem.ids)
    pairs = np.broadcast_to(oracle.visible(12, 12, **mask), (problem.rows, 12, 12)).sum()
    assert problem.flops(speed.FORWARD) == 2 * pairs * 4 * (8 + 6)
    assert problem.flops(speed.BOTH) == 2 * pairs * 4 * (4 * 8 + 3 * 6)


@pytest.mark.slow
def test_tiny_run_reports_errors_and_speed(capsys):
    assert gpu.main(["--tiny"]) == 0
    printed = capsys.readouterr().out.splitlines()
    exact = [line for line in printed if line.endswith("PASS")]
    # In float32, jax's errors are no limit.
    assert [line.count("(") for line in exact] == [4, 0, 4]
    fast = [line for line in printed if re.match(r"\([ab]\)", line)]
    assert [line[:20].strip() for line in fast] == 2 * [speed.JAX, speed.OURS]
    for line in fast:
        assert min(float(number) for number in line.split()[-4:-1]) > 0
    assert fast[0].split()[-2] == "1.000"


@pytest.mark.slow
@pytest.mark.parametrize("found", [jnp.nan, 1.1])
def test_wrong_or_failing_rows_are_reported_and_the_rest_goes_on(capsys, monkeypatch, found):
    def broken(*args, **options):
        raise NotImplementedError("no kernel\nfor this")

    right = errors.ours
    wrong = lambda *args: lambda *arrays: tuple(found * x for x in right(*args)(*arrays))  # noqa: E731
    broken_or_wrong = iter([broken, wrong, right])
    monkeypatch.setattr(errors, "ours", lambda *args: next(broken_or_wrong)(*args))
    monkeypatch.setattr(speed, "measure", lambda report: None)
    assert gpu.main(["--tiny"]) == 1
    printed = capsys.readouterr().out
    assert re.search("window.*NotImplementedError: no kernel  FAIL", printed)
    assert re.search("packed.*FAIL", printed)
    assert re.search("at once.*PASS", printed)


def test_rows_for_which_there_is_no_time_are_listed(capsys):
    assert gpu.main(["--tiny", "--minutes", "0"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("left out, as the time was up:") == len(errors.TINY_CHECKS) + 2


def test_program_that_fails_says_why_and_is_not_timed():
    program = report.Program(lambda x: x @ x, (jnp.zeros((2, 3)),))
    report.time_in_turn([program], samples=1, seconds=1)
    assert program.error.startswith("TypeError: dot_general requires")
    assert program.samples == []


def test_needs_a_gpu_unless_tiny():
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU; jax found cpu devices"):
        gpu.main([])
