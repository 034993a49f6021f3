"""Schemes by name, their bytes and errors, and a run of several processes on emulated nodes."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

import startrail_jax as st
from benchmarks import cluster, schemes
from refusals import refused
from startrail_jax.devices.degrees import Degrees
from startrail_jax.errors import InputError
from startrail_jax.traffic.settings import legal_degrees

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "degrees", "options"),
    [
        ("ring", Degrees(ring=16), {}),
        ("all-gather", Degrees(group=16), {}),
        ("ulysses", Degrees(head=16), {}),
        ("head-4", Degrees(ring=4, head=4), {}),
        ("startrail-2", Degrees(group=2, ring=4, team=2), {}),
        ("published-4", Degrees(group=4, team=4), {"published": True}),
        ("team-8", Degrees(ring=2, team=8), {}),
        ("group=2,ring=2,team=4", Degrees(group=2, ring=2, team=4), {}),
        ("ring:layout=contiguous,inner=2", Degrees(ring=16), {"layout": "contiguous", "inner": 2}),
    ],
)
def test_scheme_is_read(text, degrees, options):
    scheme = schemes.read_scheme(text, 16)
    assert (scheme.name, scheme.degrees, scheme.options) == (text, degrees, options)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (f"ring:{x}", f"Options of a scheme must be values of inner, .*; got '{x}'")
            for x in ("", "inner", "inner=x", "scale=2", "inner=2,inner=4")
        ),
        ("rings", "A scheme must be every, degrees, or one of ring, .*; got 'rings'"),
        ("head", "A scheme must be .*; got 'head'"),
        ("ring-4", "A scheme must be .*; got 'ring-4'"),
        ("team-3", "product of the degrees .* got team-3, which has 15, for 16 devices"),
        ("ring=4,team=2", "product of the degrees .* got ring=4,team=2, which has 8"),
        ("ring=4,tensor=4", "Degrees of a scheme must be values of ring, group, team, head"),
        ("ring=4,ring=4", "Degrees of a scheme must be .* at most once"),
    ],
)
def test_unknown_scheme_raises(text, message):
    with pytest.raises(InputError, match=message):
        schemes.read_scheme(text, 16)


def test_every_scheme_is_each_legal_setting_once_for_each_place_of_its_axes():
    call = dict(batch=1, seq_len=256, heads=8, kv_heads=8, mask=st.masks.Causal())
    found = {x.name: x for x in schemes.every_scheme([0, 0, 1, 1, 2, 2, 3, 3], call)}
    legal = legal_degrees(8, **call)
    assert {x.degrees for x in found.values()} == set(legal)
    assert {"r8@r", "r8i2@r", "r8i4@r", "r2t4@rt", "r2t4@tr", "r4h2i2@rh"} <= {*found}
    assert found["r8i4@r"].options == {"inner": 4}
    assert found["r2t4@tr"].order.index("team") < found["r2t4@tr"].order.index("ring")
    # On one device a node, no order changes which devices share one.
    alone = [x.name.partition("i")[0] for x in schemes.every_scheme(range(8), call)]
    assert len({x.partition("@")[0] for x in alone}) == len(legal)


def test_table_shows_medians_and_what_is_wrong():
    ring = schemes.Scheme("ring", Degrees(ring=2), expected=2e6, error=1e-7)
    ring.seconds, ring.received = [2.0, 1.0, 3.0], [2.04e6] * 3
    team = schemes.Scheme("team-2", Degrees(team=2), expected=1e6, error=1e-3)
    team.seconds, team.received = [1.0], [math.nan]
    lines = schemes.table([ring, team], 2e-6)[2:]
    assert lines == [
        "| ring | 2.000 | 100% | 1.00 | 2.040 | 2.000 | 1.0e-07 |",
        "| team-2 | 1.000 | 0% | 2.00 | nan | 1.000 | 1.0e-03 WRONG |",
    ]


@pytest.mark.slow
def test_bytes_and_seconds_on_emulated_nodes_are_those_expected():
    """Two half-duplex ports: each byte that one node receives, the other one sends."""
    if why := cluster.refusal():
        pytest.skip(f"needs network namespaces: {why}")
    flags = "--nodes 2 --devices 2 --port 20Mbit/s --"
    command = "benchmarks/schemes.py ring ulysses --seq-len 256 --heads 8 --head-dim 32 --rounds 2"
    done = subprocess.run(
        [sys.executable, "benchmarks/cluster.py", *flags.split(), sys.executable,
         *command.split(), "--distributed"],
        cwd=ROOT, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| ([a-z]+) \| ([\d.]+) .*", done.stdout, re.MULTILINE)
    assert [name for name, _ in rows] == ["ring", "ulysses"]
    for line in re.findall(r"^\| (?:ring|ulysses) \|.*", done.stdout, re.MULTILINE):
        _, seconds, _, _, counted, expected, error = line.strip("| ").split(" | ")
        assert float(counted) == pytest.approx(float(expected), rel=0.1)
        # The ports let no more through.
        assert float(seconds) > 0.85 * 2 * float(expected) * 8 / 20
        assert 0 < float(error) < 2e-6


def test_sizes_that_the_devices_do_not_divide_raise():
    with refused(InputError, "2 * sequence degree", len=100):
        args = schemes.parse_args(["ring", "--seq-len", "100"])
        schemes.Problem(args, [0] * 16).prepare(schemes.read_scheme("ring", 16))
