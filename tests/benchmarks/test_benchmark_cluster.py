"""The benchmark of a cluster: its words, its table, and measurements in one process."""

import math
from types import SimpleNamespace

import jax
import pytest

from benchmarks.cluster import rounds as cluster_rounds
from benchmarks.cluster import run as cluster
from benchmarks.cluster import training as cluster_training
from benchmarks.cluster.attention import AttentionCalls, Place
from benchmarks.cluster.settings import ClusterSettings
from benchmarks.cluster.training import TrainingSteps
from benchmarks.schemes import read_scheme
from refusals import refused
from startrail_jax.devices.degrees import Degrees
from startrail_jax.errors import InputError
from startrail_jax.tokens.layout import Layout
from trainer.config import MeshConfig
from trainer.parallel.degrees import choose_degrees
from trainer.tasks import TASKS


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


def test_models_bring_their_mask_and_key_heads():
    settings = ClusterSettings(kv_heads=4, causal=False)
    assert (settings.of_model("gpt").causal, settings.of_model("gpt").num_kv_heads) == (True, 4)
    assert (settings.of_model("dit").causal, settings.of_model("dit").num_kv_heads) == (False, 16)


def row(name, seconds, error=1e-7, expected=2e6):
    return cluster_rounds.Timed(
        name=name, what="forward", run=lambda: None, seconds=seconds, expected=expected,
        error=error, tolerance=2e-6,
    )  # fmt: skip


def test_table_shows_medians_and_what_is_wrong():
    rows = [row("ring", [2.0, 1.0, 3.0]), row("team-2", [1.0], error=1e-3),
            row("odd", [4.0], expected=math.nan, error=math.nan)]  # fmt: skip
    ring, team, odd = cluster_rounds.table(rows).splitlines()[3:6]
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
def test_schemes_and_steps_of_train_py_are_timed_in_one_process(two_devices, timed, capsys):
    sizes = dict(seq_len=16, heads=2, head_dim=4, layers=1, rounds=1)
    settings = ClusterSettings(**sizes, schemes=("ring",))
    assert cluster.measure(settings) == 0
    steps = ClusterSettings(**sizes, train=("dit",), schemes=("ring", "ulysses"))
    assert cluster.measure(steps) == 0
    (ring,), rows = timed
    assert (ring.name, ring.what) == ("ring", "forward + backward")
    assert [(row.name, row.what) for row in rows] == [("ring", "DiT step"), ("ulysses", "DiT step")]
    # The first loss does not depend on the mesh.
    for row in (ring, rows[1]):
        assert 0 <= row.error < row.tolerance
    assert "1 x 2 cpu devices" in capsys.readouterr().out


@pytest.mark.slow
def test_step_should_receive_what_its_program_sends_through_ports(two_devices):
    settings = ClusterSettings(seq_len=16, heads=2, head_dim=4, layers=1).of_model("dit")
    found = {}
    for per_node in (1, 2):
        place = Place(devices=tuple(jax.devices()), devices_per_node=per_node)
        calls = AttentionCalls(settings, place)
        steps = TrainingSteps("dit", settings, calls)
        found[per_node] = steps.prepare(read_scheme("ring", 2)).expected
    assert found[1] > found[2] == 0


@pytest.mark.parametrize("kind", ["gpt", "dit"])
def test_random_batch_is_one_of_the_run(kind):
    settings = ClusterSettings(seq_len=48, heads=2, head_dim=4, batch_size=3)
    config = cluster_training.train_config(kind, settings)
    assert config.num_tokens == 48
    objective = TASKS[kind].make_objective(config)
    layout = Layout.of(config.attention_of_model.get("layout"), 4)
    batch, wanted = cluster_training.random_batch(config, layout), objective.batch_shapes(layout)
    assert jax.tree.structure(batch) == jax.tree.structure(wanted)
    for found, like in zip(*map(jax.tree.leaves, (batch, wanted)), strict=True):
        assert (found.shape, found.dtype) == (like.shape, like.dtype)
