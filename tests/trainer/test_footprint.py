"""The arithmetic of memory, compared with what compiled programs report."""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest

import startrail_jax as st
from configs import RECIPES
from models import experts
from plans import MODELS
from programs import (
    compile_gradients,
    compile_step,
    make_config,
    make_dit_config,
    make_program,
    make_text_config,
    make_wan_config,
    saved_by_layers,
)
from startrail_jax.xla.compiler import offload_options
from trainer.config import AttentionConfig, LoraConfig
from trainer.gpt.config import DataConfig
from trainer.parallel.abstract_step import AbstractStep
from trainer.parallel.state import batch_shapes, bytes_of_device, describe_memory
from trainer.planner import step as planner_step
from trainer.planner.memory import FORWARD, LAYER, LOSS, Footprint, Part, footprint_of
from trainer.planner.models import DISPATCHES
from trainer.tasks import TASKS

GIB = 2**30
GQA = {"kv_heads": 2, "heads": 8}
# ZeRO level, ZeRO axes, degrees and sizes of the model. The cases cover all levels, ZeRO over a
# part of the mesh, tensor parallelism, fewer key heads than devices, weights without a dimension
# that can be split (width 60 over 8 devices), and the axes head and data. Two of those that are
# compiled have no ring, as rounds make programs long.
ALL = ("data", "group", "ring", "team", "head")
STARTRAIL = st.Degrees.startrail(8, c=2)
CASES = {
    "level 0": (0, ALL, st.Degrees(data=2, group=2, team=2), {}),
    "level 1": (1, ALL, STARTRAIL, {}),
    "level 2": (2, ALL, STARTRAIL, {}),
    "level 3": (3, ALL, STARTRAIL, {}),
    "level 2, team": (2, ("team",), STARTRAIL, {}),
    "level 3, ring and team": (3, ("ring", "team"), STARTRAIL, {"mlp": "gelu"}),
    "level 1, data": (1, ("data",), st.Degrees(data=2, team=2, ring=2), {"tied_head": True}),
    "level 3, tensor": (3, ALL, st.Degrees(tensor=2, team=2, group=2), {}),
    "level 2, tensor, few keys": (2, ALL, st.Degrees(tensor=4, team=2), GQA),
    "level 3, unsplit": (3, ALL, STARTRAIL, {"width": 60, "tied_head": True}),
    "level 3, head": (3, ALL, st.Degrees(head=2, ring=2), {}),
}


def footprint(config, degrees):
    return abstract_step(config, degrees).memory()


def abstract_step(config, degrees):
    return AbstractStep.of_degrees(config, TASKS[config.kind].make_objective(config), degrees)


def case(name, **changes):
    zero, zero_axes, degrees, sizes = CASES[name]
    config = make_config(sizes, zero=zero, zero_axes=zero_axes, **changes)
    return config, degrees, make_program(config, degrees)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow_except_every(5)
def test_state_and_batch_are_exact(name):
    config, degrees, program = case(name)
    formula = footprint(config, degrees)
    assert bytes_of_device(program.state_shapes.weights) == formula["weights"]
    assert bytes_of_device(program.state_shapes.optimizer) == formula["optimizer"]
    assert bytes_of_device(program.batch_shapes) == formula["batch"]


@pytest.mark.slow_except_every(3)
@pytest.mark.parametrize(
    ("zero", "degrees"), [(0, STARTRAIL), (3, STARTRAIL), (3, st.Degrees(tensor=2, team=4))]
)
@pytest.mark.parametrize("make", [make_dit_config, make_text_config])
def test_state_and_batch_of_a_dit_are_exact(make, zero, degrees):
    config = make(dict(layers=3), size=(3, 6, 10), ema_decay=0.9, zero=zero)
    program = make_program(config, degrees)
    formula = footprint(config, degrees)
    assert bytes_of_device(program.state_shapes) == formula.state_bytes
    assert bytes_of_device(program.state_shapes.average) == formula["average"]
    assert bytes_of_device(program.batch_shapes) == formula["batch"]


@pytest.mark.slow
def test_arguments_of_the_compiled_step_are_state_and_batch():
    config, degrees, program = case("level 3, tensor")
    memory = compile_step(program).memory_analysis()
    formula = footprint(config, degrees)
    assert memory.argument_size_in_bytes == formula.state_bytes + formula["batch"]
    # By donation the new state takes the memory of the old one. Other outputs are scalars and a
    # table of addresses.
    assert memory.alias_size_in_bytes == formula.state_bytes
    assert 0 <= memory.output_size_in_bytes - formula.state_bytes < 1024


@pytest.mark.slow
@pytest.mark.parametrize("name", ["level 0", "level 1, data", "level 2, team", "level 3, unsplit"])
def test_gradients_of_the_compiled_step_are_exact(name):
    """They are sharded as the weights are; at level 1 they are whole until they are summed."""
    config, degrees, program = case(name)
    memory = compile_gradients(program).memory_analysis()
    formula = footprint(config, degrees)
    assert memory.argument_size_in_bytes == formula["weights"] + formula["batch"]
    assert 0 <= memory.output_size_in_bytes - formula["weights"] < 1024
    whole = footprint(dataclasses.replace(config, zero=0, zero_axes=ALL), degrees)["weights"]
    assert formula["gradients"] == (whole if config.zero == 1 else formula["weights"])
    if config.zero == 1:
        assert memory.temp_size_in_bytes > whole


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("gpt_3b", 3_427_405_824),
        ("gpt_7b", 6_738_415_616),
        ("llama3_8b", 8_030_261_248),
        ("qwen3_30b_a3b_1m", 30_532_122_624),
        ("gpt_oss_20b_128k", 20_914_757_184),
        ("moonlight_16b_128k", 15_960_110_208),
        ("kimi_linear_48b_1m", 49_122_681_728),
        ("qwen3_8b_1m", 8_190_735_360),
        ("dit_1b", pytest.approx(1.0e9, rel=0.05)),
        ("wan_1_3b", 1_418_996_800),
        ("wan_14b", 14_288_491_584),
    ],
)
def test_parameters_of_the_recipes(recipe, expected):
    """Those of the models that they are named after; gpt_7b has the number of Llama 2 7B."""
    config = RECIPES[recipe]()
    sizes = abstract_step(config, st.Degrees()).sizes
    assert sizes.whole_elements == sizes.shard_elements == expected


@pytest.mark.slow
def test_saved_by_remat():
    """gpt_7b on 64 devices: 8192 tokens of width 4096 in bfloat16 are 64 MiB a layer."""
    config, degrees = RECIPES["gpt_7b"](), st.Degrees.startrail(64, c=4)
    name, unit, lse = "saved for the backward pass", 32 * 2**26, 32 * 32 * 8192 * 4

    def saved(remat, **changes):
        return footprint(dataclasses.replace(config, remat=remat, **changes), degrees)

    assert saved("full")[name] == unit
    assert saved("attention_saved")[name] == 2 * unit + lse
    # Query, key, value and output of 32 heads, and three matrices of 11008 / 4096 units.
    assert saved("projections_saved")[name] == 6 * unit + lse
    assert saved("products_saved")[name] == 6 * unit + lse + 2 * unit * 11008 // 4096
    assert saved("none")[name] > 10 * unit
    # A team of 4 has gathered 4 shares of the query, and a group 4 of key and value.
    kept = saved("attention_saved", attention=AttentionConfig(keep_gathered=True))
    assert kept[name] == 2 * unit + lse + 12 * unit
    two = saved("attention_saved", batch_size=2)
    assert two[name] == 2 * (2 * unit + lse)
    parts = saved("attention_saved", batch_size=2, gradient_accumulation=2)
    assert parts[name] == 2 * unit + lse
    offloaded = saved("attention_saved", offload=True)
    assert offloaded.host_bytes == 2 * unit + lse
    assert two.host_bytes == 0
    assert offloaded.device_bytes == saved("attention_saved").device_bytes - 2 * unit - lse
    # The output before and after the exchange of heads; the host gets the one before.
    degrees = st.Degrees(ring=32, head=2)
    assert saved("attention_saved")[name] == 3 * unit + lse
    assert saved("attention_saved", offload=True).host_bytes == 2 * unit + lse


@pytest.mark.parametrize("kind", ["gpt", "dit", "dit of texts", "wan"])
@pytest.mark.parametrize(
    ("zero", "degrees", "chunks"),
    [(0, st.Degrees(), 1), (3, st.Degrees(data=2, tensor=2), 1), (3, st.Degrees(head=2), 2)],
)
@pytest.mark.parametrize("remat", ["none", "products_saved", "projections_saved"])
@pytest.mark.slow
def test_what_a_layer_saves(remat, kind, zero, degrees, chunks):
    """Counted in the derivative that jax makes of a step, tiled and not."""
    for tile in (None, 512):
        sizes = dict(width=64, layers=5, heads=8, mlp_width=256, dtype="bfloat16")
        common = dict(zero=zero, remat=remat, tile=tile, batch_size=degrees.data)
        common |= dict(attention=AttentionConfig(head_chunks=chunks))
        size = (4 * degrees.sequence, 32, 64)
        if kind == "dit":
            config = make_dit_config(sizes | dict(channels=16, classes=0), size=size, **common)
        elif kind == "dit of texts":
            sizes |= dict(channels=16, text_dim=8)
            config = make_text_config(sizes, text_tokens=96, size=size, **common)
        elif kind == "wan":
            sizes |= dict(channels=16, text_dim=8, text_tokens=96)
            config = make_wan_config(sizes, size=size, **common)
        else:
            sizes |= dict(vocab_size=64, kv_heads=4, head_dim=8)
            data, length = DataConfig(mask_documents=False), 2048 * degrees.sequence
            config = make_config(sizes, data=data, seq_len=length, **common)
        program = make_program(config, degrees)
        step = program.train_step.__wrapped__
        jaxpr = jax.make_jaxpr(step)(program.state_shapes, program.batch_shapes)
        arrays = saved_by_layers(jaxpr.jaxpr, 5)  # Apart from weights.
        saved = 5 * sum(x.size * x.dtype.itemsize for x in arrays)
        formula = footprint(config, degrees)["saved for the backward pass"]
        # Vectors, such as the log-sum-exp, are left out, and a rotated key may be float32.
        assert formula == pytest.approx(saved, rel=0.04)


def test_documents_are_a_fifth_array_of_the_batch():
    config, degrees = make_config(), STARTRAIL
    plain = dataclasses.replace(config, data=DataConfig(mask_documents=False))
    sizes = [footprint(x, degrees)["batch"] for x in (config, plain)]
    assert sizes == [5 * 4 * 4 * 16, 4 * 4 * 4 * 16]


@pytest.mark.slow
def test_parts_of_documents_are_in_memory_one_at_a_time():
    def sizes(batch_size):
        config = make_config(data=DataConfig(batches="documents"), batch_size=batch_size)
        program, formula = make_program(config, STARTRAIL), footprint(config, STARTRAIL)
        rows = batch_shapes(program.objective, program.attention)
        trains = compile_gradients(program)
        measures = program.losses.lower(program.state_shapes.model, rows).compile()
        temporary = [x.memory_analysis().temp_size_in_bytes for x in (trains, measures)]
        return formula.device_bytes - formula["batch"], *temporary

    (formula, trains, measures), four_times = sizes(2), sizes(8)
    assert four_times == (
        formula,
        pytest.approx(trains, rel=0.02),
        pytest.approx(measures, rel=0.1),
    )


@pytest.mark.slow
def test_only_vocabularies_are_large_weights_outside_of_the_layers():
    """A head or an embedding with its gradient; of a tied one the gradient arises in the loss."""

    def phases(config):
        table = footprint(config, STARTRAIL).parts
        return {part.name: part.phase for part in table if part.name.startswith("gradient of ")}

    assert phases(make_config(zero=3)) == {
        "gradient of embedding, whole": LAYER,
        "gradient of head, whole": LOSS,
    }
    tied = {"gradient of embedding, whole": LOSS}
    assert phases(make_config({"tied_head": True}, zero=3)) == tied
    # Where gradients are summed once a step, that of the embedding is one of them.
    assert phases(make_config(zero=1)) == {"gradient of head, whole": LOSS}
    # It takes the place of the outputs of all tokens, and is beside those of a tile.
    whole, tiled = (footprint(make_config(zero=1, tile=x), STARTRAIL) for x in (None, 4))
    name = "gradient of head, whole"
    assert (whole[name], tiled[name] > 0) == (0, True)
    assert phases(RECIPES["dit_1b"]()) == {}


@pytest.mark.parametrize(("host", "end"), [(0, "for a step)"), (2**29, " 1.00 GiB of the host's")])
def test_describe_memory_gives_the_sum_and_the_state(host, end):
    analysis = types.SimpleNamespace(
        **dict(argument_size_in_bytes=2**20, temp_size_in_bytes=2**29),
        **dict(host_argument_size_in_bytes=host, host_temp_size_in_bytes=host),
    )
    line = describe_memory(analysis)
    assert line.startswith("0.50 GiB (state and batch 1.0 MiB, ")
    assert line.endswith(end)


@pytest.mark.slow
def test_layers_of_a_period_have_all_their_gradients_at_a_time():
    @functools.cache
    def sizes(zero, **model):
        formula = footprint(make_config({"layers": 8} | model, zero=zero), STARTRAIL)
        names = ("weights of layers, as used", "gradients of layers, whole")
        return [formula[name] for name in (*names, "weights of layers, for each loop")]

    mlp = 4 * 3 * 64 * 80
    layer = sizes(0)[1]
    for zero in (0, 1, 3):
        # Beside attention there are no weights of the MLP, and at level 3 its gradients.
        used, summed = (0 if zero == 1 else layer - mlp), layer + (mlp if zero == 3 else 0)
        assert sizes(zero) == [used, summed, 0]
        # Layers of a period gather their weights one after another, and sum gradients together.
        assert sizes(zero, windows=(9, 9, 9, "none")) == [used, 4 * summed, 0]
    # A second loop goes over the last two layers of ten.
    rest = {"layers": 10, "windows": (9, 9, 9, "none")}
    assert sizes(0, **rest)[2] == 10 * sizes(0)[1]
    assert sizes(3, **rest)[2] == 10 * sizes(0)[1] // 8
    # Frozen weights are copied too, in the type in which they are kept.
    for zero in (0, 3):
        model = rest | {"dtype": "bfloat16"}
        config = make_config(model, zero=zero, lora=LoraConfig(rank=2))
        formula = footprint(config, STARTRAIL)
        # Matrices, norms and adapters.
        layer = 2 * 64 * (64 + 32 + 32 + 64 + 3 * 80) + 4 * 2 * 64 + 4 * 2 * (64 + 64 + 64 + 32)
        copied = formula["weights of layers, for each loop"]
        assert copied == 10 * layer // (8 if zero else 1)


def test_two_rounds_under_a_full_mask_add_results_of_16_bits():
    """dit_1b in a ring of 2: eleven arrays of a query unit, where a causal mask has 14."""
    config, degrees = RECIPES["dit_1b"](), st.Degrees.startrail(32, c=4)
    sizes = abstract_step(config, degrees).sizes
    assert not sizes.model.causal
    unit, shard = 65_536 * 1536 * 2, 16_384 * 1536 * 2

    def attention(model=sizes.model):
        formula = footprint_of(dataclasses.replace(sizes, model=model))
        return formula["attention or MLP"] - 6 * shard

    assert attention() == 11 * unit
    causal = dataclasses.replace(sizes.model, kind="gpt", causal=True)
    assert attention(causal) == 14 * unit


def test_gradients_and_moved_weights_are_of_different_phases():
    """Gathered weights exist twice until the backward pass, and whole gradients from then on."""
    config = make_config({"heads": 4, "kv_heads": 4, "head_dim": 16}, zero=1)
    layers = footprint(config, STARTRAIL)
    # Of a layer, the output of attention is [4, 16, 64], whose heads eight devices do not split.
    moved = 4 * 3 * 64 * 64
    found = {part.phase: part.size for part in layers.parts if part.name == "weights, moved"}
    assert found == {FORWARD: moved, LOSS: moved}
    (phase,) = (part.phase for part in layers.parts if part.name == "gradients")
    assert phase == LAYER
    parts = footprint(dataclasses.replace(config, gradient_accumulation=2), STARTRAIL).parts
    (phase,) = (part.phase for part in parts if part.name == "gradients")
    assert phase is None
    assert footprint(dataclasses.replace(config, zero=3), STARTRAIL)["weights, moved"] == 0


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("model", ["gpt_3b", "gpt_7b", "dit_1b", "wan_14b"])
def test_planner_moves_the_weights_that_a_run_moves(model, tensor):
    config, degrees = RECIPES[model](), st.Degrees(tensor=tensor, ring=8)
    config = dataclasses.replace(config, zero=2)
    exact = abstract_step(config, degrees).sizes.moved_elements
    call = types.SimpleNamespace(model=MODELS[model])
    settings = types.SimpleNamespace(tensor=np.int64(tensor), replicas=np.int64(8))
    assert planner_step._moved_elements(call, settings) == exact


def test_tokens_are_sent_to_experts_where_these_are_more_bytes():
    """A step of Qwen3-30B-A3B sends as many bytes either way with about 23,000 tokens a GPU."""
    assert DISPATCHES == experts.DISPATCHES
    recipe = RECIPES["qwen3_30b_a3b_1m"]()
    weights = 3 * 128 * 2048 * 768
    for tokens, sends in ((1024, True), (20_000, True), (32_768, False)):
        found = {}
        for way in ("auto", "gather", "dispatch"):
            config = dataclasses.replace(recipe, seq_len=8 * tokens, experts=way)
            found[way] = abstract_step(config, st.Degrees(head=4, ring=2)).sizes
        assert found["auto"].expert_shards == (8 if sends else 1)
        few, all_of_them = found["dispatch"], found["gather"]
        assert all_of_them.layer_elements - few.layer_elements == weights * 7 // 8
        assert all_of_them.turn_trained - few.turn_trained == weights * 7 // 8
        assert MODELS["qwen3_30b_a3b"].dispatches(tokens, 8, 1) == sends
        assert not MODELS["qwen3_30b_a3b"].dispatches(tokens, 3, 1)


def test_tokens_that_are_sent_to_experts_are_those_of_a_part():
    """Of eight rows of whole documents, or of eight parts of accumulation."""
    recipe = RECIPES["qwen3_30b_a3b_1m"]()
    config = dataclasses.replace(recipe, seq_len=8 * 20_000, batch_size=8)
    documents = dataclasses.replace(config.data, batches="documents", mask_documents=True)
    for changes, sends in (
        ({}, False),
        ({"gradient_accumulation": 8}, True),
        ({"data": documents}, True),
    ):
        step = abstract_step(dataclasses.replace(config, **changes), st.Degrees(head=4, ring=2))
        assert step.partition.dispatches is sends


def test_only_the_largest_phase_counts():
    parts = (
        Part(name="weights", size=3),
        Part(name="x", size=5, exact=False, phase="a"),
        Part(name="y", size=4, phase="b"),
        Part(name="z", size=4, phase="b"),
        Part(name="saved", size=7, host=True),
    )
    sizes = Footprint(parts=parts)
    assert sizes.phases == {"a": 5, "b": 8}
    assert (sizes.always_bytes, sizes.device_bytes, sizes.host_bytes) == (3, 11, 7)
    x, y, saved, total = (sizes.table().splitlines()[i] for i in (1, 2, 4, 5))
    assert x.endswith("estimate, device, at another time")
    assert y.endswith("exact, device")
    assert saved.endswith("exact, host")
    assert total.startswith("device, at most at a time")


def test_limit_of_a_step_that_fills_the_device_rises_by_what_is_offloaded():
    """By default a step may take 95 of 100 bytes that its state leaves."""
    (percentage,) = offload_options(device_bytes=95, host_bytes=190).values()
    assert percentage == 95 + 190
    # It is a whole number, rounded up.
    (percentage,) = offload_options(device_bytes=950, host_bytes=1).values()
    assert percentage == 96
