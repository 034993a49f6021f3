"""How the degrees that the flags of a run leave open are filled in."""

import dataclasses

import pytest

import startrail_jax as st
from benchmarks.compiled import run as benchmark
from configs.gpt import gpt_7b, gpt_tiny, llama3_8b
from programs import make_config, make_program
from refusals import refused
from startrail_jax.devices.degrees import ROLES
from startrail_jax.devices.nodes import nodes_of
from startrail_jax.errors import InputError
from startrail_jax.traffic.settings import all_degrees
from trainer.config import AttentionConfig, MeshConfig
from trainer.gpt.objective import NextToken
from trainer.parallel.degrees import choose_degrees, choose_order, describe_nodes, keep_degrees
from trainer.parallel.step_sizes import footprint
from trainer.run.folder import read_mesh, save_degrees

pytestmark = pytest.mark.quick


TINY = gpt_tiny().attention_call
GPT = gpt_7b().attention_call
GQA = llama3_8b().attention_call


def degrees_of(num_devices, *, call=TINY, nodes=None, **mesh):
    degrees = choose_degrees(MeshConfig(**mesh), num_devices, call, nodes=nodes)
    return {name: degree for name, degree in vars(degrees).items() if degree > 1}


@pytest.mark.parametrize(
    ("num_devices", "given", "expected"),
    [
        (8, {}, {"team": 2, "group": 2, "ring": 2}),
        (1, {}, {}),
        (4, {}, {"group": 2, "ring": 2}),
        (6, {}, {"team": 2, "ring": 3}),
        (7, {}, {"ring": 7}),
        (64, {}, {"team": 4, "group": 8, "ring": 2}),
        (8, {"data": 4}, {"data": 4, "ring": 2}),
        (16, {"head": 2}, {"head": 2, "team": 2, "group": 2, "ring": 2}),
        (16, {"tensor": 2}, {"tensor": 2, "team": 2, "group": 2, "ring": 2}),
        (8, {"group": 1}, {"team": 2, "ring": 4}),
        (8, {"group": 8}, {"group": 8}),
        (8, {"ring": 8}, {"ring": 8}),
        (8, {"team": 4, "group": 1}, {"team": 4, "ring": 2}),
        (8, {"team": 4}, {"team": 4, "ring": 2}),
        (64, {"c": 4}, {"team": 4, "group": 4, "ring": 4}),
        (8, {"c": 1}, {"ring": 8}),
    ],
)
def test_choose_degrees_fills_what_is_left_open(num_devices, given, expected):
    assert degrees_of(num_devices, **given) == expected


@pytest.mark.parametrize(
    ("num_devices", "given", "named"),
    [
        (8, {"c": 4}, "Use --mesh.team 4 in place of --mesh.c 4, or --devices 16"),
        (8, {"c": 3}, "Change a degree"),
        (8, {"data": 3}, "data=3"),
        (8, {"ring": 3}, "ring=3"),
        (6, {"team": 4}, "team=4"),
        (8, {"team": 3, "group": 1}, "team=3"),
        (8, {"team": 1, "group": 1, "ring": 1, "data": 16}, "--devices"),
    ],
)
def test_choose_degrees_that_miss_the_devices_raise(num_devices, given, named):
    with refused(InputError, named):
        choose_degrees(MeshConfig(**given), num_devices, TINY)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("devices_per_node", [1, 2, 4, 8])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [16, 4])
def test_default_degrees_on_several_nodes_send_the_fewest_bytes_through_a_port(
    kv_heads, causal, devices_per_node
):
    call = dict(heads=16, kv_heads=kv_heads, head_dim=64, dtype="bfloat16", causal=causal)

    def port_bytes(degrees):
        sizes = {"batch": 1, "seq_len": 64 * 16, **call}
        report = st.communication(degrees, **sizes, devices_per_node=devices_per_node)
        return report.total.nodes.port_bytes

    nodes = nodes_of(range(16), devices_per_node)
    chosen = choose_degrees(MeshConfig(), 16, call, nodes=nodes)
    settings = all_degrees(16, roles=("group", "ring", "team"))
    assert port_bytes(chosen) == min(map(port_bytes, settings))


@pytest.mark.usefixtures("unchecked")
def test_default_degrees_depend_on_nodes_heads_and_order():
    def on(devices_per_node, **given):
        nodes = nodes_of(range(16), devices_per_node)
        return degrees_of(16, call=given.pop("call", GPT), nodes=nodes, **given)

    assert on(16) == {"group": 2, "ring": 2, "team": 4}
    assert on(1) == {"ring": 4, "team": 4}
    assert on(1, call=GQA) == {"ring": 8, "team": 2}
    assert on(8) == {"group": 4, "ring": 2, "team": 2}
    assert on(4) == {"group": 2, "ring": 4, "team": 2}
    assert on(8, order=("collectives_inside",)) != on(8)
    assert on(4, c=4) == {"group": 4, "team": 4}
    assert on(4, team=4) == {"group": 2, "ring": 2, "team": 4}


@pytest.mark.usefixtures("unchecked")
def test_default_degrees_count_what_gloo_sends_on_cpus():
    """Its reduce_scatter moves 4 / 3 of the bytes over a group of 4."""
    nodes = nodes_of(range(16), 4)
    assert degrees_of(16, call=GQA, nodes=nodes) == {"group": 4, "ring": 2, "team": 2}
    degrees = choose_degrees(MeshConfig(), 16, GQA, nodes=nodes, platform="cpu")
    assert (degrees.ring, degrees.team) == (4, 4)


WINDOWS = {"local": (512,), "mixed": (512, 512, 512, "none"), "beyond": (131_072, "none")}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("windows", "devices_per_node", "expected"),
    [
        (None, 64, {"group": 4, "ring": 2, "team": 8}),
        ("beyond", 64, {"group": 4, "ring": 2, "team": 8}),
        # Layers with a window send the same under all degrees, so that the others decide.
        ("mixed", 64, {"group": 4, "ring": 2, "team": 8}),
        (None, 8, {"group": 2, "ring": 8, "team": 4}),
        ("mixed in rings", 64, {"ring": 16, "team": 4}),
        ("local in rings", 64, {"ring": 64}),
        ("mixed in rings", 8, {"ring": 64}),
    ],
)
def test_default_degrees_count_what_the_layers_of_a_pattern_send(
    windows, devices_per_node, expected
):
    """In rings, windows leave rounds out: rings get cheap, and what a team gathers does not."""
    base = gpt_7b()
    pattern, _, exchange = (windows or "").partition(" in ")
    model = dataclasses.replace(base.model, windows=WINDOWS.get(pattern, ("none",)))
    attention = AttentionConfig(exchange=exchange or "auto")
    # No multiple of twice the devices: rows are padded.
    config = dataclasses.replace(base, seq_len=131_000, model=model, attention=attention)
    nodes = nodes_of(range(64), devices_per_node)
    chosen = choose_degrees(MeshConfig(), 64, config.attention_call, nodes=nodes)
    assert {name: degree for name, degree in vars(chosen).items() if degree > 1} == expected
    if devices_per_node == 64:
        assert choose_order(MeshConfig(), chosen, nodes, config.attention_call) == ROLES


def test_former_degrees_of_a_run_are_kept_unless_flags_say_otherwise(tmp_path):
    assert read_mesh(tmp_path) is None
    assert keep_degrees(MeshConfig(), 16, None) is None

    former = st.Degrees(ring=4, team=4)
    save_degrees(tmp_path, vars(former))
    assert keep_degrees(MeshConfig(), 16, read_mesh(tmp_path).degrees) == former
    for num_devices, given in ((8, {}), (16, {"c": 4}), (16, {"ring": 8}), (16, {"data": 2})):
        assert keep_degrees(MeshConfig(**given), num_devices, vars(former)) is None
    assert keep_degrees(MeshConfig(team=4), 16, vars(former)) == former
    assert keep_degrees(MeshConfig(team=4), 16, vars(former), planned=True) == former
    assert keep_degrees(MeshConfig(team=2), 16, vars(former), planned=True) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"degrees": {"ring": 0}}', '{"degrees": [2]}'])
def test_a_broken_note_of_degrees_is_refused(tmp_path, text):
    (tmp_path / "mesh.json").write_text(text)
    with refused(InputError, "mesh.json"):
        read_mesh(tmp_path)


def test_log_says_which_axes_cross_nodes():
    degrees, nodes = st.Degrees(ring=8, team=2), nodes_of(range(16), 8)
    order = choose_order(MeshConfig(), degrees, nodes, GQA)
    assert describe_nodes(degrees, order, nodes) == (
        "2 of 8 devices; axes from slow to fast: ring, team; across nodes: ring; inside: team"
    )
    order = choose_order(MeshConfig(order=("rings_inside",)), degrees, nodes, GQA)
    assert describe_nodes(degrees, order, nodes).endswith("across nodes: team; inside: ring")
    order = choose_order(MeshConfig(order=ROLES), degrees, nodes, GQA)
    assert order == ROLES


def test_benchmark_takes_the_mesh_of_fewest_bytes_and_refuses_what_train_refuses(capsys):
    def arithmetic(*flags):
        benchmark.main(["llama3_8b", "--arithmetic", *flags])
        title, _, row = capsys.readouterr().out.splitlines()
        return title, row

    title, row = arithmetic("--devices", "16")
    named = ", ".join(
        f"{role} {n}" for role, n in degrees_of(16, call=GQA, **llama3_8b().mesh.degrees).items()
    )
    assert f" 16 x h200: {named}; remat " in title
    *_, peak, formula = row.split()
    assert peak == formula
    with pytest.raises(SystemExit):
        arithmetic("--mesh.data", "2")
    assert (
        "batch_size must be divisible by mesh.data * gradient_accumulation"
        in capsys.readouterr().err
    )
    with pytest.raises(InputError, match=r"heads must be divisible by head \* tensor"):
        arithmetic("--mesh.tensor", "64", "--mesh.c", "1")


@pytest.mark.slow
def test_estimate_refuses_what_the_program_refuses():
    """With the same message, for every setting of all six degrees."""
    model = dict(vocab_size=32, width=8, layers=1, heads=6, kv_heads=2, head_dim=4, mlp_width=6)
    config = make_config(model, seq_len=24, batch_size=2, zero=1, zero_axes=("team", "ring"))
    objective, outcomes = NextToken(config), {}
    for degrees in all_degrees(4, roles=ROLES):
        attempts = (
            lambda degrees=degrees: make_program(config, degrees),
            lambda degrees=degrees: footprint(config, objective, degrees),
        )
        messages = []
        for attempt in attempts:
            try:
                attempt()
                messages.append(None)
            except ValueError as error:
                messages.append(str(error))
        assert messages[0] == messages[1]
        outcomes[degrees] = messages[0]
    reasons = {str(message).split(";")[0].split(" (")[0] for message in outcomes.values()}
    assert None in outcomes.values()
    assert len(reasons) >= 4
