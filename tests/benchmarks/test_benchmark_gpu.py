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
    ("degrees", "causal"),
    [(st.Degrees.startrail(8, c=2), True), (st.Degrees(team=3, ring=2), False)],
    ids=str,
)
@pytest.mark.slow
def test_devices_at_once_compute_the_attention(degrees, causal):
    check = errors.Check(
        backend="xla", dtype="float32", heads=2, kv_heads=1, head_dim=8, seq_len=96,
        causal=causal, degrees=degrees,
    )  # fmt: skip
    mesh = st.make_mesh(st.Degrees(), devices=jax.devices()[:1])
    q, k, v, dout, ids = check.inputs()
    found = jax.jit(errors.ours(check, mesh), compiler_options=QUICK)(q, k, v, dout, ids)
    out, lse = oracle.attention(q, k, v, causal=causal)
    gradients = oracle.gradients(q, k, v, dout, causal=causal)
    np.testing.assert_allclose(found["lse"], lse, atol=1e-5)
    for name, wanted in zip(errors.NAMES, (out, *gradients), strict=False):
        assert np.linalg.norm(found[name] - wanted) < 2e-6 * np.linalg.norm(wanted)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_reference_computes_what_the_row_says(causal):
    options = dict(window=30, packed=True) if causal else {}
    check = errors.Check(
        backend="xla", dtype="float32", causal=causal, heads=4, kv_heads=2, head_dim=8,
        seq_len=96, **options,
    )  # fmt: skip
    *arrays, ids = check.inputs()
    mask = dict(segment_ids=np.asarray(ids), window=check.window, causal=causal)
    out, lse = oracle.attention(*arrays[:3], **mask)
    expected = dict(zip(errors.NAMES, (out, *oracle.gradients(*arrays, **mask), lse), strict=True))
    compute = errors.jax_attention(check, "xla")
    results = jax.jit(compute, compiler_options=QUICK)(*arrays, ids)
    found = errors.errors(results, expected)
    assert set(found) == set(errors.NAMES)
    assert all(error < 2e-6 for error in found.values())


def test_errors_that_are_too_large_are_named():
    check = errors.Check(backend="cudnn")
    fine = dict.fromkeys(errors.NAMES, 1e-6)
    of_jax = dict.fromkeys(errors.NAMES[:4], 1e-6)
    assert errors.faults(check, fine, of_jax) == []
    assert errors.faults(check, {**fine, "dq": 1.5e-6, "dv": float("nan")}, of_jax) == ["dq", "dv"]
    assert errors.faults(check, {**fine, "lse": 2e-4}, of_jax) == ["lse"]
    float32 = errors.Check(backend="xla", dtype="float32")
    assert errors.faults(float32, {**fine, "out": 2e-5, "lse": 2e-5}, {}) == ["out", "lse"]


def test_lse_of_rows_that_see_no_key_is_compared_and_does_not_drown_the_others():
    expected = jnp.asarray([[1.0, 2.0, -1e30]])
    close, wrong = (jnp.asarray([[1.0, 2.1, last]]) for last in (-1e30, 0.0))
    error = errors.errors(dict(lse=close), dict(lse=expected))["lse"]
    assert error == pytest.approx(0.1 / np.sqrt(5), rel=1e-3)
    assert np.isnan(errors.errors(dict(lse=wrong), dict(lse=expected))["lse"])


@pytest.mark.parametrize("causal", [True, False])
def test_useful_work_counts_visible_pairs(causal):
    problem = speed.Problem(12, causal, heads=4, kv_heads=2, head_dim=8)
    pairs = oracle.visible(12, 12, causal=causal).sum()
    assert problem.flops(speed.FORWARD) == 2 * 2 * pairs * 4 * 8
    assert problem.flops(speed.BOTH) == 7 * 2 * pairs * 4 * 8


@pytest.mark.slow
def test_tiny_run_reports_errors_and_speed(capsys):
    rows = "packed|at once|, fwd$|step"
    assert gpu.main(["--tiny", "--rows", rows]) == 0
    printed = capsys.readouterr().out.splitlines()
    exact = [line for line in printed if line.endswith("PASS")]
    assert [line.count("(") for line in exact] == [0, 4]  # jax has no float32 of less precision.
    fast = [line for line in printed if re.match(r"\([ab]\)", line)]
    assert [line[:20].strip() for line in fast] == [speed.JAX, speed.OURS]
    for line in fast:
        assert min(float(number) for number in line.split()[-4:-1]) > 0
    assert fast[0].split()[-2] == "1.000"
    # The peak of a CPU is not known.
    assert any(re.match(r"step: 4 layers .* TFLOP/s, MFU -", line) for line in printed)


@pytest.mark.slow
def test_rows_that_fail_are_reported_and_the_rest_goes_on(capsys, monkeypatch):
    def broken(*args, **options):
        raise NotImplementedError("no kernel\nfor this")

    monkeypatch.setattr(errors, "ours", broken)
    assert gpu.main(["--tiny", "--rows", "packed|jax.nn.*fwd$"]) == 1
    printed = capsys.readouterr().out
    assert re.search("packed.*NotImplementedError: no kernel  FAIL", printed)
    assert re.search(r"\(a\) .* 1\.000 ", printed)


def test_rows_for_which_there_is_no_time_are_listed(capsys):
    assert gpu.main(["--tiny", "--minutes", "0", "--rows", "tokens,|tokens$|causal 2/1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("left out, as the time was up: errors:") == len(errors.TINY_CHECKS)
    assert printed.count("left out, as the time was up: speed:") == 4


def test_program_that_fails_says_why_and_is_not_timed():
    program = report.Program(lambda x: x @ x, (jnp.zeros((2, 3)),))
    report.time_in_turn([program], samples=1, seconds=1)
    assert program.error.startswith("TypeError: dot_general requires")
    assert program.samples == []


def test_needs_a_gpu_unless_tiny():
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU; jax found cpu devices"):
        gpu.main([])


def test_rows_that_match_nothing_are_an_error():
    with pytest.raises(SystemExit, match=r"--rows must match .* got 'nothing like it'"):
        gpu.main(["--tiny", "--rows", "nothing like it"])
