"""A feed-forward of experts: its options, weights and sizes. `models.experts` computes it.

It keeps nothing while it decodes, and nothing but its inputs between the passes. Beside the sum of
its outputs over `tensor`, it sends the loads of the experts, and with ZeRO 3 either their weights
or its tokens (`--experts`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from models.checks import check_minimum, check_range, check_used
from models.parts import mlp
from models.weights import Model, Weight, below, bias, projection, weight
from startrail_jax.errors import InputError


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Layers whose feed-forward is a set of experts; each token goes to a few of them."""

    count: int = 8
    """Number of experts."""
    top_k: int = 2
    """Number of experts of each token."""
    width: int | None = None
    """Number of hidden channels of an expert. The default is `model.mlp_width`."""
    shared_width: int = 0
    """Number of hidden channels of a shared expert, to which all tokens go. By default there is
    none."""
    shared_gate: bool = False
    """True if the sigmoid of a projection multiplies the output of the shared expert."""
    activation: Literal["swiglu", "clamped", "relu2"] = "swiglu"
    """Activation of the experts: gpt-oss has "clamped", and Nemotron 3 "relu2", the square of a
    ReLU without a gate."""
    latent_width: int | None = None
    """Number of channels that experts read and write: tokens are projected to them, and the sum of
    the outputs back, as in Nemotron 3. The default is the channels of the model, without
    projections."""
    biases: bool = False
    """True if the router and the experts have biases, as in gpt-oss."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns the logits of the router into the shares of experts in the output."""
    normalised: bool = True
    """True if the shares of the experts of a token are divided by their sum."""
    share_scale: float = 1.0
    """Factor of the shares, as in DeepSeek V3 (https://arxiv.org/abs/2412.19437)."""
    choice_bias: bool = False
    """True if a bias of each expert counts in the choice of experts, and in nothing else. No
    gradient reaches it, and `balance_rate`, with which it is always there, moves it."""
    groups: int = 1
    """Number of groups, neighbours of equal number, that the experts are divided into: see
    `top_groups`."""
    top_groups: int = 1
    """Number of groups among whose experts a token chooses: those with the largest sums of the two
    best scores, biases included (DeepSeek V3, section 2.1.2)."""
    balance_loss: float = 0.001
    """Factor of the loss that balances the experts: count * sum_e load_e * probability_e, where
    load_e is the number of tokens that go to expert e, for each token, and probability_e its mean
    probability, so that the loss is top_k in balance (Switch Transformers, equation (4),
    https://arxiv.org/abs/2101.03961). All tokens of the batch that the loss counts take part; with
    gradient accumulation, or batches of whole documents, each part of the batch is balanced by
    itself."""
    balance_over: Literal["layer", "model"] = "layer"
    """Layers over which load_e and probability_e are means: "layer" adds up the losses of single
    layers, and "model" takes the means over all layers, as in transformers. The default is "model"
    for a pretrained model."""
    balance_rate: float = 0.0
    """Distance by which each step moves a bias of every expert, up if the expert has fewer tokens
    than the mean, and down if it has more. The bias counts in the choice of experts alone, and
    balances them without a loss (https://arxiv.org/abs/2408.15664, with 0.001); 0 for none."""
    z_loss: float = 0.0
    """Factor of the mean square of the log-sum-exp of the router's logits (ST-MoE,
    https://arxiv.org/abs/2202.08906)."""

    def __post_init__(self) -> None:
        for name in ("count", "top_k", "width", "latent_width"):
            check_minimum(f"model.experts.{name}", getattr(self, name), 1)
        check_minimum("model.experts.shared_width", self.shared_width, 0)
        if self.top_k > self.count:
            raise InputError(
                "model.experts.top_k must be at most model.experts.count; got "
                f"top_k={self.top_k}, count={self.count}. Change one of them."
            )
        for name in ("groups", "top_groups"):
            check_minimum(f"model.experts.{name}", getattr(self, name), 1)
        per_group = self.count // self.groups
        enough = self.top_groups == 1 == self.groups or per_group >= 2
        fits = self.top_k <= self.top_groups * per_group
        if self.count % self.groups or self.top_groups > self.groups or not (enough and fits):
            raise InputError(
                "model.experts.groups must divide the experts into groups of 2 or more, of which "
                "top_groups have the experts of a token; got "
                f"count={self.count}, groups={self.groups}, top_groups={self.top_groups}, top_k="
                f"{self.top_k}. Leave the groups out for none."
            )
        check_range("model.experts.share_scale", self.share_scale, "above 0 and finite")
        if self.biases and not (self.is_gated and self.latent_width is None):
            raise InputError(
                "model.experts.biases needs experts with a gate, and no latent_width; got "
                f"activation={self.activation!r}, latent_width={self.latent_width}. Leave it out."
            )
        if self.shared_gate and not self.shared_width:
            raise InputError(
                "model.experts.shared_gate needs a shared expert; got shared_width=0. Give "
                "--model.experts.shared-width, or leave it out."
            )
        for name in ("balance_loss", "balance_rate", "z_loss"):
            value, way_out = getattr(self, name), "Use 0.001, or 0 for none."
            check_range(f"model.experts.{name}", value, "at least 0 and finite", way_out)

    def check(self, model: Model) -> None:
        """Raises unless the options fit a model."""
        check_used(
            "experts",
            self,
            used="experts" in model.layer_feed_forwards,
            needs="layers of experts",
            got=f"feed_forwards={model.feed_forwards}",
            flags="--model.feed-forwards experts",
        )

    @property
    def is_gated(self) -> bool:
        """Whether experts have a gate."""
        return self.activation != "relu2"

    @property
    def has_choice_bias(self) -> bool:
        """Whether a bias counts in the choice of experts."""
        return self.choice_bias or self.balance_rate > 0

    def of_model(self, model: Model) -> Any:
        """The options with all sizes filled in; the model gives the defaults."""
        return replace(self, width=self.width or model.mlp_width)


def weights(config: Model) -> dict[str, Weight]:
    """The weights, in the order in which they are drawn."""
    return weights_of(config.experts)


def weights_of(experts: ExpertsConfig) -> dict[str, Weight]:
    """The weights of a layer, by path, from its options alone."""
    declared = {"router": weight("width | experts", precise=True)}
    width = "width" if experts.latent_width is None else "latent"
    if experts.is_gated:
        declared["expert_gate/kernel"] = projection(f"experts: {width} | expert_mlp")
    declared["expert_up/kernel"] = projection(f"experts: {width} | expert_mlp")
    declared["expert_down/kernel"] = projection(f"experts: expert_mlp | {width}", "out")
    if experts.latent_width is not None:
        declared["latent_in/kernel"] = projection("width | latent")
        declared["latent_out/kernel"] = projection("latent | width")
    if experts.has_choice_bias:
        declared["choice_bias"] = bias("experts")
    if experts.biases:
        declared["router_bias"] = bias("experts")
        declared["expert_gate_bias"] = bias("experts: expert_mlp", precise=True)
        declared["expert_up_bias"] = bias("experts: expert_mlp", precise=True)
        # Added where the outputs of a token's experts are summed, on the device of the token.
        declared["expert_down_bias"] = bias("experts width", precise=True)
    if experts.shared_width:
        declared |= below("shared", mlp.weights_of("shared_mlp", gated=experts.is_gated))
    if experts.shared_gate:
        declared["shared_gate/kernel"] = weight("width one")
    return declared


def sizes(config: Model) -> dict[str, int]:
    """Sizes by name of dimension."""
    return sizes_of(config.experts.of_model(config))


def sizes_of(experts: Any) -> dict[str, int]:
    """Sizes by name of dimension, from an `ExpertsConfig` with all sizes."""
    return {
        "experts": experts.count,
        "expert_mlp": experts.width,
        "shared_mlp": experts.shared_width,
        **({} if experts.latent_width is None else {"latent": experts.latent_width}),
        "one": 1,
    }
