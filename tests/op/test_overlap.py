"""What runs beneath every message: on hand-written texts, and in programs compiled for GPUs."""

import functools
import re

import jax
import pytest

import hlo_texts
import startrail_jax as st
from benchmarks.compiled import deviceless
from benchmarks.compiled import run as benchmark
from benchmarks.compiled.deviceless import gpu_topology, target_names
from benchmarks.compiled.roofline import BACKWARD, ENTRY, read_roofline
from gpu_compiler import needs_gpu_compiler
from hlo_texts import NEVER, computation, loop
from refusals import refused
from startrail_jax.errors import UnsupportedError
from trainer.planner.hardware import GPUS

pytestmark = pytest.mark.quick

ATTENTION = 'custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"'
GRADIENTS = 'custom-call(%x), custom_call_target="__cudnn$fmhaSoftmaxBackward"'
PRODUCT = 'custom-call(%x, %x), custom_call_target="__cublas$gemm"'
DOT = "dot(%x, %x), lhs_contracting_dims={0}, rhs_contracting_dims={0}"
SHIFT = "source_target_pairs={{0,1},{1,0}}"
GROUPS = "replica_groups={{0,1}}, use_global_device_ids=true, dimensions={0}"
START = f"%p = (f32[4,6]{{1,0}}, f32[4,6]{{1,0}}) collective-permute-start(%x), {SHIFT}"
module = functools.partial(hlo_texts.module, header="num_partitions=2")
DONE = "%pd = f32[4,6]{1,0} collective-permute-done(%p)"


def value(name, expression):
    return f"%{name} = f32[4,6]{{1,0}} {expression}"


def collectives(text):
    return read_roofline(text, GPUS["h100"]).collectives


def only(text):
    (transfer,) = collectives(text)
    return transfer


def names(kernels):
    return [kernel.name for kernel in kernels]


def test_attention_between_start_and_done_is_beneath():
    op = ', metadata={op_name="jit(f)/ppermute" stack_frame_id=1}'
    text = module([START + op, value("a", ATTENTION), value("b", GRADIENTS), DONE])
    transfer = only(text)
    assert transfer.name == "p"
    assert transfer.kind == "collective_permute"
    assert transfer.computation == ENTRY
    assert transfer.op_name == "jit(f)/ppermute"
    assert transfer.groups == ((0, 1), (1, 0))
    assert (transfer.runs, transfer.received_bytes) == (1, 96)
    assert transfer.asynchronous
    assert transfer.overlapped
    assert names(transfer.attention) == ["a", "b"]
    assert transfer.attention[0].result == "f32[4,6]{1,0}"
    assert transfer.products == []


def test_attention_before_and_after_is_not_beneath():
    text = module([value("a", ATTENTION), START, value("t", "negate(%x)"), DONE, value("b", DOT)])
    transfer = only(text)
    assert transfer.asynchronous
    assert not transfer.overlapped
    assert (transfer.attention, transfer.products) == ([], [])


@pytest.mark.parametrize(
    "start",
    [
        START + ', backend_config={"collective_backend_config":{"is_sync":true}}',
        value("p", f"collective-permute(%x), {SHIFT}"),
    ],
    ids=["pair that is kept together", "one instruction"],
)
def test_nothing_is_beneath_a_synchronous_collective(start):
    entry = [start, value("a", ATTENTION)]
    transfer = only(module([*entry, DONE] if "-start" in start else entry))
    assert not transfer.asynchronous
    assert not transfer.overlapped
    assert transfer.received_bytes == 96


FLASH = computation("flash", value("y", ATTENTION))
SKIP = computation("skip", value("y", "copy(%x)"))
DOTS = computation("dots", value("y", DOT))
CALLS_FLASH = computation("outer", value("y", "call(%x), to_apply=%flash"))
LOOP = "while(%x), condition=%skip, body="


@pytest.mark.parametrize(
    ("expression", "attention", "products"),
    [
        ("conditional(%i, %x, %x), branch_computations={%skip, %flash}", 1, 0),
        ("conditional(%i, %x, %x), true_computation=%dots, false_computation=%skip", 1, 0),
        ("conditional(%i, %x, %x), branch_computations={%skip, %skip}", 0, 0),
        ("call(%x), to_apply=%outer", 1, 0),
        (f"{LOOP}%flash", 1, 0),
        (f"{LOOP}%dots", 1, 0),
        (f"{LOOP}%skip", 0, 0),
        ("fusion(%x), kind=kCustom, calls=%dots", 0, 1),
        ("fusion(%x), kind=kLoop, calls=%skip", 0, 0),
        (DOT, 0, 1),
        (PRODUCT, 0, 1),
        ('custom-call(%x), custom_call_target="__cublas$lt$matmul"', 0, 1),
        ('custom-call(%x), custom_call_target="__cudnn$convForward"', 0, 0),
        ('custom-call(%x), custom_call_target="TopK"', 0, 0),
    ],
)
def test_kernels_are_told_apart(expression, attention, products):
    text = module([START, value("k", expression), DONE], FLASH, SKIP, DOTS, CALLS_FLASH)
    transfer = only(text)
    assert names(transfer.attention) == attention * ["k"]
    assert names(transfer.products) == products * ["k"]


def test_asynchronous_kernel_counts_where_it_starts():
    text = module(
        [
            "%f = ((f32[4,6]), f32[4,6]) fusion-start(%x), kind=kCustom, calls=%dots",
            START,
            "%fd = f32[4,6] fusion-done(%f)",
            DONE,
        ],
        DOTS,
    )
    assert only(text).products == []


def test_wrapped_collectives_are_read_through():
    wrapped = computation("wrapped", value("t", f"all-to-all(%x), {GROUPS}"))
    fused = computation("fused", value("r", f"all-gather(%x), {GROUPS}"), value("s", "negate(%r)"))
    text = module(
        [
            "%a = ((f32[4,6]), f32[4,6], s32[]) async-start(%x), calls=%wrapped",
            value("k", ATTENTION),
            "%au = ((f32[4,6]), f32[4,6], s32[]) async-update(%a), calls=%wrapped",
            value("l", ATTENTION),
            "%ad = f32[4,6] async-done(%au), calls=%wrapped",
            value("f", "fusion(%x), kind=kCustom, calls=%fused"),
        ],
        wrapped,
        fused,
    )
    exchange, gather = collectives(text)
    assert exchange.kind == "all_to_all"
    assert exchange.groups == ((0, 1),)
    assert exchange.received_bytes == 48
    assert names(exchange.attention) == ["k", "l"]
    assert gather.kind == "all_gather"
    assert not gather.asynchronous


INNER = computation("inner", START, value("a", ATTENTION), DONE)


def test_loops_multiply_runs_and_name_their_body():
    outer = computation("outer", START, loop("w", "inner", 3), DONE)
    text = module([loop("v", "outer", 5), START, DONE], NEVER, INNER, outer)
    outside, inside, entry = collectives(text)
    assert [x.computation for x in (entry, outside, inside)] == [ENTRY, "outer", "inner"]
    assert [x.runs for x in (entry, outside, inside)] == [1, 5, 15]
    assert not entry.overlapped
    assert names(outside.attention) == ["w"]
    assert names(inside.attention) == ["a"]


def test_collectives_of_a_branch_are_listed():
    text = module(
        [value("c", "conditional(%i, %x, %x), branch_computations={%inner, %skip}")], INNER, SKIP
    )
    assert only(text).computation == "inner"


def test_last_is_what_no_attention_follows():
    entry = []
    for i, step in enumerate([value("a", ATTENTION), value("b", GRADIENTS), value("c", DOT), ""]):
        entry += [START.replace("%p", f"%p{i}"), f"%d{i} = f32[4,6] collective-permute-done(%p{i})"]
        entry += [step] if step else []
    assert [x.last for x in collectives(module(entry))] == [False, False, True, True]


def test_transfer_that_ends_elsewhere_raises():
    """As in a loop that carries it to its next iteration."""
    body = computation("body", START, value("a", ATTENTION))
    with refused(UnsupportedError, "A collective must"):
        collectives(module([loop("w", "body", 3)], NEVER, body))


COPIES = re.compile("(wrapped_)?(copy|transpose)")
# Keys and values of a device are 32 MiB, more than XLA joins in one message, as in real runs.
SIZES = ["--tokens", "8192", "--heads", "32", "--kv-heads", "8"]
LONG = "Ring Attention, 64"
SETTINGS = {
    "Ring Attention": st.Degrees.ring_attention(8),
    LONG: st.Degrees.ring_attention(64),
    "StarTrail": st.Degrees.startrail(16, c=2),
}


def compiled_for(target, degrees, *flags, options=None):
    """Forward and backward of attention, compiled for `target`: kernels, and hops of the ring."""
    sizes = benchmark.parse_attention([*SIZES, *flags])
    devices = gpu_topology(target, degrees.num_devices).devices
    mesh, lowered = benchmark.lowered_attention(sizes, degrees, devices)
    options = dict(st.compiler_options(mesh)) if options is None else options
    text = lowered.compile(compiler_options=options).as_text()
    roofline = read_roofline(text, GPUS["h100"])
    return roofline.kernels, roofline.hops(mesh)


def ring_bytes(setting, backward):
    """Bytes that a device receives; and with the first gradients in bfloat16, as XLA may."""
    degrees, args = SETTINGS[setting], benchmark.parse_attention(SIZES)
    query = 2 * args.tokens * args.heads * args.head_dim * degrees.team
    keys = 2 * 2 * args.tokens * args.kv_heads * args.head_dim * degrees.group
    # Queries and dout, lse and delta in float32; keys and values. Then their gradients in float32.
    rows = 2 * 4 * args.tokens * args.heads * degrees.team
    travellers, gradients = {
        "query": (2 * query + rows, 2 * query),
        "kv": (keys, 2 * keys),
    }[backward]
    received = (degrees.ring - 1) * (keys + travellers + gradients)
    return received, received - gradients // 2


# StarTrail for every target; of one of them Ring Attention, and a ring so long that it is a loop.
COMPILED = [(target, "StarTrail") for target in target_names()]
COMPILED += [("h100", "Ring Attention"), ("h200", LONG)]


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("backward", ["query", "kv"])
@pytest.mark.parametrize(("target", "setting"), COMPILED)
def test_every_hop_but_the_last_homecoming_is_beneath_attention(target, setting, backward):
    kernels, hops = compiled_for(target, SETTINGS[setting], "--backward", backward)
    exposed = [hop for hop in hops if not hop.overlapped]
    assert [hop.name for hop in exposed if not hop.is_homecoming] == []
    assert 1 <= len(exposed) <= {"query": 1, "kv": 2}[backward]
    assert any(hop.computation != ENTRY for hop in hops) == (setting == LONG)
    # Nothing has been missed: these are all the messages that there must be.
    moved = sum(hop.runs * hop.received_bytes for hop in hops)
    assert moved in ring_bytes(setting, backward)
    # A round slices units at most; it copies none and brings none into another order.
    assert [x.name for x in kernels if COPIES.match(x.name) and x.bytes > 1 << 21] == []


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("backward", ["query", "kv"])
def test_messages_between_inner_cycles_are_beneath_several_kernels(backward):
    """XLA starts a message as early as it takes to hide it, by its own estimate."""
    inner, degrees = 4, st.Degrees.ring_attention(16)
    _, hops = compiled_for("h100", degrees, "--backward", backward, "--inner", str(inner))
    assert all(hop.overlapped for hop in hops if not hop.is_homecoming)
    between = [
        hop for hop in hops if all((target - source) % inner == 0 for source, target in hop.groups)
    ]
    forward, reverse = (
        [len(hop.attention) for hop in between if (BACKWARD in hop.op_name) == is_reverse]
        for is_reverse in (False, True)
    )
    assert forward == [inner] * 3
    assert len(reverse) >= 3
    assert min(reverse) >= 2


@pytest.mark.slow
@needs_gpu_compiler
def test_without_our_compiler_options_hops_are_exposed():
    """Otherwise the test above would show nothing, and `st.compiler_options` could go."""
    degrees = SETTINGS["Ring Attention"]
    _, hops = compiled_for("h100", degrees, "--backward", "kv", options={})
    assert [hop for hop in hops if not hop.overlapped and not hop.is_homecoming]


@pytest.mark.slow
@needs_gpu_compiler
def test_benchmark_prints_the_hops_of_a_layer_and_what_is_beneath(capsys):
    recipe = "llama3_8b --model.layers 1 --target h200 --devices 8 --seq-len 65536 --details"
    mesh = "--mesh.group 2 --mesh.ring 2 --mesh.team 2 --zero 0 --remat none --tile None"
    benchmark.main([*recipe.split(), *mesh.split()])
    title, *rest = capsys.readouterr().out.splitlines()
    assert title == "llama3_8b, 65536 tokens, 8 x h200: group 2, ring 2, team 2; remat none"
    for kind in ("attention", "matrices", "other kernels", "exposed link", "recomputed:"):
        assert any(line.startswith(kind) for line in rest)
    assert any(line.startswith("2 of 3 ring hops are overlapped") for line in rest)
    beneath = [line for line in rest if "beneath" in line]
    assert any("collective_permute, ring" in line and "1 attention" in line for line in beneath)
    assert any("all_reduce, group, ring, team" in line and "products" in line for line in beneath)
    # The projections of keys and values, one by one or joined by XLA.
    assert any(
        "all_gather, team" in line
        and "64.0 MiB" in line
        and ("2 products (8192x1024, 8192x1024)" in line or "1 products (8192x2048)" in line)
        for line in beneath
    )


@pytest.mark.parametrize("flag", ["--memory", "--arithmetic"])
def test_flags_that_would_be_ignored_are_refused(flag, capsys):
    with pytest.raises(SystemExit):
        benchmark.parse_args(["attention", flag])
    assert "are for steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "num_devices", "message"),
    [
        ("b200", 8, r"target must be one of \['a100', 'h100', 'h200'\]; got 'b200'\. "),
        ("h100", 12, r"at most 8 or a multiple of it; got num_devices=12\. "),
        ("h100", 0, r"at most 8 or a multiple of it; got num_devices=0\. "),
    ],
)
def test_devices_that_are_not_described_raise(target, num_devices, message):
    with pytest.raises(ValueError, match=message):
        gpu_topology(target, num_devices)


def test_missing_plugin_raises_and_names_it(monkeypatch):
    monkeypatch.setattr(deviceless, "_PLUGINS", ("jax_plugins.no_such_plugin",))
    with pytest.raises(
        ModuleNotFoundError,
        match=rf"for h100 needs jax-cuda13-pjrt, .*: pip install .*pjrt=={jax.__version__}$",
    ):
        gpu_topology("h100", 8)
