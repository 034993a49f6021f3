"""The roofline of compiled programs: on a hand-written text, and of a step compiled for a GPU."""

import pytest

from benchmarks.compiled.deviceless import gpu_topology
from benchmarks.compiled.roofline import ATTENTION, MATRICES, OTHERS, read_roofline
from benchmarks.compiled.run import lowered_step
from gpu_compiler import needs_gpu_compiler
from models.parts.latent import LatentConfig
from programs import make_config
from startrail_jax.devices.degrees import Degrees
from trainer.gpt.config import DataConfig
from trainer.planner.hardware import GPUS

H100 = GPUS["h100"]

PROGRAM = """HloModule jit_f, is_scheduled=true, num_partitions=2

%cut (p0: f32[64,8], p1: s32[]) -> f32[1,8] {
  %p0 = f32[64,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %s = f32[1,8]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,8}
  ROOT %n = f32[1,8]{1,0} negate(%s)
}

%product (p0: f32[64,8], p1: f32[8,16]) -> f32[64,16] {
  %p0 = f32[64,8]{1,0} parameter(0)
  %p1 = f32[8,16]{1,0} parameter(1)
  ROOT %d = f32[64,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%never (x: f32[64,8]) -> pred[] {
  %x = f32[64,8]{1,0} parameter(0)
  ROOT %c = pred[] constant(false)
}

%body (x: f32[64,8]) -> f32[64,8] {
  %x = f32[64,8]{1,0} parameter(0)
  ROOT %c = f32[64,8]{1,0} copy(%x)
}

ENTRY %main (x: f32[64,8], w: f32[8,16], i: s32[]) -> f32[64,16] {
  %x = f32[64,8]{1,0} parameter(0)
  %w = f32[8,16]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %p = (f32[64,8]{1,0}, f32[64,8]{1,0}) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %cut.1 = f32[1,8]{1,0} fusion(%x, %i), kind=kLoop, calls=%cut
  %pd = f32[64,8]{1,0} collective-permute-done(%p)
  %v = f32[64,8]{1,0} while(%x), condition=%never, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %y = f32[64,16]{1,0} fusion(%v, %w), kind=kCustom, calls=%product, metadata={op_name="f/rematted_computation/dot"}
}
"""  # noqa: E501


def test_bytes_and_flops_of_kernels_are_counted():
    found = read_roofline(PROGRAM, H100)
    kernels = {x.name: x for x in found.kernels}
    assert set(kernels) == {"cut.1", "c", "y"}
    # Of the first operand one row is read.
    assert (kernels["cut.1"].kind, kernels["cut.1"].bytes) == (OTHERS, 32 + 4 + 32)
    assert (kernels["c"].runs, kernels["c"].bytes) == (3, 2 * 64 * 8 * 4)
    assert kernels["y"].kind == MATRICES
    assert kernels["y"].flops == 2 * 64 * 8 * 16
    assert kernels["y"].bytes == 4 * (64 * 8 + 8 * 16 + 64 * 16)
    assert found.recomputed_share == 1
    assert found.expanding_seconds == 0
    assert "expanding" not in found.table()
    # The kernel beside the message hides some of it.
    message = 64 * 8 * 4
    assert found.received_bytes == message
    waited = message / H100.inside_rate - kernels["cut.1"].seconds
    assert found.exposed_seconds == pytest.approx(waited)
    table = found.table(largest=1)
    assert table.splitlines()[-1].startswith("c  ")


@pytest.mark.slow
@needs_gpu_compiler
def test_step_for_a_gpu_has_the_flops_of_the_model():
    layers, width, mlp, vocabulary, tokens, heads = 2, 1024, 2048, 2048, 2048, 8
    model = dict(
        vocab_size=vocabulary, width=width, layers=layers, heads=heads, kv_heads=heads,
        head_dim=width // heads, mlp_width=mlp, dtype="bfloat16",
    )  # fmt: skip
    degrees = Degrees(team=2, ring=4)
    config = make_config(
        model, seq_len=8 * tokens, batch_size=1, zero=3, remat="none",
        data=DataConfig(mask_documents=False),
    )  # fmt: skip
    devices = gpu_topology("h100", 8).devices
    found = read_roofline(lowered_step(config, degrees, devices)[1].compile().as_text(), H100)
    flops = {
        kind: sum(x.runs * x.flops for x in found.kernels if x.kind == kind)
        for kind in (ATTENTION, MATRICES)
    }
    # Three products for each weight: the outputs, and the gradients of inputs and of weights.
    weights = layers * (4 * width**2 + 3 * width * mlp) + vocabulary * width
    assert flops[MATRICES] == pytest.approx(6 * weights * tokens, rel=0.01)
    pairs = (8 * tokens) ** 2 / 2 / 8
    assert flops[ATTENTION] == pytest.approx(layers * 3.5 * 4 * pairs * width, rel=0.01)
    assert found.recomputed_share == 0


@pytest.mark.slow
@needs_gpu_compiler
def test_kernels_that_expand_latents_are_counted():
    """Keys and values are made twice, and their gradients taken back to latents and matrices."""
    layers, tokens, heads, devices = 2, 512, 8, 4
    latent = LatentConfig(rank=256, key_dim=128, value_dim=128, rotary_dim=64)
    model = dict(
        vocab_size=2048, width=512, layers=layers, heads=heads, kv_heads=heads, head_dim=64,
        mlp_width=1024, mixers=("latent",), latent=latent, dtype="bfloat16",
    )  # fmt: skip
    config = make_config(
        model, seq_len=devices * tokens, batch_size=1, zero=3, remat="none",
        data=DataConfig(mask_documents=False),
    )  # fmt: skip
    program = lowered_step(config, Degrees(head=devices), gpu_topology("h100", devices).devices)[1]
    found = read_roofline(program.compile().as_text(), H100)
    products = 2 * devices * tokens * (heads // devices) * 256 * (128 + 128)
    counted = sum(x.runs * x.flops for x in found.kernels if x.expands)
    assert counted == pytest.approx(4 * layers * products, rel=1e-12)
    assert 0 < found.expanding_seconds < found.seconds
    share = found.expanding_seconds / found.seconds
    line = f"expanding latents: {found.expanding_seconds:.4f} s, {share:.1%} of the time"
    assert line in found.table().splitlines()
