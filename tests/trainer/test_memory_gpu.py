"""Training steps compiled for GPUs without a GPU: what they save, recompute, move and send."""

import functools
import math

import pytest

import startrail_jax as st
from benchmarks.compiled import run as benchmark
from benchmarks.compiled.deviceless import gpu_topology
from benchmarks.compiled.roofline import ENTRY, read_roofline
from gpu_compiler import needs_gpu_compiler
from programs import (
    compile_gradients,
    compile_step,
    make_config,
    make_program,
    make_text_config,
    weight_shapes,
)
from startrail_jax.analysis import hlo
from trainer.gpt.config import DataConfig
from trainer.planner.hardware import GPUS

pytestmark = [pytest.mark.slow, needs_gpu_compiler]

LAYERS, TOKENS = 3, 2048
MODEL = dict(
    vocab_size=2048, width=1024, layers=LAYERS, heads=8, kv_heads=8, head_dim=128,
    mlp_width=2048, dtype="bfloat16",
)  # fmt: skip
STARTRAIL, ULYSSES = st.Degrees.startrail(8, c=2), st.Degrees.ulysses(8)
EVERYWHERE = {"group", "ring", "team"}
ATTENTION, ITS_GRADIENTS = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"


@functools.cache
def compiled(degrees=STARTRAIL, vocab_size=2048, width=1024, **changes):
    """A program, and its compiled loss and gradients, one sequence at a time, for 8 GPUs."""
    changes = {"zero": 3, "remat": "attention_saved"} | changes
    parts = changes.get("gradient_accumulation", 1)
    config = make_config(
        MODEL | {"vocab_size": vocab_size, "width": width},
        seq_len=TOKENS * degrees.sequence, batch_size=degrees.data * parts,
        data=DataConfig(mask_documents=False), **changes,
    )  # fmt: skip
    program = make_program(config, degrees, gpu_topology("h100", 8).devices)
    return program, compile_gradients(program)


def memory(**changes):
    return compiled(**changes)[1].memory_analysis()


def runs(program, computation, target):
    """How often a program calls a kernel; of a conditional, its most frequent branch counts."""
    total = 0
    for instruction in program.computations[computation]:
        if instruction.opcode.endswith(("-done", "-update")):
            continue
        total += f'custom_call_target="{target}"' in instruction.attributes
        inner = [runs(program, callee, target) for callee in hlo.callees(instruction)]
        if instruction.opcode == "while":
            total += inner[1] * (hlo.trip_count(instruction) or 0)
        else:
            total += max(inner) if instruction.opcode == "conditional" else sum(inner)
    return total


def test_policy_takes_the_memory_of_next_token_training():
    """But for the numbers of each token: four that are read, of which one says how rollouts begin
    alike, and two that are computed, with their gradients."""
    peaks, estimates = {}, {}
    for objective in ("next_token", "policy"):
        config = make_config(
            MODEL | {"vocab_size": 65_536}, seq_len=8 * TOKENS, batch_size=1, zero=3,
            remat="attention_saved", tile=512, objective=objective,
        )  # fmt: skip
        program = make_program(config, STARTRAIL, gpu_topology("h100", 8).devices)
        found = compile_step(program).memory_analysis()
        peaks[objective] = found.temp_size_in_bytes + found.argument_size_in_bytes
        estimates[objective] = program.memory().device_bytes
    assert peaks["policy"] - peaks["next_token"] <= 7 * 4 * TOKENS
    assert estimates["policy"] - estimates["next_token"] == 4 * 4 * TOKENS


@pytest.mark.parametrize(("remat", "times"), [("attention_saved", 1), ("full", 2)])
def test_attention_that_is_saved_is_not_computed_again(remat, times):
    """Four kernels at most in the first round of a layer, then one in each; with "full" twice."""
    program = hlo.parse_module(compiled(remat=remat)[1].as_text())
    calls = LAYERS * (4 + STARTRAIL.ring - 1)
    assert runs(program, program.entry, ATTENTION) == times * calls
    assert runs(program, program.entry, ITS_GRADIENTS) == calls


@pytest.mark.parametrize("degrees", [STARTRAIL, ULYSSES])
def test_offload_moves_what_is_saved_to_the_host(degrees):
    """The input of a layer, the output of attention, once, and its log-sum-exp."""
    program, _ = compiled(degrees, offload=True)
    saved = program.memory().host_bytes
    assert saved == LAYERS * TOKENS * (2 * 1024 * 2 + 8 * 4)
    kept, offloaded = memory(degrees=degrees), memory(degrees=degrees, offload=True)
    assert kept.host_temp_size_in_bytes == 0
    assert offloaded.host_temp_size_in_bytes == saved
    assert kept.temp_size_in_bytes - offloaded.temp_size_in_bytes > saved / 2


def test_moments_on_the_host_take_no_memory_of_the_device():
    numbers = 2 * 4  # Two counts of steps stay on the device.
    for offloads in (False, True):
        program = compiled(offload_optimizer=offloads)[0]
        memory = compile_step(program).memory_analysis()
        formula = program.memory()
        stays = numbers * offloads
        assert memory.host_argument_size_in_bytes == formula.host_bytes - stays
        assert memory.argument_size_in_bytes - stays == formula.state_bytes + formula["batch"]
        assert bool(formula.host_bytes) == offloads


def test_offload_repeats_the_exchange_of_the_output_but_not_attention():
    setting = {"degrees": ULYSSES, "offload": True}
    program = hlo.parse_module(compiled(**setting)[1].as_text())
    assert runs(program, program.entry, ATTENTION) == LAYERS
    assert runs(program, program.entry, ITS_GRADIENTS) == LAYERS
    output = 7 * TOKENS * 1024 * 2 // 8
    exchanged = [sent("all_to_all", {"head"}, **setting | {"offload": x}) for x in (False, True)]
    # Query, key and value, forward and again backward; the output; and the gradients of all four.
    assert exchanged == [LAYERS * 11 * output, LAYERS * 12 * output]


def test_nothing_is_computed_again_for_what_waits_on_the_host():
    """XLA names what it computes again `.remat`. It takes the host's 129 GiB for the device's."""
    config = make_config(
        MODEL | {"layers": 256}, seq_len=2**20, batch_size=1, data=DataConfig(mask_documents=False),
        zero=3, remat="attention_saved", offload=True, tile=2048,
    )  # fmt: skip
    program = make_program(config, STARTRAIL, gpu_topology("h100", 8).devices)
    step = program.train_step.lower(program.state_shapes, program.batch_shapes).compile()
    assert step.memory_analysis().host_temp_size_in_bytes == 2**25 * (2 * 1024 * 2 + 8 * 4)
    computations = hlo.parse_module(step.as_text()).computations.values()
    assert not [x.name for found in computations for x in found if ".remat" in x.name]


def test_tiles_keep_logits_from_existing():
    """Logits of 2048 tokens and 32768 words would take 256 MiB in float32."""
    setting = {"degrees": st.Degrees(data=8), "vocab_size": 32_768, "width": 256}
    whole, tiled = (memory(tile=tile, **setting).temp_size_in_bytes for tile in (None, 128))
    assert whole - tiled > 3 * TOKENS * 32_768 * 4 // 4
    text = compiled(tile=128, **setting)[1].as_text()
    assert "[1,128,32768]" in text
    assert "2048,32768]" not in text


def weight_sizes(vector=1, matrix=1):
    """Sizes of all layers' weights, and of the others, in units of `vector` and `matrix`."""
    sizes = {True: 0, False: 0}
    for path, shape in weight_shapes(make_config(MODEL)).items():
        in_layers = path.startswith("blocks/")
        sizes[in_layers] += math.prod(shape) * (vector if len(shape) - in_layers == 1 else matrix)
    return sizes[True], sizes[False]


def gathered():
    """Bytes of all layers' weights as they are gathered, and of the others."""
    return weight_sizes(vector=4, matrix=2)


def sent(kind, over, where=None, **changes):
    """Bytes that a device receives in a step through one kind of collective over some axes."""
    program, executable = compiled(**changes)
    return sum(
        transfer.runs * transfer.received_bytes
        for transfer in read_roofline(executable.as_text(), GPUS["h100"]).collectives
        if transfer.kind == kind
        and transfer.axes(program.attention.mesh) == set(over)
        and where in (None, transfer.computation)
    )


def test_level_3_gathers_bfloat16_in_both_passes_and_sums_float32_by_layers():
    layers, ends = gathered()
    assert sent("all_gather", EVERYWHERE) == 7 * (2 * layers + ends) // 8
    layers, ends = weight_sizes()
    assert sent("reduce_scatter", EVERYWHERE) == 7 * 4 * (layers + ends) // 8
    # XLA takes the first of three turns out of the loop, so that two layers are summed inside.
    in_entry = 7 * 4 * (layers // LAYERS + ends) // 8
    assert sent("reduce_scatter", EVERYWHERE, where=ENTRY) == in_entry


def test_level_1_gathers_bfloat16_and_sums_float32_once_after_all_parts():
    layers, ends = weight_sizes()
    setting = {"zero": 1, "gradient_accumulation": 2}
    assert sent("all_gather", EVERYWHERE, **setting) == 7 * sum(gathered()) // 8
    for where in (ENTRY, None):
        assert sent("reduce_scatter", EVERYWHERE, where, **setting) == 7 * 4 * (layers + ends) // 8


def test_gpt_7b_fits_where_the_arithmetic_says(capsys):
    """The whole step of 512K tokens on 64 H200, compared with the estimate printed beside it."""
    benchmark.main(["gpt_7b", "--mesh.c", "4", "--memory", "--details"])
    title, _, columns, row, *details = capsys.readouterr().out.splitlines()
    assert (
        title == "gpt_7b, 524288 tokens, 64 x h200: group 4, ring 4, team 4; remat products_saved"
    )
    assert columns.split() == ["state", "rest", "host", "peak", "formula"]
    _, state, rest, host, peak, formula = row.split()
    # 12 bytes for each of 6.74e9 parameters, divided by 64 devices.
    assert (state, host) == ("1.18", "0.00")
    assert float(peak) <= float(state) + float(rest) + 0.01
    assert 0.9 < float(peak) / float(formula) < 1.1
    assert any(line.startswith("saved for the backward pass") for line in details)


@pytest.mark.parametrize(
    "words",
    [
        "llama3_8b --seq-len 131072 --model.windows 512 512 none --model.layers 12",
        "qwen3_5_9b_1m --model.layers 8",
    ],
)
def test_layers_of_a_period_take_memory_one_after_another(words, capsys):
    """Without an order, XLA would recompute all layers of a period at once: 1.5 times as much."""
    remat = "--remat attention_saved --target h100 --devices 8 --memory"
    benchmark.main([*words.split(), *remat.split()])
    row = capsys.readouterr().out.splitlines()[3]
    *_, peak, formula = map(float, row.split()[1:])
    assert 0.9 < peak / formula < 1.1


@pytest.mark.parametrize("remat", ["products_saved", "attention_saved"])
def test_a_dit_of_texts_takes_the_memory_of_its_plan(remat, capsys):
    words = "dit_1b --model.classes 0 --model.text-dim 4096 --data.text-tokens 120 --mesh.c 2"
    words = f"{words} --size 8 256 256 --remat {remat} --target h100 --devices 8 --memory"
    benchmark.main(words.split())
    row = capsys.readouterr().out.splitlines()[3]
    *_, peak, formula = map(float, row.split()[1:])
    assert 0.9 < peak / formula < 1.1


def test_attention_to_texts_is_one_kernel_whose_keys_are_as_many_as_the_tokens_of_each_text():
    sizes = dict(channels=16, width=1024, heads=8, mlp_width=1024, text_dim=64, dtype="bfloat16")
    changes = dict(text_tokens=120, size=(1, 64, 128), zero=3, remat="attention_saved")
    config = make_text_config(sizes, batch_size=2, **changes)
    program = make_program(config, st.Degrees(ring=2), gpu_topology("h100", 8).devices[:2])
    found = [
        x.attributes
        for computation in hlo.parse_module(
            compile_gradients(program).as_text()
        ).computations.values()
        for x in computation
        if f'custom_call_target="{ATTENTION}"' in x.attributes
    ]
    # 2 rows of 1024 queries, keys in tiles of 128, and the numbers of queries and keys.
    wanted = "bf16[2,1024,8,128]{3,2,1,0}, bf16[2,128,8,128]{3,2,1,0}, bf16[2,128,8,128]{3,2,1,0}"
    assert sum(f"{wanted}, s32[2]{{0}}, s32[2]{{0}}" in x for x in found) == 1
