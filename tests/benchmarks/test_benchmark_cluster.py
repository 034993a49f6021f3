"""The benchmark of a cluster: its words, its table, and measurements in one process."""

import math
from types import SimpleNamespace

import jax
import pytest

from benchmarks.cluster import rounds as cluster_rounds
from benchmarks.cluster import run as cluster
from benchmarks.cluster.settings import ClusterSettings
from benchmarks.schemes import read_scheme
from refusals import refused
from startrail_jax.devices.degrees import Degrees
from startrail_jax.errors import InputError
from trainer.config import MeshConfig
from trainer.parallel.degrees import choose_degrees


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (dict(rounds=0), "rounds=0"),
        (dict(schemes=()), "schemes must name one at least"),
        (dict(window=5, causal=False), "window=5"),
    ],
)
def test_setting_that_is_none_is_refused(wrong, named):
    with refused(InputError, named):
        ClusterSettings(**wrong)


@pytest.mark.parametrize(
    ("text", "degrees", "published"),
    [
        ("ring", Degrees(ring=16), False),
        ("all-gather", Degrees(group=16), False),
        ("ulysses", Degrees(head=16), False),
        ("head-4", Degrees(ring=4, head=4), False),
        ("startrail-2", Degrees(group=2, ring=4, team=2), False),
        ("published-4", Degrees(group=4, team=4), True),
        ("team-8", Degrees(ring=2, team=8), False),
        ("group=2,ring=2,team=4", Degrees(group=2, ring=2, team=4), False),
    ],
)
def test_scheme_is_read(text, degrees, published):
    scheme = read_scheme(text, 16)
    assert (scheme.name, scheme.degrees) == (text, degrees)
    assert scheme.options == ({"published": True} if published else {})


def test_scheme_has_the_options_in_its_name():
    scheme = read_scheme("published-2:inner=2,gradient_dtype=bfloat16,exchange=rings", 16)
    assert scheme.degrees == Degrees(group=2, ring=4, team=2)
    assert scheme.options == {
        "published": True, "inner": 2, "gradient_dtype": "bfloat16", "exchange": "rings"
    }  # fmt: skip
    scheme = read_scheme("ring:layout=contiguous,balance=exchange", 16)
    assert scheme.options == {"layout": "contiguous", "balance": "exchange"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (f"ring:{x}", rf"Options of a scheme must be .*; got '{x}'")
            for x in ("", "inner", "inner=x", "scale=2", "inner=2,inner=4")
        ),
        ("rings", r"A scheme must be one of ring, .*; got 'rings'"),
        ("head", r"A scheme must be one of .*; got 'head'"),
        ("ring-4", r"A scheme must be one of .*; got 'ring-4'"),
        ("team-3", r"product of the degrees .* got team-3, which has 15, for 16 devices"),
        ("startrail-3", r"c\^2 must divide the sequence degree; got c=3"),
        ("ring=4,team=2", r"product of the degrees .* got ring=4,team=2, which has 8"),
        ("ring=4,tensor=4", r"Degrees of a scheme must be values of ring, group, team, head"),
        ("ring=4,ring=4", r"Degrees of a scheme must be .* at most once"),
    ],
)
def test_scheme_that_is_none_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        read_scheme(text, 16)


def test_default_of_train_py_follows_the_heads_and_the_nodes():
    for kv_heads, nodes in ((16, 16), (4, 4), (4, 1)):
        settings = ClusterSettings(kv_heads=kv_heads, schemes=("train-default",))
        places = [device * nodes // 16 for device in range(16)]
        (found,) = settings.read_schemes(places)
        wanted = choose_degrees(MeshConfig(), 16, settings.call, nodes=places, platform="cpu")
        assert found.degrees == wanted


def row(name, seconds, error=1e-7, expected=2e6):
    return cluster_rounds.Timed(
        name=name, run=lambda: None, seconds=seconds, expected=expected,
        error=error, tolerance=2e-6,
    )  # fmt: skip


def test_table_shows_medians_and_what_is_wrong():
    rows = [row("ring", [2.0, 1.0, 3.0]), row("team-2", [1.0], error=1e-3),
            row("odd", [4.0], expected=math.nan, error=math.nan)]  # fmt: skip
    ring, team, odd = cluster_rounds.table(rows).splitlines()[2:5]
    assert ring.split() == ["ring", "2.000", "100%", "1.00", "2.000", "1.0e-07"]
    assert team.split()[3] == "2.00"
    assert team.endswith("WRONG")
    assert odd.split()[1:] == ["4.000", "0%", "0.50", "-", "-"]
    assert len(odd) == len(ring)
    assert [x.is_wrong for x in rows] == [False, True, False]


def test_length_that_the_devices_do_not_divide_is_refused(two_devices):
    with refused(InputError, len=1030):
        cluster.main(["--seq-len", "1030"])


def test_nodes_of_unequal_devices_are_refused(monkeypatch):
    monkeypatch.setattr(
        jax, "devices", lambda: [SimpleNamespace(id=i, process_index=i // 3) for i in range(5)]
    )
    with refused(InputError, "got 3, 2"):
        cluster.find_place()


@pytest.fixture
def two_devices(monkeypatch):
    """A cluster of one process and two devices."""
    two = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda: two)


@pytest.fixture
def timed(monkeypatch):
    """The rows of each table."""
    tables, table = [], cluster_rounds.table
    monkeypatch.setattr(cluster_rounds, "table", lambda rows: tables.append(rows) or table(rows))
    return tables


@pytest.mark.slow
def test_schemes_are_timed_in_one_process(two_devices, timed, capsys):
    settings = ClusterSettings(
        seq_len=16, heads=2, head_dim=4, rounds=1, schemes=("ring", "ulysses")
    )
    assert cluster.measure(settings) == 0
    (rows,) = timed
    assert [row.name for row in rows] == ["ring", "ulysses"]
    assert all(0 <= row.error < row.tolerance for row in rows)
    assert "1 x 2 cpu devices" in capsys.readouterr().out
