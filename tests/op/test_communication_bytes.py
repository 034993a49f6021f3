"""The closed form of `st.communication` equals what compiled programs receive, byte for byte."""

import functools
import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import startrail_jax as st
from attention_cases import OPTIONS, host_mesh, make_attention, one_axis, or_causal
from startrail_jax.analysis.hlo import read_traffic
from startrail_jax.analysis.messages import read_messages
from startrail_jax.devices.nodes import ORDERS, node_grid, nodes_of
from startrail_jax.rings.residuals import CHECKPOINT_NAMES
from startrail_jax.traffic.ports import messages

# Nothing is executed here, and machine code takes most of the time to compile.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}
# XLA's CPU compiler of jax 0.10.2 drops the barriers by which jax.checkpoint keeps it from merging
# what is recomputed with what it repeats.
KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
# It also sends bfloat16 as float32, unless it is kept from that.
SEND_BFLOAT16 = {"xla_disable_hlo_passes": "float-normalization-bf16"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One attention call, small: two tokens per device, prime channel counts."""

    degrees: st.Degrees
    heads: int = 2
    kv_heads: int = 2
    causal: bool | None = None
    mask: st.masks.Mask | None = None
    published: bool = False
    backward: str = "auto"
    inner: int = 1
    head_chunks: int = 1
    keep_gathered: bool = False
    gradient_dtype: str = "float32"
    exchange: str = "rings"
    balance: str = "layout"
    tokens: int = 2
    layout: str | None = None
    window: int | None = None
    packed: bool = False
    trees: bool = False
    cross: bool = False
    batch: int = 1
    head_dim: int = 5
    value_head_dim: int = 3
    one_axis: bool = False

    @property
    def seq_len(self):
        return self.tokens * self.degrees.sequence

    @property
    def key_len(self):
        return 3 * self.degrees.sequence if self.cross else self.seq_len

    @functools.cached_property
    def attention(self):
        names = (*OPTIONS, "causal", "mask", "layout", "window")
        options = {name: getattr(self, name) for name in names}
        if self.one_axis:
            options |= one_axis(self.degrees)
            return st.Attention(host_mesh(self.degrees), **or_causal(options))
        return make_attention(self.degrees, "explicit", **options)

    def expected(self, **nodes):
        names = (
            "batch",
            "seq_len",
            "heads",
            "kv_heads",
            "head_dim",
            "value_head_dim",
            "packed",
            "trees",
        )
        return st.communication(
            self.degrees,
            dtype="float32",
            mask=self.attention.resolved_mask,
            layout=self.attention.layout,
            key_len=self.key_len if self.cross else None,
            **{name: getattr(self, name) for name in (*names, *OPTIONS)},
            **nodes,
        )

    def arguments(self):
        """Query, key, value, segment ids and the cotangent of the output, as shapes."""
        attention = self.attention

        def struct(spec, dtype, *shape):
            sharding = NamedSharding(attention.mesh, spec)
            return jax.ShapeDtypeStruct((self.batch, *shape), dtype, sharding=sharding)

        query_spec, key_spec = attention.query_spec(self.heads), attention.key_spec(self.kv_heads)
        query = struct(query_spec, jnp.float32, self.seq_len, self.heads, self.head_dim)
        key = struct(key_spec, jnp.float32, self.key_len, self.kv_heads, self.head_dim)
        value = struct(key_spec, jnp.float32, self.key_len, self.kv_heads, self.value_head_dim)
        dout = struct(query_spec, jnp.float32, self.seq_len, self.heads, self.value_head_dim)
        lengths = (self.seq_len, self.key_len) if self.cross else (self.seq_len,)
        ids = [struct(attention.sequence_spec, jnp.int32, length) for length in lengths]
        return query, key, value, ids if self.packed or self.trees else [], dout

    def attend(self, query, key, value, ids):
        if self.trees:
            return self.attention(query, key, value, visible_until=ids[0])
        segment_ids = tuple(ids) if len(ids) == 2 else ids[0] if ids else None
        return self.attention(query, key, value, segment_ids=segment_ids)


def compiled_text(function, *arguments, **options):
    return jax.jit(function).lower(*arguments).compile(COMPILER_OPTIONS | options).as_text()


def forward_and_backward(attend):
    """Output and gradients for a given cotangent: no loss adds collectives of its own."""

    def both(query, key, value, ids, dout):
        out, transpose = jax.vjp(lambda *inputs: attend(*inputs, ids), query, key, value)
        return out, transpose(dout)

    return both


D = st.Degrees
PAPER = {"published": True}
GQA = {"heads": 8, "kv_heads": 2}
MQA = {"heads": 4, "kv_heads": 1}
FULL = {"causal": False}
KV = {"backward": "kv"}
QUERY = {"backward": "query"}
KEPT = {"keep_gathered": True}
BFLOAT16 = {"gradient_dtype": "bfloat16"}

SCHEMES = {
    "ring, 8": Setting(degrees=D.ring_attention(8)),
    "all-gather, 12": Setting(degrees=D.all_gather(12), **GQA),
    "Ulysses, 8": Setting(degrees=D.ulysses(8), heads=8, kv_heads=8),
    "LoongTrain, 12": Setting(degrees=D.loongtrain(12, head=2), **GQA, **KV),
    "published, 16": Setting(degrees=D.startrail(16, c=4), **PAPER),
    "StarTrail, 8": Setting(degrees=D.startrail(8, c=2), **QUERY),
    "StarTrail, 16": Setting(degrees=D.startrail(16, c=2), **MQA),
    "teams, 8": Setting(degrees=D(ring=4, team=2)),
    "teams, 12": Setting(degrees=D(ring=3, team=4), **MQA, **KV),
    "tiles, 8": Setting(degrees=D(team=2, group=4), **GQA),
    "StarTrail x Ulysses, 16": Setting(degrees=D.startrail(16, c=2, head=2)),
}
"""Every row of the scheme table, on 8, 12 or 16 devices."""

LARGE = {
    "ring, 64, kv, packed": Setting(degrees=D.ring_attention(64), packed=True, **MQA, **KV),
    "StarTrail, 64": Setting(degrees=D.startrail(64, c=4), **GQA),
    "StarTrail x Ulysses, 64": Setting(degrees=D.startrail(64, c=4, head=4), **GQA),
    "all axes, 64": Setting(
        degrees=D(data=2, group=2, ring=2, team=2, head=2, tensor=2), **GQA, batch=2, packed=True
    ),
}
"""64 devices; a long ring is a loop in the program."""

MIXED = {
    # Degrees that differ, odd degrees.
    "2, 3, 2": Setting(degrees=D(group=2, ring=3, team=2), **GQA),
    "3, 2, 2": Setting(degrees=D(group=3, ring=2, team=2), **KV),
    "2, 2, 3, full": Setting(degrees=D(group=2, ring=2, team=3), **FULL, **QUERY),
    "4, 2, 2, packed": Setting(degrees=D(group=4, ring=2, team=2), packed=True, **GQA),
    "published, kv": Setting(degrees=D.startrail(12, c=2), **PAPER, **KV, **GQA),
    "published, full, packed": Setting(
        degrees=D.startrail(8, c=2), packed=True, **PAPER, **FULL, **QUERY
    ),
    "published, packed": Setting(degrees=D.startrail(8, c=2), packed=True, **PAPER),
    # Key heads replicated over head, over tensor, over both.
    "Ulysses, MQA": Setting(degrees=D.ulysses(4), packed=True, **MQA),
    "head 4, 2 key heads": Setting(degrees=D(ring=2, head=4), **GQA),
    "tensor 2": Setting(degrees=D(group=2, ring=2, team=2, tensor=2), packed=True, **GQA),
    "tensor 3, MQA": Setting(degrees=D(ring=2, tensor=3), heads=3, kv_heads=1, batch=2),
    "head 2, tensor 2, MQA": Setting(
        degrees=D(team=2, ring=2, head=2, tensor=2), **MQA, packed=True, **KV
    ),
    "head 3, tensor 4, 6 key heads": Setting(degrees=D(head=3, tensor=4), heads=12, kv_heads=6),
    # The rest of the public options.
    "data 2": Setting(degrees=D(data=2, group=2, team=2), batch=4, head_dim=3),
    "cross-attention": Setting(
        degrees=D(group=2, ring=2, team=2, head=2), **GQA, **FULL, packed=True, cross=True
    ),
    "window": Setting(degrees=D(ring=4, team=2), layout="contiguous", window=3, **KV),
    "window, 16": Setting(degrees=D(ring=8, team=2), layout="contiguous", window=4, **QUERY),
    # Double rings.
    "double ring": Setting(degrees=D(ring=8), inner=4, **GQA, **KV),
    "double ring, teams": Setting(degrees=D(group=2, ring=4, team=2), inner=2, **QUERY),
    "double ring, loop": Setting(degrees=D(ring=24), inner=2, packed=True, **KV),
    "double ring, window": Setting(
        degrees=D(ring=8), inner=2, layout="contiguous", window=5, **QUERY
    ),
    # Masks that need rounds at both ends of the ring.
    "both sides": Setting(
        degrees=D(ring=8), layout="contiguous", mask=st.masks.Window(3, 1), **QUERY
    ),
    "chunks, double ring": Setting(degrees=D(ring=8), inner=2, mask=st.masks.Chunked(6), **KV),
    # Heads in parts, which send segment ids more often.
    "parts": Setting(
        degrees=D(group=2, ring=2, team=2), heads=8, kv_heads=4, head_chunks=4, packed=True, **QUERY
    ),
    "parts, kv": Setting(
        degrees=D(ring=2, team=2, head=2), heads=8, kv_heads=4, head_chunks=2, packed=True, **KV
    ),
    "parts, ring": Setting(degrees=D(ring=4), head_chunks=2, packed=True, **QUERY),
    # Units that are kept, gradients that travel in bfloat16.
    "kept": Setting(degrees=D(group=2, ring=2, team=2, head=2), packed=True, **GQA, **KEPT),
    "kept, published": Setting(degrees=D.startrail(8, c=2), **PAPER, **KEPT),
    "kept, cross": Setting(degrees=D(team=2, group=4), packed=True, cross=True, **FULL, **KEPT),
    "bfloat16": Setting(degrees=D(group=2, ring=3, team=2), **GQA, **BFLOAT16),
    "bfloat16, query": Setting(degrees=D(ring=4, team=2), **QUERY, **BFLOAT16, **KEPT),
    "bfloat16, published": Setting(degrees=D.startrail(16, c=2), **PAPER, **BFLOAT16),
    "bfloat16, copies": Setting(degrees=D(ring=2, head=2, tensor=2), **MQA, **KV, **BFLOAT16),
}

M = st.masks
SPARSE = {"exchange": "sparse", "tokens": 12}
ONLY_SEEN = {
    "seen: window, zigzag": Setting(degrees=D.startrail(8, c=2), window=5, packed=True, **SPARSE),
    "seen: window, contiguous": Setting(
        degrees=D(ring=4, head=2), window=5, layout="contiguous", **GQA, **SPARSE
    ),
    "seen: wider than a slice": Setting(degrees=D(ring=3, team=2), window=20, **SPARSE, **KEPT),
    "seen: both sides, bfloat16": Setting(
        degrees=D(ring=6), mask=M.Window(4, 2), **SPARSE, **BFLOAT16
    ),
    "seen: sinks, tensor 2": Setting(
        degrees=D(data=2, group=2, ring=2, team=2, tensor=2), batch=2, **GQA, **SPARSE, packed=True,
        mask=M.Causal() & (M.Window(3, 0) | M.Sinks(2)), head_chunks=1,
    ),
    "seen: chunks, parts": Setting(
        degrees=D(ring=6), mask=M.Chunked(17) & M.Causal(), heads=8, kv_heads=4, head_chunks=2,
        packed=True, **SPARSE,
    ),
    "seen: two devices, copies": Setting(
        degrees=D(team=2, tensor=2), window=5, layout="contiguous", **MQA, **SPARSE, **BFLOAT16
    ),
    "seen: 64": Setting(degrees=D.startrail(64, c=4), window=6, **GQA, **SPARSE),
}  # fmt: skip
"""Only the keys that a mask shows are sent."""

EXCHANGED = {"layout": "contiguous", "balance": "exchange"}
BALANCED = {
    "balanced: ring": Setting(degrees=D(ring=8), packed=True, **EXCHANGED),
    "balanced: two devices": Setting(degrees=D(ring=2), **EXCHANGED, **MQA),
    "balanced: StarTrail, 8": Setting(degrees=D.startrail(8, c=2), **EXCHANGED, **QUERY),
    "balanced: Ulysses, MQA": Setting(degrees=D(head=4, team=2), **MQA, **EXCHANGED),
    "balanced: data, tensor, copies": Setting(
        degrees=D(data=2, ring=3, head=2, tensor=2), batch=2, packed=True, **MQA, **EXCHANGED
    ),
    "balanced: all-gather, kept": Setting(degrees=D.all_gather(6), **KEPT, **EXCHANGED),
    "balanced: wide window": Setting(degrees=D(ring=8), window=10, **EXCHANGED),
}
"""Tokens in contiguous order that are attended in zigzag order."""

TREES = {
    "trees: StarTrail": Setting(degrees=D.startrail(8, c=2), trees=True, **GQA, **QUERY),
    "trees: balanced": Setting(degrees=D(head=2, ring=4), trees=True, **GQA, **EXCHANGED),
    "trees: window, ring": Setting(degrees=D(ring=8), window=5, trees=True, **KV),
    "trees: window, all axes": Setting(
        degrees=D(data=2, group=2, ring=2, team=2, head=2, tensor=2), window=5, **GQA, batch=2,
        trees=True, exchange="auto",
    ),
    "trees: window, balanced": Setting(
        degrees=D(ring=4, team=2), window=5, trees=True, **GQA, **EXCHANGED
    ),
}  # fmt: skip
"""Rows of trees; with a window, each token has its place in its branch too."""

SETTINGS = SCHEMES | LARGE | MIXED | ONLY_SEEN | BALANCED | TREES
# The forward pass apart, once for every way in which it sends something.
FORWARD = {
    name: SETTINGS[name]
    for name in (
        "all-gather, 12",
        "LoongTrain, 12",
        "published, 16",
        "teams, 12",
        "ring, 64, kv, packed",
        "all axes, 64",
        "seen: window, contiguous",
        "seen: sinks, tensor 2",
        "seen: chunks, parts",
        "seen: two devices, copies",
        "balanced: data, tensor, copies",
        "trees: window, all axes",
    )
}


@pytest.mark.slow_except_every(12)
@pytest.mark.parametrize("setting", FORWARD.values(), ids=FORWARD)
def test_forward_receives_the_closed_form(setting):
    *arguments, _ = setting.arguments()
    traffic = read_traffic(compiled_text(setting.attend, *arguments))
    assert traffic.by_collective == setting.expected().forward.by_collective


@pytest.mark.slow_except_every(31)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_forward_and_backward_receive_the_closed_form(setting):
    options = SEND_BFLOAT16 if setting.gradient_dtype == "bfloat16" else {}
    text = compiled_text(forward_and_backward(setting.attend), *setting.arguments(), **options)
    degrees, total = setting.degrees, setting.expected().total
    assert read_traffic(text).by_collective == total.by_collective

    # Who sends it to whom: from this follow the bytes through every port, in every order.
    counted = read_messages(text)
    np.testing.assert_array_equal(counted.matrix, messages(degrees, total.transfers).matrix)
    for order, size in itertools.product(ORDERS, {2, degrees.num_devices // 2}):
        grid = node_grid(degrees, ORDERS[order], nodes_of(range(degrees.num_devices), size))
        expected = setting.expected(order=order, devices_per_node=size).total.nodes
        assert counted.through(grid.ravel()) == expected


@pytest.mark.slow_except_every(64)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_one_axis_receives_what_several_do(setting):
    options = SEND_BFLOAT16 if setting.gradient_dtype == "bfloat16" else {}
    total, layout = setting.expected().total, setting.attention.layout.kind
    setting = replace(setting, one_axis=True, layout=layout)
    text = compiled_text(forward_and_backward(setting.attend), *setting.arguments(), **options)
    traffic = read_traffic(text)
    assert traffic.received_bytes == total.received_bytes
    if not setting.published:  # Otherwise two steps stand for each all_reduce.
        assert traffic.by_collective == total.by_collective
        matrix = messages(setting.degrees, total.transfers).matrix
        np.testing.assert_array_equal(read_messages(text).matrix, matrix)


def test_window_visits_fewer_rounds():
    """Otherwise the settings with a window would show nothing."""
    for name in ("window", "window, 16", "both sides", "chunks, double ring"):
        setting = SETTINGS[name]
        assert setting.attention.num_rounds(setting.seq_len) < setting.degrees.ring


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "saved"),
    [("StarTrail, 8", True), ("StarTrail, 8", False), ("kept, published", True)],
    ids=["saved", "recomputed", "kept"],
)
def test_remat_repeats_attention_only_if_its_outputs_are_not_saved(name, saved):
    """Under a policy that saves out and lse, rematerialisation costs no communication."""
    setting = SETTINGS[name]
    policy = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES) if saved else None
    attend = jax.checkpoint(setting.attend, policy=policy)
    both = forward_and_backward(attend)
    traffic = read_traffic(compiled_text(both, *setting.arguments(), **KEEP_BARRIERS))
    report = setting.expected()
    repeated = 0 if saved else report.forward.received_bytes
    assert traffic.received_bytes == report.total.received_bytes + repeated


FIGURE = {
    "Wan 14B": dict(seq_len=75_776, heads=40, kv_heads=40, mask=st.masks.Full()),
    "Llama 3 8B": dict(seq_len=1 << 20, heads=32, kv_heads=8, mask=st.masks.Causal(),
                       layout="zigzag"),
}  # fmt: skip


def test_figure_of_the_first_page_has_the_fewest_bytes():
    page = (Path(__file__).parents[2] / "docs/bytes.svg").read_text()
    points = re.findall(r"<title>(.*), (\d+) GPUs, (.*): ([\d.,]+) MiB \((.*)\)</title>", page)
    assert len(points) == 2 * 3 * 7
    for model, count, scheme, shown, degrees in points:
        count, (name, *_) = int(count), scheme.split()

        def mib(degrees, model=model):
            call = dict(batch=1, head_dim=128, dtype="bfloat16", **FIGURE[model])
            return st.communication(degrees, **call).total.received_bytes / 2**20

        named = (x.rsplit(" ", 1) for x in degrees.split(", "))
        least = mib(st.Degrees(**{role: int(degree) for role, degree in named}))
        assert f"{least:,.1f}" == shown
        for head, group, team in itertools.product([2**i for i in range(10)], repeat=3):
            used = head * group * team
            ours = name == "StarTrail" or (group == team == 1 and (name == "USP" or head == 1))
            if ours and count % used == 0 and FIGURE[model]["heads"] % head == 0:
                other = dict(head=head, group=group, team=team, ring=count // used)
                assert mib(st.Degrees(**other)) >= least
