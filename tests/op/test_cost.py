"""Closed forms of the traffic: the paper's and the design's tables, identities, hand counts."""

import math
import re

import jax.numpy as jnp
import numpy as np
import pytest

import startrail_jax as st
from benchmarks import communication as benchmark
from refusals import refused
from startrail_jax.errors import InputError
from startrail_jax.rings.options import Options
from startrail_jax.rings.sizes import Sizes, traveller

pytestmark = pytest.mark.quick

D = st.Degrees
PAPER = {"published": True}


def report(degrees, **options):
    """64 heads and a length that 64 divides; the numbers in units do not depend on them."""
    sizes = {"batch": 1, "seq_len": 7 * degrees.sequence, "heads": 64, "kv_heads": 64}
    return st.communication(degrees, **({"head_dim": 11} | sizes | options))


@pytest.mark.parametrize(
    ("degrees", "units"),
    [(D.ring_attention(64), 126), (D.all_gather(64), 126), (D.ulysses(64), 4 * 63 / 64)],
    ids=str,
)
def test_forward_units_at_64_devices(degrees, units):
    assert report(degrees).forward.units == units


@pytest.mark.parametrize("kv_heads", [64, 16, 1])
@pytest.mark.parametrize("c", [2, 4, 8])
def test_forward_units_follow_the_formulas_of_the_table(c, kv_heads):
    g, p = kv_heads / 64, 64
    published = report(D.startrail(p, c=c), kv_heads=kv_heads, **PAPER).forward.units
    assert published == 2 * (c - 1) + 2 * g * (c - 1) + 2 * g * p / c
    ours = report(D.startrail(p, c=c), kv_heads=kv_heads).forward.units
    assert ours == 2 * (c - 1) + 2 * g * (p / c - 1)
    assert report(D.startrail(p, c=c), kv_heads=kv_heads, causal=False).forward.units == ours
    assert report(D(team=c, ring=p // c), kv_heads=kv_heads).forward.units == ours


@pytest.mark.parametrize("kv_heads", [64, 16, 4])
def test_no_tiling_without_head_splitting_beats_the_bound(kv_heads):
    g, p = kv_heads / 64, 64
    bound = 4 * math.sqrt(g * p) - 2 - 2 * g
    sizes = [1, 2, 4, 8, 16, 32, 64]
    settings = [D(team=a, ring=r, group=p // (a * r)) for a in sizes for r in sizes if a * r <= p]
    units = [report(degrees, kv_heads=kv_heads).forward.units for degrees in settings]
    assert min(units) == bound


def test_hop_of_the_backward_ring_in_units():
    """4A and 6gG at 16 bits, 3A and 4gG at 32, as the schedule states."""
    g = 16 / 64
    for dtype, query, kv in (("bfloat16", 4 * 2, 6 * g * 4), ("float32", 3 * 2, 4 * g * 4)):
        for mode, units in (("query", query), ("kv", kv)):
            options = {"kv_heads": 16, "dtype": dtype, "backward": mode}
            found = [report(D(group=4, ring=r, team=2), **options).backward.units for r in (2, 3)]
            assert found[1] - found[0] == units


def test_startrail_forward_counted_by_hand():
    """8 devices, C = 2: 3 tokens, 2 heads, 1 key head of 5 channels each, in bfloat16."""
    result = st.communication(
        D.startrail(8, c=2), batch=1, seq_len=24, heads=2, kv_heads=1, head_dim=5, packed=True
    )
    query, key, lse, ids = 3 * 2 * 5 * 2, 3 * 1 * 5 * 2, 3 * 2 * 4, 3 * 4
    assert result.forward.unit_bytes == query
    assert result.forward.by_collective == {
        "all_gather": query + ids + 2 * key + ids,
        "all_reduce": 0,
        "all_to_all": query + lse,
        "collective_permute": 2 * (2 * key + ids),
        "reduce_scatter": 0,
    }
    assert result.forward.row_bytes == lse + ids * (1 + 1 + 2)
    assert result.backward_mode == "kv"
    assert result.backward.by_collective == {
        "all_gather": 2 * query + 2 * lse + ids + 2 * key + ids,
        "all_reduce": 0,
        "all_to_all": 0,
        "collective_permute": 2 * (2 * key + ids) + 2 * 4 * key,
        "reduce_scatter": 2 * query + 4 * key,
    }


def test_gradients_of_copied_key_heads_are_sent_in_float32():
    """They are yet to be summed over the copies, and are rounded once."""
    sizes = {"batch": 1, "seq_len": 16, "heads": 4, "head_dim": 5, "dtype": "bfloat16"}
    degrees = D(group=2, ring=2, head=4)
    whole, copied = (st.communication(degrees, kv_heads=n, **sizes).backward for n in (4, 1))
    query = key = 4 * 5 * 2
    # Exchanges of dout and dq, and of dk and dv.
    assert whole.by_collective["all_to_all"] == 3 * (2 * query + 2 * key) // 4
    assert copied.by_collective["all_to_all"] == 3 * (2 * query + 2 * 2 * key) // 4


def test_printed_communication_is_a_table():
    found = report(D.startrail(8, c=2), kv_heads=8, devices_per_node=4)
    head, *rows = str(found).splitlines()
    assert head.split() == ["pass", "step", "collective", "axes", "bytes", "received", "units"]
    for name in ("forward", "backward"):
        traffic = getattr(found, name)
        mine = [row for row in rows if row.startswith(name)]
        assert len(mine) == len(traffic.transfers) + 1
        for row, transfer in zip(mine, traffic.transfers, strict=False):
            assert re.search(rf"  {transfer.step} +{transfer.collective} ", row)
            assert row.split()[-2] == f"{transfer.received_bytes:,}"
        assert mine[-1].split()[1:] == [
            "all",
            f"{traffic.received_bytes:,}",
            f"{traffic.units:.2f}",
        ]
    (total,) = [row for row in rows if row.startswith("total")]
    assert f" {found.total.received_bytes:,} " in total
    assert len({len(row) for row in rows if row.split()[0] in ("forward", "backward")}) == 1
    (port,) = [row for row in rows if "ports of a node, total" in row]
    assert f"{found.total.nodes.port_sent_bytes:,} bytes sent" in port
    assert "keys and values and their gradients go round the ring" in rows[-2]
    assert rows[-1].endswith("data, group, ring, team, head, tensor.")
    assert max(map(len, rows)) <= 120
    alone = str(report(D())).splitlines()
    assert [row.split()[1:3] for row in alone[1:4]] == [["all", "0"]] * 3
    assert len(alone) == 5


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kv_heads", [64, 32, 8, 1])
@pytest.mark.parametrize("degrees", [D.startrail(16, c=2), D(ring=4, team=4), D(group=4, ring=4)])
def test_auto_backward_is_the_cheaper_one(degrees, kv_heads, dtype, packed):
    options = {"kv_heads": kv_heads, "dtype": dtype, "packed": packed, "value_head_dim": 13}
    auto, query, kv = (report(degrees, **options, backward=b) for b in ("auto", "query", "kv"))
    least = min(query.backward.received_bytes, kv.backward.received_bytes)
    assert auto.backward.received_bytes == least
    assert (query.backward_mode, kv.backward_mode) == ("query", "kv")


def share(key_tokens, head_dim):
    """One head in float32, 5 query tokens."""
    sizes = dict(batch=1, query_tokens=5, key_tokens=key_tokens, heads=1, kv_heads=1)
    head_dims = dict(head_dim=head_dim, value_head_dim=head_dim)
    return Sizes(**sizes, **head_dims, dtype="float32", packed=False)


def test_the_query_travels_at_a_tie():
    # query: 12 + 12 + 12 + 8 bytes a token; kv: 48.
    assert traveller(Options(), share(5, 3), team=1, group=1) == "query"
    # 8 + 8 + 8 + 8 bytes against 32.
    assert traveller(Options(), share(5, 2), team=1, group=1) == "query"
    assert traveller(Options(), share(4, 2), team=1, group=1) == "kv"
    # The paper has only queries that travel.
    assert traveller(Options(published=True), share(4, 2), team=1, group=1) == "query"
    assert traveller(Options(published=True, backward="kv"), share(4, 2), team=1, group=1) == "kv"


@pytest.mark.parametrize("dtype", [jnp.float32, np.dtype("float32"), np.float32])
def test_dtype_objects_are_read_by_name(dtype):
    named = report(D.ring_attention(8), dtype="float32")
    assert report(D.ring_attention(8), dtype=dtype) == named
    assert report(D.ring_attention(8), dtype=jnp.bfloat16).forward.units == named.forward.units


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"published": "so"}, "published='so'"),
        ({"gradient_dtype": "float16"}, "'float16'"),
        ({"backward": "both"}, "backward='both'"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"batch": 3}, "batch=3"),
        ({"seq_len": 70}, "seq_len=70"),
        ({"seq_len": 4}, "seq_len=4"),
        ({"key_len": 8, "causal": False}, "seq_len=8"),
        ({"heads": 2}, "tensor=2"),
        ({"kv_heads": 3}, "kv_heads=3"),
        ({"heads": 12, "kv_heads": 6}, "kv_heads"),
        ({"head_dim": 0}, "head_dim=0"),
        ({"value_head_dim": -1}, "value_head_dim"),
        ({"batch": 2.0}, "batch=2.0"),
        ({"inner": 4}, "inner=4"),
        ({"head_chunks": 3}, "head_chunks=3"),
        ({"published": True}, "group=4"),
        ({"key_len": 32}, "32 keys"),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_bad_argument_raises(options, named):
    degrees = D(data=2, group=4, ring=2, head=2, tensor=2)
    with refused(InputError, named):
        report(degrees, **({"batch": 2, "seq_len": 16} | options))


def lines_of(capsys, *argv):
    benchmark.main(list(argv))
    return capsys.readouterr().out.splitlines()


def test_benchmark_prints_every_row_of_the_scheme_table(capsys):
    lines = lines_of(capsys, "--devices", "64", "--heads", "64")

    def units(start, *degrees):
        """The three columns of units on the line of this scheme and these degrees."""
        rows = [line.rsplit(maxsplit=8) for line in lines if line.startswith(start)]
        return [float(cell) for row in rows if row[1:5] == [*degrees] for cell in row[5:8]]

    assert units("Ring Attention ", "64", "1", "1", "1") == [126, 252, 378]
    assert units("StarTrail as published ", "4", "4", "4", "1")[0] == 44
    assert units("StarTrail as published ", "1", "8", "8", "1")[0] == 44
    assert units("StarTrail  ", "4", "4", "4", "1")[0] == 36
    assert units("StarTrail  ", "1", "8", "8", "1")[0] == 28
    assert units("teams, group 1 ", "8", "1", "8", "1")[0] == 28
    for scheme in ("all-gather context", "Ulysses", "LoongTrain", "2-D tiles", "StarTrail x Uly"):
        assert any(line.startswith(scheme) for line in lines)
    assert not any("must" in line for line in lines)


def test_benchmark_gives_the_reason_for_a_row_that_is_impossible(capsys):
    options = ("--devices", "6", "--heads", "4", "--seq-len", "12", "--head-ratio", "4")
    text = "\n".join(lines_of(capsys, *options, "--full"))
    assert re.search(r"Ulysses +1 +1 +1 +6  heads must be divisible", text)
    assert "'causal': False" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seq-len", "100"], "--seq-len 100 must be a positive multiple of 128"),
        (["--heads", "6", "--head-ratio", "4"], "--heads 6 must be a positive multiple of 4"),
    ],
)
def test_benchmark_refuses_sizes_that_do_not_divide(capsys, argv, message):
    with pytest.raises(SystemExit):
        benchmark.main(argv)
    assert message in capsys.readouterr().err


def test_benchmark_names_the_fewest_bytes_of_all_settings(capsys):
    """The scheme table has no row for head 32, team 2, group 2."""
    options = ("--devices", "128", "--heads", "32", "--seq-len", "1048576")
    lines = lines_of(capsys, *options)
    (fewest,) = [line for line in lines if line.startswith("fewest bytes of all 116 settings")]
    degrees = D(head=32, team=2, group=2)
    sizes = dict(batch=1, seq_len=1048576, heads=32, kv_heads=32, head_dim=128, dtype="bfloat16")
    size = st.communication(degrees, **sizes, layout="zigzag").total.received_bytes / 1e6
    assert fewest.endswith(f": ring 1, group 2, team 2, head 32, {size:.1f} MB")
