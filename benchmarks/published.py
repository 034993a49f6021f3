"""What others published with exact settings, and what the planner says for the same settings.

    python benchmarks/published.py     # the table of docs/planner.md

Each row has two predictions for the same model, GPUs, lengths, degrees, ZeRO and recomputation:
this program's, as the planner makes them, and the published program's, with the rates of its own
kernels and what it keeps. Nothing is fitted to a row: a rate comes from a source that does not
contain it.
A number is within 15 % if the second prediction over what was published is 0.85 to 1.15.

Model FLOPs of a token, as NeMo counted them in 2024 for its TFLOP/s, with N weights in matrix
products, L layers of Q heads of H channels, and T tokens:

    6 N + 12 L Q H T

These are all pairs of tokens; a causal mask shows half of them, and kernels compute no others. The
TFLOP/s of a prediction are these FLOPs over its seconds and GPUs.

Where gradients are accumulated, one part of the batch is planned. So many parts take so many times
as long, but for the optimizer and, below ZeRO 2, for the sums of gradients.

Two choices matter:

* Which attention kernel NeMo ran in March 2024 is not published. TransformerEngine had
  FlashAttention-2, and a cuDNN older than that of [1]. With the rates of cuDNN in [1], the six rows
  would be 1.37 to 1.58 in place of 0.99 to 1.05.
* SDPA counts as half as fast as cuDNN; [2] says 1.7 to 2.3 times. That makes Llama 3 70B 0.83 to
  0.88, and Qwen3-8B with SDPA 0.96 to 1.28.

References:
    * [1] FlashAttention-3, https://arxiv.org/abs/2407.08608, figures 5 and 6: FlashAttention-2,
      full attention with heads of 128 channels, on an H100 SXM.
    * [2] https://github.com/huggingface/transformers/pull/48163 (20 August 2026): on Hopper, cuDNN
      is 1.7 to 2.3 times as fast as the FlashAttention kernel that SDPA takes by default.
    * [3] https://github.com/stas00/ml-engineering, "When is it worth upgrading GPUs": the largest
      rate of matrix products is 794.5 TFLOP/s in bfloat16 and 1,453.4 in FP8 on an H100 or H200.
    * [4] https://github.com/NVIDIA/NeMo, nemo/utils/flops_formulas.py: the formula above; from 2025
      on, it counts half of the pairs.
    * [5] transformers, loss/loss_utils.py: logits are made float32 for the loss. PyTorch then keeps
      the 16-bit logits and float32 log-probabilities, and makes two float32 gradients of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from configs import RECIPES
from models.config import GPTConfig
from models.parts.ssd import SSDConfig
from plan import find_run
from startrail_jax.devices.degrees import ROLES
from trainer.planner.gpt import sizes_of_gpt
from trainer.planner.grid import Call
from trainer.planner.hardware import Cluster, Curve, Gpu, find_gpu
from trainer.planner.models import ModelSizes
from trainer.planner.quantities import GIB
from trainer.planner.search import Candidates, Prediction, Search

NEAR = 0.15
"""A prediction is close if it is at most this share away from what was published."""
_PEAK = 989e12
"""16-bit FLOP/s of an H100."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels of a published program: where they differ from this program's."""

    name: str
    attention: Mapping[int, Curve] | None = None
    """head_dim -> rates of attention, as in `Gpu`; None for those of cuDNN in the planner."""
    products: float = 1.0
    """Rate of matrix products over that of bfloat16."""
    logit_bytes: int | None = None
    """Bytes that are kept for each logit of a device; None for what the planner counts."""

    def on(self, gpu: Gpu) -> Gpu:
        """The GPU with the rates of these kernels, as they were published."""
        return replace(
            gpu,
            attention=self.attention or gpu.attention,
            matrix_efficiency=self.products * gpu.matrix_efficiency,
        )


# [1]: TFLOP/s of FlashAttention-2, forward and backward.
_FLASH_2 = {
    512: (309, 214),
    1024: (350, 260),
    2048: (362, 291),
    4096: (368, 310),
    8192: (370, 318),
    16384: (370, 322),
}
FLASH_2: Mapping[int, Curve] = {
    128: {n: (a * 1e12 / _PEAK, b * 1e12 / _PEAK) for n, (a, b) in _FLASH_2.items()}
}
# [2]: half of cuDNN's rates, the middle of 1.7 to 2.3.
SDPA: Mapping[int, Curve] = {
    head_dim: {n: (a / 2, b / 2) for n, (a, b) in curve.items()}
    for head_dim, curve in find_gpu("h100").attention.items()
}
CUDNN = Kernels(name="cuDNN")
"""Those of JAX, of TransformerEngine from 2025 on, and of TRL's steps but for one."""
OF_SDPA = Kernels(name="SDPA", attention=SDPA)
# [3] for products; the head and attention are not FP8.
OF_NEMO = Kernels(name="FP8 products, FlashAttention-2", attention=FLASH_2, products=1453.4 / 794.5)
# [5]: 2 bytes of logits, and 4 of log-probabilities and of each of two gradients.
OF_TRANSFORMERS = Kernels(name="FlashAttention-2", attention=FLASH_2, logit_bytes=14)
_PLANNED_LOGIT_BYTES = 8
"""Bytes of a logit that the planner counts: float32 outputs and their gradient."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where numbers were published."""

    name: str
    url: str
    date: str


AUTOMODEL = Source(
    name="NeMo Automodel",
    url="https://docs.nvidia.com/nemo/automodel/v0.7/performance/performance-summary.md",
    date="version 0.7.0, October 2026",
)
ULYSSES = Source(
    name="Hugging Face", url="https://huggingface.co/blog/ulysses-sp", date="9 March 2026"
)
MAXTEXT = Source(
    name="MaxText", url="https://github.com/openxla/xla/pull/31108", date="9 September 2025"
)
BRIDGE = Source(
    name="Megatron-Bridge",
    url="https://github.com/NVIDIA-NeMo/Megatron-Bridge",
    date="model cards, 2026",
)
NEMO = Source(
    name="NeMo",
    url="https://github.com/NVIDIA/NeMo/blob/main/docs/source/performance/"
    "performance_long_sequence.md",
    date="container 24.03.01, 2024",
)
TRL = Source(name="TRL", url="https://github.com/huggingface/trl/pull/6845", date="21 August 2026")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published number, with all settings that it depends on."""

    source: Source
    setting: str
    """What all rows of a line of the table share, in a few words."""
    case: str
    """What this row has of its own."""
    model: ModelSizes
    gpu: str
    nodes: int = 1
    gpus_per_node: int = 8
    seq_len: int
    rows: int
    """Sequences that all GPUs treat at a time."""
    parts: int = 1
    """Parts of a batch that are computed one after another."""
    degrees: Mapping[str, int] = field(default_factory=dict)
    """Degrees above 1."""
    zero: int
    remat: str
    offload: bool = False
    tiled: bool = False
    offload_optimizer: bool = False
    keeps_optimizer: bool = False
    """True if the published program keeps on the GPU the moments that its text puts on the host."""
    published: float | None
    """None if it ran out of memory."""
    unit: str
    """"s", seconds of a step; "TFLOP/s" of a GPU; "GiB" of a GPU."""
    kernels: Kernels

    @cached_property
    def ours(self) -> float:
        """What is predicted for this program, in `unit`."""
        return self._amount(None, offload_optimizer=self.offload_optimizer)

    @cached_property
    def theirs(self) -> float:
        """What is predicted for the published program, in `unit`."""
        offloads = self.offload_optimizer and not self.keeps_optimizer
        return self._amount(self.kernels, offload_optimizer=offloads)

    @property
    def ratio(self) -> float | None:
        """The prediction for the published program over what was published."""
        return None if self.published is None else self.theirs / self.published

    @property
    def is_near(self) -> bool:
        """Whether the prediction for the published program is within 15 %, or does not fit."""
        if self.published is None:
            return self.theirs * GIB > find_gpu(self.gpu).memory_bytes
        return abs(self.theirs / self.published - 1) <= NEAR

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def flops(self) -> float:
        """Model FLOPs of a step, with all pairs: see the formula above."""
        model = self.model
        weights = model.matrices + model.width * model.outputs
        pairs = 12 * len(model.layer_windows) * model.heads * model.head_dim * self.seq_len
        return (6 * weights + pairs) * self.seq_len * self.rows * self.parts

    def _seconds(self, kernels: Kernels | None, *, offload_optimizer: bool) -> float:
        """Seconds of a step of all parts, with some kernels or this program's."""
        part = self._predict(kernels, offload_optimizer=offload_optimizer)
        once = part.parts["optimizer"]
        if self.zero < 2:
            once += part.parts["zero waits"]
        if offload_optimizer and not self.offload:
            once += part.parts["offload waits"]
        return self.parts * (part.seconds - once) + once

    def _amount(self, kernels: Kernels | None, *, offload_optimizer: bool) -> float:
        if self.unit in ("s", "TFLOP/s"):
            seconds = self._seconds(kernels, offload_optimizer=offload_optimizer)
            rate = self.flops / seconds / self.num_gpus / 1e12
            return seconds if self.unit == "s" else rate
        logits = self.seq_len * self.rows * self.model.outputs // self.num_gpus
        kept = (kernels and kernels.logit_bytes) or _PLANNED_LOGIT_BYTES
        memory = self._predict(kernels, offload_optimizer=offload_optimizer).memory_bytes
        return (memory + logits * (kept - _PLANNED_LOGIT_BYTES)) / GIB

    def _predict(self, kernels: Kernels | None, *, offload_optimizer: bool) -> Prediction:
        """A step of one part."""
        gpu = find_gpu(self.gpu)
        cluster = Cluster(
            nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            gpu=kernels.on(gpu) if kernels else gpu,
            port_rate=400e9 / 8,
            ports=self.gpus_per_node,
        )
        options = Search(
            degrees=dict.fromkeys(ROLES, 1) | dict(self.degrees),
            zero=(self.zero,),
            remat=(self.remat,),
            offload=(self.offload,),
            tiled=(self.tiled,),
            offload_optimizer=offload_optimizer,
            baselines=False,
        )
        call = Call(model=self.model, seq_len=self.seq_len, batch=self.rows)
        found = Candidates(cluster, call, options)
        return found.prediction(int(np.argmin(found.seconds)))


def qwen3(size: str) -> ModelSizes:
    """Sizes of a Qwen3, from its config.json."""
    changes = {
        "0.6B": dict(width=1024, layers=28, heads=16, mlp_width=3072, tied_head=True),
        "4B": dict(width=2560, mlp_width=9728, tied_head=True),
        "8B": {},
        "32B": dict(width=5120, layers=64, heads=64, mlp_width=25_600),
    }
    model = RECIPES["qwen3_8b_1m"]().model
    assert isinstance(model, GPTConfig)
    return sizes_of_gpt(replace(model, **changes[size]), name=f"Qwen3 {size}")


def nemotron_nano_4b() -> ModelSizes:
    """Nemotron 3 Nano 4B: its 17 MLPs are spread over 25 layers here, with as many weights."""
    # Megatron-Bridge's recipe: M is Mamba-2, * attention, - an MLP.
    pattern = "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"
    names: dict[str, Any] = {"M": "ssd", "*": "attention"}
    mixers = tuple(names[x] for x in pattern if x != "-")
    model = GPTConfig(
        vocab_size=131_072,
        width=3136,
        layers=len(mixers),
        heads=40,
        kv_heads=8,
        head_dim=128,
        mlp_width=12_544 * pattern.count("-") // len(mixers) // 2 * 2,
        mlp="gelu",
        mixers=mixers,
        ssd=SSDConfig(heads=96, head_dim=80, groups=8, state_dim=128),
    )
    return sizes_of_gpt(model, name="Nemotron 3 Nano 4B")


def _automodel() -> list[Row]:
    """Model FLOPs per GPU, 389 TFLOP/s, are the same number with half of the pairs."""
    row = Row(
        source=AUTOMODEL,
        setting="Llama 3 70B, 64 H100",
        case="8K",
        model=find_run("llama3_70b").sizes,
        gpu="h100",
        nodes=8,
        seq_len=8192,
        rows=32,
        parts=4,
        degrees=dict(data=32, ring=2),
        zero=3,
        remat="full",
        published=18.90,
        unit="s",
        kernels=OF_SDPA,
    )
    return [row]


_ULYSSES = {32: (7872, 35.0), 64: (13_396, 50.5), 96: (None, 66.0), 128: (None, None)}
"""Thousands of tokens -> tokens/s, and GB that must be GiB: at 128K the page needs "about 81" and
runs out of memory, of which the GPU has 85.5e9 bytes."""


def _ulysses() -> list[Row]:
    """Qwen3-4B, 8 rows one after another. The page says that the optimizer is on the host; but its
    one GPU takes 76.4 GB for 8K tokens, which are 16 bytes for each weight and the logits."""
    rows: list[Row] = []
    for thousands, (rate, memory) in _ULYSSES.items():
        tokens = thousands * 1024
        amounts = [(memory, "GiB")] if rate is None else [(8 * tokens / rate, "s"), (memory, "GiB")]
        rows += [
            Row(
                source=ULYSSES,
                setting="Qwen3-4B, 4 H100",
                case=f"{thousands}K",
                model=qwen3("4B"),
                gpu="h100",
                gpus_per_node=4,
                seq_len=tokens,
                rows=1,
                parts=8,
                degrees=dict(head=4),
                zero=3,
                remat="full",
                offload_optimizer=True,
                keeps_optimizer=True,
                published=published,
                unit=unit,
                kernels=OF_TRANSFORMERS,
            )
            for published, unit in amounts
        ]
    return rows


def _maxtext() -> list[Row]:
    """The command has per_device_batch_size=1, remat_policy=minimal_flash and cudnn_flash_te."""
    cases = {"8K": 0.70, "SHARP": 0.58}
    return [
        Row(
            source=MAXTEXT,
            setting="Llama 3 8B, 8 B200",
            case=case,
            model=find_run("llama3_8b").sizes,
            gpu="b200",
            seq_len=8192,
            rows=8,
            degrees=dict(ring=8),
            zero=3,
            remat="products_saved",
            published=published,
            unit="s",
            kernels=CUDNN,
        )
        for case, published in cases.items()
    ]


def _bridge() -> list[Row]:
    """Packed rows of 32,768 tokens, exchanged between heads; nothing is recomputed."""
    nano, qwen = dict(data=2, tensor=2, head=2), dict(tensor=4, head=2)
    cases = (
        ("Nemotron-Nano-4B", nemotron_nano_4b(), nano, 2, 5.576),
        ("Qwen3-8B", qwen3("8B"), qwen, 1, 71.67),
    )
    return [
        Row(
            source=BRIDGE,
            setting="8 H100, 32K",
            case=case,
            model=model,
            gpu="h100",
            seq_len=32_768,
            rows=rows,
            parts=8 // rows,
            degrees=degrees,
            zero=1,
            remat="products_saved",
            published=published,
            unit="s",
            kernels=CUDNN,
        )
        for case, model, degrees, rows, published in cases
    ]


_NEMO = (
    (32, 32, 2, 8, 2, 610),
    (64, 64, 4, 8, 2, 574),
    (128, 128, 4, 8, 4, 555),
    (256, 256, 4, 8, 8, 549),
    (512, 512, 8, 4, 16, 549),
    (1024, 1024, 8, 4, 32, 536),
)
"""Thousands of tokens, GPUs, TP, DP, CP, TFLOP/s."""
_NEMO_TOKENS = 4 * 2**20
"""Tokens of a step."""


def _nemo() -> list[Row]:
    return [
        Row(
            source=NEMO,
            setting="Llama 2 7B FP8, 32 to 1,024 H100",
            case=f"{thousands}K",
            model=find_run("gpt_7b").sizes,
            gpu="h100",
            nodes=gpus // 8,
            seq_len=thousands * 1024,
            rows=data,
            parts=max(_NEMO_TOKENS // (thousands * 1024 * data), 1),
            degrees=dict(data=data, tensor=tensor, ring=ring),
            zero=1,
            remat="products_saved",
            published=rate,
            unit="TFLOP/s",
            kernels=OF_NEMO,
        )
        for thousands, gpus, tensor, data, ring, rate in _NEMO
    ]


def _trl() -> list[Row]:
    """One row in a ring of all GPUs. Whole layers are recomputed, attention too, and their inputs
    are on the host (accelerate#4172, #4175); attention is cuDNN's, and SDPA's own takes 606 s
    (transformers#48324)."""
    cases = (
        ("8B", 1, 1, 372, CUDNN),  # 364 to 380 s.
        ("8B", 1, 1, 606, OF_SDPA),
        ("8B", 2, 2, 696, CUDNN),
        ("8B", 4, 4, 1346, CUDNN),
        ("32B", 1, 1, 1295, CUDNN),
        ("0.6B", 1, 1, 137, CUDNN),
        ("0.6B", 4, 1, 2135, CUDNN),
    )
    return [
        Row(
            source=TRL,
            setting="Qwen3, 8 to 32 H100",
            case=f"{size}-{millions}M" + "-SDPA" * (kernels is OF_SDPA),
            model=qwen3(size),
            gpu="h100",
            nodes=nodes,
            seq_len=millions * 2**20,
            rows=1,
            degrees=dict(ring=8 * nodes),
            zero=3,
            remat="full",
            offload=True,
            tiled=True,
            published=seconds,
            unit="s",
            kernels=kernels,
        )
        for size, millions, nodes, seconds, kernels in cases
    ]


@cache
def all_rows() -> tuple[Row, ...]:
    """Every row."""
    return (*_automodel(), *_ulysses(), *_maxtext(), *_bridge(), *_nemo(), *_trl())


def _shown(amounts: Iterable[float | None]) -> str:
    """Numbers of three digits or more; None is a step that did not fit."""
    return ", ".join("none" if x is None else _three_digits(x) for x in amounts)


def _three_digits(amount: float) -> str:
    whole = f"{amount:.0f}"
    return whole if amount >= 100 else f"{amount:.{3 - len(str(int(amount)))}f}"


def table(rows: Sequence[Row]) -> list[str]:
    """A line for the rows of each setting and unit, in Markdown, and the number of rows that are
    close."""
    lines = ["| setting | cases | unit | published | this program | its own kernels | ratio |"]
    lines.append(f"|{'---|' * 7}")
    groups: dict[tuple[Source, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.source, row.setting, row.unit), []).append(row)
    for (source, setting, unit), group in groups.items():
        ratios = ("none" if x.ratio is None else f"{x.ratio:.2f}" for x in group)
        cells = [f"[{source.name}]({source.url}): {setting}", ", ".join(x.case for x in group)]
        cells += [unit, _shown(x.published for x in group), _shown(x.ours for x in group)]
        cells += [_shown(x.theirs for x in group), ", ".join(ratios)]
        lines.append(f"| {' | '.join(cells)} |")
    numbers = [row for row in rows if row.published is not None]
    near = sum(row.is_near for row in numbers)
    return [*lines, "", f"{near} of {len(numbers)} numbers are within 15 %."]


def main() -> None:
    print("\n".join(table(all_rows())))


if __name__ == "__main__":
    main()
