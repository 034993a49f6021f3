"""Layers of experts in a config.json, and in files of tensors. Imports no jax."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Shaped

from models.config import GPTConfig
from models.parts.experts import ExpertsConfig
from trainer.gpt.pretrained.plain import pattern
from trainer.gpt.pretrained.values import ConfigValues
from trainer.weights.files import Tensors
from trainer.weights.places import TRANSPOSED, Groups

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of the number of experts; a file has one of them."""
SIZES = {"num_experts_per_tok": "top_k", "moe_intermediate_size": "width"}
WITH_SHARED = SIZES | {"shared_expert_intermediate_size": "shared_width"}
LIKE_MLP = {"num_experts_per_tok": "top_k", "intermediate_size": "width"}
"""Keys of sizes -> settings of `ExpertsConfig`."""
BALANCE, NORMALISED_SHARES = "router_aux_loss_coef", "norm_topk_prob"
DENSE = ("mlp_only_layers", "decoder_sparse_step")
"""Keys that say which layers have no experts."""
LOSSES = (BALANCE, "output_router_logits")
"""Keys of the balancing loss, which transformers adds if the second one is set."""
OPTIONAL = ("groups", "top_groups", "share_scale", "latent_width")
"""Options of layers of experts that few families have."""
TENSORS: Mapping[str, tuple[str, Groups]] = {
    "mlp/router": ("mlp.gate.weight", TRANSPOSED),
    "mlp/expert_gate/kernel": ("mlp.experts.{}.gate_proj.weight", TRANSPOSED),
    "mlp/expert_up/kernel": ("mlp.experts.{}.up_proj.weight", TRANSPOSED),
    "mlp/expert_down/kernel": ("mlp.experts.{}.down_proj.weight", TRANSPOSED),
    "mlp/shared/gate/kernel": ("mlp.shared_expert.gate_proj.weight", TRANSPOSED),
    "mlp/shared/up/kernel": ("mlp.shared_expert.up_proj.weight", TRANSPOSED),
    "mlp/shared/down/kernel": ("mlp.shared_expert.down_proj.weight", TRANSPOSED),
    "mlp/shared_gate/kernel": ("mlp.shared_expert_gate.weight", TRANSPOSED),
}
"""Weight of a layer -> tensor of a layer. If a name has braces, each expert has its own tensor."""
_OF_ONE = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, kw_only=True)
class ExpertLayers:
    """The layers of experts of a family."""

    config: ExpertsConfig = field(default_factory=ExpertsConfig)
    """Options of the layers beside their sizes."""
    sizes: Mapping[str, str] = field(default_factory=lambda: SIZES)
    """Keys of sizes -> settings of `ExpertsConfig`."""
    count: str = COUNTS[0]
    """The key of the number of experts in an export."""
    tensors: Mapping[str, tuple[str, Groups]] = field(default_factory=lambda: TENSORS)
    """Weight of a layer -> tensor of a layer."""
    varied: ClassVar[tuple[str, ...]] = ()
    """Options that a file gives beside sizes, as few families' do."""

    def fits(self, model: GPTConfig, keys: tuple[str, ...]) -> bool:
        """True if a family with these keys has the layers of experts of a model."""
        experts, feeds = model.experts, model.layer_feed_forwards
        same = ("activation", "biases", "shared_gate", "scores", "has_choice_bias")
        # Options that others than the family's config give have the values of most families.
        same += tuple(x for x in OPTIONAL if x not in self.varied)
        return (
            all(getattr(experts, name) == getattr(self.config, name) for name in same)
            and (experts.shared_width > 0) == (self.config.shared_width > 0)
            and (experts.normalised or NORMALISED_SHARES in keys)
            and self.fits_dense(feeds, keys)
        )

    def fits_dense(self, feeds: tuple[str, ...], keys: tuple[str, ...]) -> bool:
        """True if the layers without experts may be these."""
        return "mlp" not in feeds or DENSE[0] in keys

    def read(self, values: ConfigValues, keys: tuple[str, ...], layers: int) -> dict[str, Any]:
        """The options of a model for its layers of experts, and the list of these layers."""
        values = ConfigValues({key: values.values.get(key) for key in keys}, values.name)
        read = values.values
        sizes: dict[str, Any] = {name: values.number(key) for key, name in self.sizes.items()}
        count = next((x for x in COUNTS if read.get(x) is not None), COUNTS[0])
        sizes["count"] = values.number(count)
        if NORMALISED_SHARES in keys:
            sizes["normalised"] = bool(read[NORMALISED_SHARES])
        # transformers adds the loss only if it gives the logits of the router, too.
        sizes["balance_loss"] = values.real(BALANCE) if read.get(LOSSES[1]) else 0.0
        sizes["balance_over"] = "model"
        feeds = self.feeds(values, layers)
        return {"experts": replace(self.config, **sizes), "feed_forwards": pattern(feeds)}

    def feeds(self, values: ConfigValues, layers: int) -> list[str]:
        """The feed-forward of each layer."""
        dense, step = (values.values.get(key) for key in DENSE)
        dense = dense or ()
        if not all(type(x) is int and 0 <= x < layers for x in dense):
            needed = f"a list of numbers of layers, from 0 to {layers - 1}"
            raise values.wrong(DENSE[0], needed, dense)
        step = values.number(DENSE[1], default=1)
        feeds = ["mlp" if i in dense or (i + 1) % step else "experts" for i in range(layers)]
        if "experts" not in feeds:
            raise values.wrong(DENSE[0], "such that a layer has experts", dense)
        return feeds

    def values(self, model: GPTConfig) -> dict[str, Any]:
        """The values of a config.json for experts; a family uses some of them."""
        experts, feeds = model.experts, model.layer_feed_forwards
        factor = experts.balance_loss
        if experts.balance_over == "layer":  # Added up; there, the mean over layers counts.
            factor *= feeds.count("experts")
        return {
            **{key: getattr(experts.of_model(model), name) for key, name in self.sizes.items()},
            self.count: experts.count,
            NORMALISED_SHARES: experts.normalised,
            **dict(zip(DENSE, ([i for i, x in enumerate(feeds) if x == "mlp"], 1), strict=True)),
            **dict(zip(LOSSES, (factor, factor > 0), strict=True)),
        }

    def adapt(self, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        """The tensors under the names that a model of this program needs. Qwen3.5 is published with
        one tensor [experts, 2 * hidden, width] for the gates and the projections up of all experts,
        Qwen3-VL with its transpose, and transformers writes a tensor for each."""
        parts = list(_parts_of_fused(tensors, shapes))
        # One of the two tensors of a layer may be square; both never are.
        turned = {part.layer for part in parts if tensors.shapes[part.source][1:] != part.whole}
        fused: dict[str, tuple[Any, str]] = {}
        for part in parts:
            is_turned = part.layer in turned
            if tensors.shapes[part.source][1:] == part.whole[:: -1 if is_turned else 1]:
                rows = _OfExpert(tensors.slices[part.source], part.expert, part.before, is_turned)
                fused[part.name] = rows, tensors.dtypes[part.source]
        used = {part.source for part in parts if part.name in fused}
        return replaced(tensors, shapes, fused, used)


class _Part(NamedTuple):
    """A tensor of one expert, as rows of a tensor of all experts."""

    name: str
    layer: str
    expert: int
    source: str
    before: int
    """Rows of the expert before it."""
    whole: tuple[int, int]
    """Rows and columns of the expert in the tensor of all, if that is not transposed."""


def _parts_of_fused(tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[_Part]:
    for name in shapes.keys() - tensors.shapes.keys():
        if (of_one := _OF_ONE.fullmatch(name)) is None:
            continue
        layer, expert, which = of_one[1], int(of_one[2]), of_one[3]
        source = f"{layer}.down_proj" if which == "down" else f"{layer}.gate_up_proj"
        if which == "up" and source not in tensors.shapes:  # Of experts without gates.
            source = f"{layer}.up_proj"
        rows, columns = shapes[name]
        count = 2 if source.endswith("gate_up_proj") else 1
        before = rows if count == 2 and which == "up" else 0
        if source in tensors.shapes and tensors.shapes[source][0] > expert:
            yield _Part(name, layer, expert, source, before, (count * rows, columns))


def replaced(
    tensors: Tensors,
    shapes: Mapping[str, tuple[int, ...]],
    parts: Mapping[str, tuple[Any, str]],
    used: set[str],
) -> Tensors:
    """The tensors with `parts`, name -> (slices, type), in place of the `used` ones."""
    return replace(
        tensors,
        shapes={k: x for k, x in tensors.shapes.items() if k not in used}
        | {name: shapes[name] for name in parts},
        dtypes={k: x for k, x in tensors.dtypes.items() if k not in used}
        | {name: dtype for name, (_, dtype) in parts.items()},
        slices={k: x for k, x in tensors.slices.items() if k not in used}
        | {name: slices for name, (slices, _) in parts.items()},
    )


class _OfExpert:
    """Some rows of one expert, from a tensor of all experts, or from its transpose."""

    def __init__(self, tensor: Any, expert: int, before: int, is_turned: bool) -> None:
        self._tensor, self._expert, self._before = tensor, expert, before
        self._is_turned = is_turned

    def __getitem__(self, index: tuple[slice, slice]) -> Shaped[np.ndarray, "rows columns"]:
        rows, columns = index
        rows = slice(rows.start + self._before, rows.stop + self._before)
        expert = slice(self._expert, self._expert + 1)
        if self._is_turned:
            return np.asarray(self._tensor[(expert, columns, rows)])[0].T
        return np.asarray(self._tensor[(expert, rows, columns)])[0]
