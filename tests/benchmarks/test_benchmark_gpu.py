"""The GPU benchmark on a CPU: its stand-ins do the work of the mesh; what its rows say is so."""

import collections
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import fake_cudnn
import oracle
import startrail_jax as st
from benchmarks.compiled import deviceless
from benchmarks.gpu import errors, rehearsal, report, speed
from benchmarks.gpu import run as gpu
from gpu_compiler import needs_gpu_compiler
from startrail_jax.tokens.layout import Layout

SEQ_LEN, HEADS, KV_HEADS, HEAD_DIM = 96, 2, 1, 8
DEGREES = {
    "ring 6": st.Degrees(ring=6),
    "C 2": st.Degrees.startrail(4, c=2),
    "C 2, ring 2": st.Degrees.startrail(8, c=2),
    "team 3, ring 2": st.Degrees(team=3, ring=2),
    "team 2, group 3": st.Degrees(team=2, group=3),
}
QUICK = {"xla_backend_optimization_level": 0}


def random(shape, seed, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def inputs(seq_len):
    """q, k, v, dout."""
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [random((1, seq_len, n, HEAD_DIM), seed) for seed, n in enumerate(heads)]


def both_passes(attend, q, k, v, dout):
    out, vjp = jax.vjp(attend, q, k, v)
    return out, *vjp(dout)


def on_mesh(degrees, **options):
    """Both passes on simulated devices, compiled."""
    devices = jax.devices()[: degrees.num_devices]
    mesh = st.make_mesh(degrees, axis_type="auto", devices=devices)
    attention = st.Attention(mesh, **options)
    arrays = inputs(SEQ_LEN)
    step = jax.jit(lambda *arrays: both_passes(attention, *arrays), compiler_options=QUICK)
    return step.lower(*arrays).compile(), arrays


def of_one_device(degrees, backward=True, **options):
    """The same of one device; to be called with (device, received, *arrays)."""
    one = st.make_mesh(st.Degrees(), devices=jax.devices()[:1])
    schedule = rehearsal.schedule_of(degrees, one, **options)
    arrays = inputs(SEQ_LEN // degrees.sequence)
    shapes = rehearsal.arrivals(schedule, *arrays, backward=backward)
    received = [random(x.shape, seed) for seed, x in enumerate(shapes)]
    step = jax.jit(rehearsal.alone(schedule, backward=backward), compiler_options=QUICK)
    device = rehearsal.middle(schedule)
    return step.lower(device, received, *arrays).compile(), (received, *arrays)


def kernel_calls(calls, compiled, *arguments):
    """The calls that one run makes, and their number."""
    calls.clear()
    jax.block_until_ready(compiled(*arguments))
    jax.effects_barrier()
    return collections.Counter(calls)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "causal"),
    [
        ("ring 6", True),
        ("C 2, ring 2", True),
        ("C 2, ring 2", False),
        ("team 3, ring 2", False),
        ("team 2, group 3", False),
    ],
)
def test_devices_alone_make_the_kernel_calls_of_the_mesh(monkeypatch, name, causal):
    calls, degrees = [], DEGREES[name]
    fake_cudnn.install(monkeypatch, calls)
    layout = "zigzag" if causal else "contiguous"
    options = dict(causal=causal, layout=layout, backend="cudnn", backward="kv")
    whole, arrays = on_mesh(degrees, **options)
    expected = kernel_calls(calls, whole, *arrays)
    alone, arguments = of_one_device(degrees, **options)
    axes = (range(n) for n in (degrees.ring, degrees.group, degrees.team))
    each = [
        kernel_calls(calls, alone, jnp.asarray(device, jnp.int32), *arguments)
        for device in itertools.product(*axes)
    ]
    assert sum(each, collections.Counter()) == expected
    assert expected
    # The one that is measured stands for all: all have the same work.
    area = lambda queries, keys, square: queries * keys / (1 + square)  # noqa: E731
    work = [sum(n * area(*sizes) for (_, sizes), n in calls.items()) for calls in each]
    assert min(work) == max(work)


@pytest.mark.slow
def test_compiled_program_of_one_device_has_the_products_of_the_mesh(monkeypatch):
    """What nothing reads is dropped: so what is sent must be returned."""
    fake_cudnn.install(monkeypatch)
    options = dict(layout="zigzag", backend="cudnn", backward="kv")
    count = lambda program: len(re.findall(r"\bdot\(", program.as_text()))  # noqa: E731
    alone, _ = of_one_device(DEGREES["C 2"], **options)
    whole, arrays = on_mesh(DEGREES["C 2"], **options)
    assert count(whole) == count(alone) > 0
    # The stand-ins are gone: the mesh computes the attention.
    layout = Layout("zigzag", 4)
    out = np.asarray(whole(*(layout.permute(x) for x in arrays))[0])
    expected, _ = oracle.attention(*arrays[:3], causal=True)
    np.testing.assert_allclose(layout.unpermute(out), expected, atol=2e-6)


@pytest.mark.quick
def test_one_device_receives_and_sends_what_the_mesh_does():
    mesh = st.make_mesh(st.Degrees(), devices=jax.devices()[:1])
    schedule = rehearsal.schedule_of(DEGREES["C 2"], mesh, backend="xla")
    shard = SEQ_LEN // 4
    arrays = inputs(shard)
    received = rehearsal.arrivals(schedule, *arrays, backward=False)
    # The team's queries, the group's keys and values, and the team's attentions of this shard.
    q, kv = (1, 2 * shard, HEADS, HEAD_DIM), (1, 2 * shard, KV_HEADS, HEAD_DIM)
    # Of float32 inputs, what rounding took from lse goes along with it.
    parts = (2, 1, shard, HEADS, HEAD_DIM), *2 * [(2, 1, HEADS, shard)]
    assert [x.shape for x in received] == [q, kv, kv, *parts]
    alone = rehearsal.alone(schedule, backward=False)
    (out,), sent = jax.eval_shape(alone, jnp.zeros(3, jnp.int32), received, *arrays)
    assert out.shape == (1, shard, HEADS, HEAD_DIM)
    # Keys and values, and the team's output and lse before they are combined; the queries that are
    # sent are those that come in.
    keys = 2 * [(1, shard, KV_HEADS, HEAD_DIM)]
    assert [x.shape for x in sent] == [*keys, q, *2 * [(1, HEADS, 2 * shard)]]


@pytest.mark.parametrize("options", [dict(published=True), {}])
def test_what_cannot_be_rehearsed_raises(options):
    degrees = DEGREES["C 2"] if options else st.Degrees.ulysses(2)
    mesh = st.make_mesh(st.Degrees(), devices=jax.devices()[:1])
    with pytest.raises(NotImplementedError, match="Only head=1 and published=False"):
        rehearsal.schedule_of(degrees, mesh, **options)


@pytest.mark.slow
@needs_gpu_compiler
def test_program_for_a_gpu_has_the_kernels_of_the_mesh():
    degrees = st.Degrees.startrail(8, c=2)
    devices = deviceless.gpu_topology("h200", 8).devices
    mesh = st.make_mesh(degrees, axis_type="auto", devices=devices)
    attention = st.Attention(mesh, layout="zigzag", backend="cudnn", backward="kv")
    shape = lambda n, spec, mesh: jax.ShapeDtypeStruct(  # noqa: E731
        (1, n, 2, 64), jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec)
    )
    whole = jax.jit(lambda *arrays: both_passes(attention, *arrays))
    whole = whole.lower(*4 * [shape(4096, attention.query_spec(2), mesh)]).compile()

    one = jax.make_mesh((1,), ("device",), axis_types=(AxisType.Auto,), devices=devices[:1])
    options = dict(layout="zigzag", backend="cudnn", backward="kv")
    schedule = rehearsal.schedule_of(degrees, one, **options)
    replicated = jax.NamedSharding(one, jax.P())
    arrays = 4 * [shape(512, jax.P(), one)]
    received = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated)
        for x in rehearsal.arrivals(schedule, *arrays, backward=True)
    ]
    alone = jax.jit(rehearsal.alone(schedule, backward=True))
    device = jax.ShapeDtypeStruct((3,), jnp.int32, sharding=replicated)
    alone = alone.lower(device, received, *arrays).compile()
    together = jax.jit(lambda *arrays: rehearsal.together(schedule, *arrays))
    together = together.lower(*4 * [shape(4096, jax.P(), one)]).compile()
    for kernel in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
        count = f'"{kernel}"'
        assert alone.as_text().count(count) == whole.as_text().count(count) > 0
        assert together.as_text().count(count) > 0


@pytest.mark.parametrize(
    ("name", "layout"), [("C 2, ring 2", "zigzag"), ("team 3, ring 2", "contiguous")]
)
@pytest.mark.slow
def test_devices_together_compute_the_attention(name, layout):
    mesh = st.make_mesh(st.Degrees(), devices=jax.devices()[:1])
    schedule = rehearsal.schedule_of(DEGREES[name], mesh, backend="xla", layout=layout)
    q, k, v, dout = inputs(SEQ_LEN)
    step = jax.jit(lambda *arrays: rehearsal.together(schedule, *arrays), compiler_options=QUICK)
    out, dq, dk, dv, lse = step(q, k, v, dout)
    expected, expected_lse = oracle.attention(q, k, v, causal=True)
    gradients = oracle.gradients(q, k, v, dout, causal=True)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)
    for actual, wanted in zip((out, dq, dk, dv), (expected, *gradients), strict=True):
        assert np.linalg.norm(actual - wanted) < 2e-6 * np.linalg.norm(wanted)


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
    assert problem.flops(speed.BOTH, 8) == problem.flops(speed.BOTH) / 8


def test_units_of_a_row_are_those_of_its_team():
    rows = list(speed.rows_of(speed.Problem(65536), speed.SETTINGS))
    assert {row.setting: row.unit for row in rows} == {
        speed.JAX: 65536,
        speed.OURS: 65536,
        "(c) Ring Attention, P=8": 8192,
        "(c) StarTrail, P=8, C=2": 16384,
        "(c) Ring Attention, P=64": 1024,
        "(c) StarTrail, P=64, C=4": 4096,
        "(c) team 8, ring 8, P=64": 8192,
    }


@pytest.mark.slow
def test_tiny_run_reports_errors_and_speed(capsys):
    rows = "packed|at once|(jax|one device|StarTrail).*, fwd$|step"
    assert gpu.main(["--tiny", "--rows", rows]) == 0
    printed = capsys.readouterr().out.splitlines()
    exact = [line for line in printed if line.endswith("PASS")]
    assert [line.count("(") for line in exact] == [0, 4]  # jax has no float32 of less precision.
    fast = [line for line in printed if re.match(r"\([abc]\)", line)]
    assert [line[:27].strip() for line in fast] == [
        speed.JAX,
        speed.OURS,
        "(c) StarTrail, P=4, C=2",
    ]
    for line in fast:
        assert min(float(number) for number in line.split()[-4:-1]) > 0
    assert fast[0].split()[-2] == "1.000"
    assert fast[2].split()[-5] == "64"
    # The peak of a CPU is not known.
    assert any(re.match(r"step: 4 layers .* TFLOP/s, MFU -", line) for line in printed)


@pytest.mark.slow
def test_rows_that_fail_are_reported_and_the_rest_goes_on(capsys, monkeypatch):
    def broken(*args, **options):
        raise NotImplementedError("no kernel\nfor this")

    monkeypatch.setattr(errors, "ours", broken)
    monkeypatch.setattr(speed.rehearsal, "alone", broken)
    assert gpu.main(["--tiny", "--rows", "packed|Ring.*fwd$|jax.nn.*fwd$"]) == 1
    printed = capsys.readouterr().out
    assert "ours: NotImplementedError: no kernel  FAIL" in printed
    assert printed.count("NotImplementedError: no kernel") == 2
    assert re.search(r"\(a\) .* 1\.000 ", printed)


def test_rows_for_which_there_is_no_time_are_listed(capsys):
    assert gpu.main(["--tiny", "--minutes", "0", "--rows", "tokens,|tokens$|causal 2/1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("left out, as the time was up: errors:") == len(errors.TINY_CHECKS)
    assert printed.count("left out, as the time was up: speed:") == 8


def test_program_that_does_not_fit_is_not_run():
    program = report.Program(jnp.sin, (jnp.zeros(2**10),))
    report.compile_all([program])
    report.time_in_turn([program], samples=1, seconds=1, memory_limit=2**12)
    assert program.error == "needs 0.0 GiB, and the device has 0.0"
    assert program.samples == []


def test_needs_a_gpu_unless_tiny():
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU; jax found cpu devices"):
        gpu.main([])


def test_rows_that_match_nothing_are_an_error():
    with pytest.raises(SystemExit, match=r"--rows must match .* got 'nothing like it'"):
        gpu.main(["--tiny", "--rows", "nothing like it"])
