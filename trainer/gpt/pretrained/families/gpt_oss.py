"""gpt-oss: experts in one tensor with biases, numbers of 4 bits, and YaRN between channels. Imports
no jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Shaped

from models.config import GPTConfig
from models.parts.experts import ExpertsConfig
from trainer.gpt.pretrained.families.experts import COUNTS, LIKE_MLP, LOSSES, ExpertLayers, replaced
from trainer.gpt.pretrained.families.family import SILU, WINDOWS, Family
from trainer.gpt.pretrained.rope import OneBase
from trainer.weights.files import Tensors
from trainer.weights.places import AS_IT_IS, IN_BOTH, TRANSPOSED, Groups

IN_TURNS = ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias")
"""Tensors in whose last dimension gates and projections up take turns."""
_BY_EXPERT: Groups = ((0,), (1,), (2,))
TENSORS: Mapping[str, tuple[str, Groups]] = {
    "mlp/router": ("mlp.router.weight", TRANSPOSED),
    "mlp/router_bias": ("mlp.router.bias", AS_IT_IS),
    "mlp/expert_gate/kernel": (IN_TURNS[0], _BY_EXPERT),
    "mlp/expert_up/kernel": (IN_TURNS[0], _BY_EXPERT),
    "mlp/expert_down/kernel": ("mlp.experts.down_proj", _BY_EXPERT),
    "mlp/expert_gate_bias": (IN_TURNS[1], IN_BOTH),
    "mlp/expert_up_bias": (IN_TURNS[1], IN_BOTH),
    "mlp/expert_down_bias": ("mlp.experts.down_proj_bias", IN_BOTH),
}
BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the names of two tensors in the format MXFP4: numbers, and exponents of their
blocks."""
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The numbers of 4 bits; the higher half of a byte comes second (Open Compute Project,
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf)."""


@dataclass(frozen=True)
class BetweenPairs(OneBase):
    """YaRN may begin and end its blend between pairs of channels."""

    truncate: ClassVar[tuple[Any, ...]] = (True, False, None)

    def fits(self, model: GPTConfig) -> bool:
        """True if a model in its simplest form has positions of this form."""
        return super().fits(replace(model, rope=replace(model.rope, truncate=True)))


@dataclass(frozen=True, kw_only=True)
class GptOss(Family):
    """gpt-oss, whose files are published in MXFP4."""

    def importable(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values of a file, without the values that become untrue when its tensors are
        imported."""
        packing = written.get("quantization_config")
        if isinstance(packing, dict) and packing.get("quant_method") == "mxfp4":
            return {key: x for key, x in written.items() if key != "quantization_config"}
        return written

    def takes_turns(self, tensor: str) -> bool:
        """True if the weights of a tensor take turns in its last dimension."""
        return tensor in IN_TURNS

    def adapt(self, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        """The tensors of [experts, width, 2 * hidden] that transformers makes of MXFP4."""
        unpacked: dict[str, tuple[Any, str]] = {}
        used = set()
        for name in shapes.keys() - tensors.shapes.keys():
            blocks, scales = name + BLOCKS, name + SCALES
            if blocks in tensors.shapes and scales in tensors.shapes:
                experts, width, outputs = shapes[name]
                if tensors.shapes[blocks] == (experts, outputs, width // 32, 16):
                    matrices = _Unpacked(tensors.slices[blocks], tensors.slices[scales])
                    unpacked[name] = matrices, "BF16"
                    used |= {blocks, scales}
        return replaced(tensors, shapes, unpacked, used)


class _Unpacked:
    """The transpose of matrices in MXFP4, whose rows have blocks of 32 numbers and an exponent."""

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales

    def __getitem__(self, index: tuple[slice, ...]) -> Shaped[np.ndarray, "experts inputs outputs"]:
        experts, inputs, outputs = index
        first, last = inputs.start // 32, -(-inputs.stop // 32)
        cover = (experts, outputs, slice(first, last))
        packed = np.asarray(self._blocks[(*cover, slice(0, 16))])
        exponents = np.asarray(self._scales[cover]).astype(np.int32) - 127
        numbers = FP4[np.stack([packed & 15, packed >> 4], axis=-1)]
        numbers = np.ldexp(numbers.reshape(*packed.shape[:-1], 32), exponents[..., None])
        rows = numbers.reshape(*packed.shape[:2], -1)
        return rows[:, :, inputs.start - 32 * first : inputs.stop - 32 * first].swapaxes(1, 2)


GPT_OSS = GptOss(
    architecture="GptOssForCausalLM",
    # Published files have the last two, which nobody reads.
    keys=(
        *(*WINDOWS, *COUNTS, *LIKE_MLP, *LOSSES),
        *("experts_per_token", "initial_context_length"),
    ),
    only=SILU | {"swiglu_limit": (7.0,), "swiglu_alpha": (1.702,), "attention_bias": (True,)},
    options={"qkv_bias": True, "out_bias": True, "sinks": True},
    rope=BetweenPairs(),
    experts=ExpertLayers(
        config=ExpertsConfig(activation="clamped", biases=True),
        sizes=LIKE_MLP,
        count=COUNTS[1],
        tensors=TENSORS,
    ),
)
