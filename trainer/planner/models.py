"""Sizes of a model: the weights, products and FLOPs on which predictions depend."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from startrail_jax.errors import InputError
from startrail_jax.tokens.documents import DocumentCost
from trainer.planner.quantities import LARGEST_SIZE

DIT: dict[str, Any] = {"kind": "dit", "causal": False, "modulated": True, "takes_values": True}
"""Settings that all diffusion transformers of `train.py` share."""


IMAGE_TOKENS = 257
"""Tokens of the image with which a Wan begins."""


@dataclass(frozen=True, kw_only=True)
class LinearSizes:
    """Sizes of the layers of linear attention."""

    heads: int
    """Heads of values, each with a state [key_dim, value_dim]."""
    key_heads: int
    key_dim: int
    value_dim: int
    conv: int = 4
    """Tokens that the short convolution sees."""

    @property
    def channels(self) -> int:
        """Channels of query, key and value."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Channels of value, gate and output."""
        return self.heads * self.value_dim

    @property
    def state_flops(self) -> int:
        """FLOPs of the recurrence for each token, forward: three products with each state."""
        return 6 * self.values * self.key_dim


@dataclass(frozen=True, kw_only=True)
class MoESizes:
    """Sizes of the layers of experts."""

    count: int
    """Number of experts."""
    top_k: int
    """Number of experts of each token."""
    width: int
    """Channels between the projections of an expert."""
    shared_width: int = 0
    """Channels between the projections of the shared expert of all tokens; 0 for none."""
    shared_gate: bool = False
    """True if a gate multiplies the output of the shared expert."""
    biases: bool = False
    """True if router and experts have biases."""
    choice_bias: bool = False
    """True if biases balance the experts."""


@dataclass(frozen=True, kw_only=True)
class FrozenShares:
    """How much of a model is not trained: shares from 0 to 1."""

    layers: tuple[float, ...]
    """Of the weights of a layer of each of `ModelSizes.kinds`."""
    products: tuple[float, ...]
    """Of the matrices in it that each token is multiplied with."""
    experts: float
    """Of the matrices of experts."""
    others: float
    """Of the weights outside of the layers."""
    embedding: float
    """Of the table of ids."""
    head: float
    """Of the matrices outside of the layers that each token is multiplied with."""
    after_layers: bool = False
    """Whether all that is trained comes after the layers, so that they have no backward pass."""


_FEED_FORWARD = ("gate", "up", "down", "expert_gate", "expert_up", "expert_down")
DISPATCHES = 4
"""Messages of a device to each other one: see `models.experts.DISPATCHES`."""
SENT_TO_EXPERTS = 5
"""Arrays that a step sends for each assignment: inputs and outputs of experts, and backward the
inputs and two gradients."""
_PADDING = 3
"""Rows of experts over those that are filled up: see `models.experts.tile_rows`."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """The layers of one kind: how many there are, and what each one needs."""

    mixer: str
    """"attention" or "linear"."""
    feed_forward: str
    """"mlp" or "experts"."""
    count: int
    projections: Mapping[str, tuple[int, int]]
    """Inputs and outputs of each matrix that multiplies a token."""
    heads: int
    """Heads of the output."""
    key_heads: int
    of_keys: tuple[str, ...]
    """The projections to key heads, which are whole on every device if `tensor` is larger than the
    number of key heads."""
    others: int
    """Weights of norms, convolutions and modulations."""
    adapters: int
    """Weights of adapters."""
    active_adapters: int
    """Weights of the adapters that each token is multiplied with."""
    of_text: Mapping[str, tuple[int, int]]
    """Inputs and outputs of each matrix that multiplies the tokens of a text or of an image, once
    for a sequence."""
    active: int
    """Weights of the matrices that each token is multiplied with."""
    padded: int
    """Weights whose products would take as long as the padding rows of the experts."""
    again: int
    """Weights of `active` that a backward pass multiplies with again if it recomputes the MLP: all
    but the last matrix of an MLP."""
    again_always: int
    """Expert weights recomputed in every backward pass."""
    moved: int
    """Elements of a token, split over `tensor`, that the kernels between the matrix products read
    and write in a forward pass."""

    @property
    def matrices(self) -> int:
        """Weights of the matrices."""
        return self.weights(*self.projections)

    @property
    def text_matrices(self) -> int:
        """Weights of the matrices of `of_text`."""
        return sum(map(math.prod, self.of_text.values()))

    @property
    def elements(self) -> int:
        """All weights but those of adapters."""
        return self.matrices + self.text_matrices + self.others

    @property
    def mlp(self) -> int:
        """Weights of the matrices of the MLP, or of all experts."""
        return self.weights(*(x for x in _FEED_FORWARD if x in self.projections))

    @property
    def mixing(self) -> int:
        """Weights of the projections around attention."""
        return self.matrices - self.mlp

    def weights(self, *names: str) -> int:
        """Weights of some projections."""
        return sum(math.prod(self.projections[name]) for name in names)


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes of a transformer on which time and memory depend."""

    name: str
    """Name for texts: that of the recipe, or the path of a config.json."""
    kind: str = "gpt"
    """"gpt"; "dit" or "wan", diffusion transformers; or that of another task of `train.py`."""
    causal: bool = True
    """True if a token attends only to itself and to earlier ones."""
    block: int = 0
    """Tokens of a block where tokens of a diffusion transformer attend to their own block and to
    earlier ones; 0 where they attend to all. Predicted times are those of 0."""
    modulated: bool = False
    """True if layers scale and shift their inputs and gate their outputs, as adaLN does."""
    takes_values: bool = False
    """True if the input of a token is `outputs` numbers, such as a patch, and not an id."""
    width: int
    """Channels of the residual stream."""
    layers: int
    """Number of blocks."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Channels of a head."""
    mlp_width: int
    """Hidden channels of the MLP."""
    mlp_matrices: int = 3
    """Matrices of the MLP: 3 with a gate, else 2."""
    qk_norm: bool = False
    """True if each head of queries and keys is normalised before attention."""
    attention_gate: bool = False
    """True if a projection of queries also makes a gate of the output."""
    mixers: tuple[str, ...] = ("attention",)
    """Mixer of each layer, "attention" or "linear"; the list repeats."""
    linear: LinearSizes | None = None
    """The layers of linear attention, if there are some."""
    feed_forwards: tuple[str, ...] = ("mlp",)
    """Feed-forward of each layer, "mlp" or "experts"; the list repeats."""
    experts: MoESizes | None = None
    """The layers of experts, if there are some."""
    dispatch: bool | None = None
    """True if ZeRO 3 sends tokens to experts; None to send them where this moves fewer bytes than
    gathering the experts of a layer."""
    outputs: int
    """Numbers for each token: size of the vocabulary, or values of a patch."""
    tied_head: bool = False
    """True if the embedding also serves as the output projection."""
    classes: int = 0
    """Classes of a diffusion transformer."""
    text_tokens: int = 0
    """Tokens of a text that every layer attends to; 0 for models without texts."""
    text_dim: int = 0
    """Channels of an embedded token of a text."""
    image_dim: int = 0
    """Channels of an embedded token of the image that a video begins with; 0 for none."""
    given_channels: int = 0
    """Input values of a token beside `outputs`, for each position of the latent."""
    patch: int = 4
    """Positions of a latent in a patch of a diffusion transformer: `outputs` is a multiple."""
    windows: tuple[int | None, ...] = (None,)
    """Tokens that a token of each layer attends to, itself included; None for all earlier ones. The
    list repeats: layer i has entry i modulo their number. Entries count for layers with attention
    alone."""
    seq_len: int | None = None
    """Tokens in a sequence, where the model says so."""
    batch: int = 1
    """Sequences in a batch, where no other number is given."""
    itemsize: int = 2
    """Bytes of an activation."""
    lora_rank: int = 0
    """Rank of the low-rank adapters that are trained in place of all other weights; 0 for none."""
    lora_targets: tuple[str, ...] = ("query", "value")
    """Projections of every layer that have adapters: names of `projections`."""
    frozen_itemsize: int = 2
    """Bytes of a weight that is not trained, beside adapters."""
    frozen_by_name: FrozenShares | None = None
    """What is not trained of a model without adapters; None if all is trained."""
    average: bool = False
    """True if a moving average of the weights is kept."""
    assumed: str | None = None
    """A sentence: the assumptions about a config.json of unknown architecture."""

    def __post_init__(self) -> None:
        named = f"for model {self.name!r}"
        optional = [x for x in ("seq_len", "batch") if getattr(self, x) is not None]
        sizes = ("width", "layers", "heads", "kv_heads", "head_dim", "mlp_width", "outputs")
        for name in (*sizes, *optional):
            number = getattr(self, name)
            if not is_size(number):
                raise InputError(
                    f"{name} must be a whole number of at least 1; got {number!r} {named}. Correct "
                    "it."
                )
        if not self.windows or not all(x is None or is_size(x) for x in self.windows):
            raise InputError(
                "windows must be one or more whole numbers of at least 1, or `none` for layers "
                f"without a window; got {self.windows!r} {named}. Correct it."
            )
        mixers = {"attention"} if self.linear is None else {"attention", "linear"}
        if {*self.layer_mixers} != mixers:
            raise InputError(
                "mixers must be attention, and linear where there are sizes of linear attention; "
                f"got mixers={self.mixers}, linear={self.linear} {named}. Correct them."
            )
        feeds = {"mlp"} if self.experts is None else {"mlp", "experts"}
        if not {*self.layer_feed_forwards} <= feeds:
            raise InputError(
                "feed_forwards must be mlp, or experts where there are sizes of experts; got "
                f"feed_forwards={self.feed_forwards}, experts={self.experts} {named}. Correct them."
            )
        if len(self.windows) > self.layers:
            raise InputError(
                "windows must have no more entries than the model has layers; got "
                f"windows={self.windows}, layers={self.layers} {named}. Leave the last ones out."
            )
        given = {name: getattr(self, name) for name in DIT}
        if self.kind in ("dit", "wan") and given != DIT | {"kind": self.kind}:
            raise InputError(
                "A diffusion transformer has modulated layers, takes values and is not causal; got "
                f"{given} {named}. Use ModelSizes(**DIT, ...)."
            )
        windowed = self.takes_values and set(self.windows) != {None}
        if windowed or (self.kind == "dit" and self.qk_norm):
            raise InputError(
                "windows and qk_norm are options of a GPT; got "
                f"windows={self.windows}, qk_norm={self.qk_norm} {named}, a diffusion transformer. "
                "Leave them out."
            )
        if self.lora_rank and (self.kind == "dit" or not is_size(self.lora_rank)):
            raise InputError(
                "lora_rank must be a whole number of at least 1, and belongs to no DiT; got "
                f"lora_rank={self.lora_rank} {named}. Leave it out."
            )
        if self.kind == "gpt" and self.head_dim % 2:
            raise InputError(
                f"head_dim must be even, for rotary positions; got head_dim={self.head_dim} "
                f"{named}. Use {self.head_dim + 1}."
            )
        if self.heads % self.kv_heads:
            raise InputError(
                "kv_heads must divide heads; got "
                f"kv_heads={self.kv_heads}, heads={self.heads} {named}. Use a divisor of "
                f"{self.heads}."
            )

    @property
    def layer_mixers(self) -> tuple[str, ...]:
        """The mixer of each layer."""
        return tuple(self.mixers[i % len(self.mixers)] for i in range(self.layers))

    @property
    def layer_feed_forwards(self) -> tuple[str, ...]:
        """The feed-forward of each layer."""
        return tuple(self.feed_forwards[i % len(self.feed_forwards)] for i in range(self.layers))

    @property
    def layer_pairs(self) -> tuple[tuple[str, str], ...]:
        """The mixer and the feed-forward of each layer."""
        return tuple(zip(self.layer_mixers, self.layer_feed_forwards, strict=True))

    @property
    def largest_feed_forward(self) -> int:
        """Weights of the matrices of the largest MLP, or of all experts of a layer."""
        return max(kind.mlp for kind in self.kinds)

    @property
    def layer_kinds(self) -> tuple[Any, ...]:
        """The window of each layer, None for a layer that attends to all earlier tokens; "linear"
        for a layer of linear attention."""
        windows = (self.windows[i % len(self.windows)] for i in range(self.layers))
        pairs = zip(self.layer_mixers, windows, strict=True)
        return tuple(mixer if mixer == "linear" else window for mixer, window in pairs)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The windows of the layers with attention."""
        return tuple(kind for kind in self.layer_kinds if kind != "linear")

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers, each with its weights and products."""
        return tuple(self._kind(*x, count) for x, count in Counter(self.layer_pairs).items())

    def _kind(self, mixer: str, feed_forward: str, count: int) -> LayerKind:
        width, mlp, experts = self.width, self.mlp_width, None
        if feed_forward == "experts" and self.experts is not None:
            experts, mlp = self.experts, self.experts.shared_width
        others = 6 * width**2 if self.modulated else 2 * width
        linear, of_text = self.linear, {}
        if mixer == "linear" and linear is not None:
            keys, values = linear.key_heads * linear.key_dim, linear.values
            projections = {
                **{"query": (width, keys), "key": (width, keys), "value": (width, values)},
                **{"out_gate": (width, values), "out": (values, width)},
                **{"decay": (width, linear.heads), "beta": (width, linear.heads)},
            }
            others += linear.conv * linear.channels + 2 * linear.heads + linear.value_dim
            heads, key_heads, of_keys = linear.heads, linear.key_heads, ("query", "key")
            # Joined, convolved and normalised; then the output is normalised and multiplied.
            moved = 6 * linear.channels + 4 * values
        else:
            queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
            projections = {
                "query": (width, queries * (2 if self.attention_gate else 1)),
                **{"key": (width, keys), "value": (width, keys), "out": (queries, width)},
            }
            others += 2 * self.head_dim * self.qk_norm
            heads, key_heads, of_keys = self.heads, self.kv_heads, ("key", "value")
            moved = 2 * (queries + keys) + 3 * queries * self.attention_gate
            if self.kind == "wan":
                projections |= {"text_query": (width, queries), "text_out": (queries, width)}
                of_text = {"text_key": (width, keys), "text_value": (width, keys)}
                # Biases, the norm before attention to the text, norms over heads, and a table.
                others, moved = 21 * width + mlp, moved + 2 * queries
                if self.image_dim:
                    of_text |= {"image_key": (width, keys), "image_value": (width, keys)}
                    others += 3 * width
        if self.mlp_matrices == 3:
            projections["gate"] = (width, mlp)
        projections |= {"up": (width, mlp), "down": (mlp, width)}
        moved += self.mlp_matrices * mlp
        again, one, idle = (self.mlp_matrices - 1) * width * mlp, 0, 0
        if experts is not None:
            inputs = experts.count * width
            gates = {x: (inputs, experts.width) for x in ("expert_gate", "expert_up")}
            projections |= gates | {"expert_down": (inputs, experts.width)}
            others += inputs + experts.shared_gate * width
            others += experts.choice_bias * experts.count
            others += experts.biases * (experts.count * (1 + 2 * experts.width + width))
            # A matrix of the experts of a token. The router is float32, and whole on all devices.
            one = experts.top_k * width * experts.width
            idle = 3 * (experts.count - experts.top_k) * width * experts.width - inputs
            # Rows of inputs and outputs, which are float32, beside the hidden channels.
            moved += experts.top_k * (3 * experts.width + 3 * width)
        both = {**projections, **of_text}
        names = (*self.lora_targets, *(f"text_{x}" for x in self.lora_targets))
        adapted = {x: sum(both[x]) for x in names if x in both}
        common, of_expert, every, chosen = 0, 0, 0, 0
        for name, size in adapted.items():
            if experts is not None and name.startswith("expert_"):
                of_expert += width + experts.width
                every, chosen = experts.count, experts.top_k
            else:
                common += size
        return LayerKind(
            mixer=mixer,
            feed_forward=feed_forward,
            count=count,
            projections=projections,
            heads=heads,
            key_heads=key_heads,
            of_keys=of_keys,
            others=others,
            adapters=self.lora_rank * (common + every * of_expert),
            active_adapters=self.lora_rank * (common + chosen * of_expert),
            of_text=of_text,
            active=sum(map(math.prod, projections.values())) - idle,
            padded=3 * one // _PADDING,
            again=again,
            again_always=2 * one,
            moved=moved,
        )

    @property
    def frozen(self) -> FrozenShares:
        """What is not trained; all but the adapters, if there are some."""
        share, kinds = float(self.lora_rank > 0), len(self.kinds)
        return self.frozen_by_name or FrozenShares(
            layers=(share,) * kinds,
            products=(share,) * kinds,
            **dict.fromkeys(("experts", "others", "embedding", "head"), share),
        )

    @property
    def passes(self) -> tuple[float, ...]:
        """Products of a step with each weight of a layer of each of `kinds`: the last, its
        gradient, is of those not frozen."""
        frozen = self.frozen
        return tuple(1.0 if frozen.after_layers else 3 - x for x in frozen.products)

    @property
    def matrices(self) -> int:
        """Weights of all layers that each token is multiplied with, without adapters."""
        return sum(kind.count * kind.active for kind in self.kinds)

    @property
    def active_adapters(self) -> int:
        """Weights of the adapters of all layers that each token is multiplied with."""
        return sum(kind.count * kind.active_adapters for kind in self.kinds)

    @property
    def other_elements(self) -> int:
        """Weights outside of the layers."""
        if self.kind == "dit":
            # Patches, time (of 256 channels), classes, last modulation, and head.
            of_width = 2 * self.outputs + 256 + self.width + self.classes + 1 + 2 * self.width
            return of_width * self.width
        if self.kind == "wan":
            # Patches, time and its modulations, text, image, last modulation, and head.
            inputs = self.outputs + self.patch * self.given_channels
            of_width = inputs + 256 + self.width + 6 * self.width + self.text_dim + self.width
            of_width += 11 + 2 + self.outputs
            image = self.image_dim
            of_image = (image + 3) * image + (image + 3) * self.width if image else 0
            return of_width * self.width + of_image + self.outputs
        return self.outputs * self.width * (1 if self.tied_head else 2) + self.width

    @property
    def elements(self) -> int:
        """All weights."""
        layers = sum(kind.count * (kind.elements + kind.adapters) for kind in self.kinds)
        return layers + self.other_elements

    def dispatches(self, tokens: Any, devices: Any, tensor: Any) -> Any:
        """True if ZeRO 3 sends tokens to the experts, in place of gathering the experts.

        If not, a step gathers their weights twice, and adds up their float32 gradients.

        Args:
            tokens: tokens of a device.
            devices: devices over which ZeRO divides the experts.
            tensor: degree of tensor parallelism.
        """
        if self.experts is None:
            return False
        legal = (devices > 1) & (self.experts.count % devices == 0)
        if self.dispatch is not None:
            return legal & self.dispatch
        return legal & (
            SENT_TO_EXPERTS * self.dispatched_bytes(tokens) < self.gathered_bytes / tensor
        )

    def dispatched_bytes(self, tokens: Any) -> Any:
        """Bytes of one array of all assignments of a device, in messages; the last one is not
        full."""
        assert self.experts is not None, "the caller has looked"
        sent = (1 + 1 / DISPATCHES) * self.experts.top_k
        return sent * tokens * self.width * self.itemsize

    @property
    def expert_elements(self) -> int:
        """Weights of the matrices of all experts of a layer."""
        experts = self.experts
        return 0 if experts is None else 3 * experts.count * self.width * experts.width

    @property
    def gathered_bytes(self) -> int:
        """Bytes that a step sends to gather the experts of a layer, and to add up gradients."""
        return int(self.expert_elements * (2 * self.itemsize + 4 * (1 - self.frozen.experts)))

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of a training step for each token, as `train.py` counts them for its MFU.

        forward = 2 N + 4 Q H sum_l V_l / T, with N weights in matrix products, Q heads of H
        channels, T tokens, and V_l pairs of a query and a key that the mask of layer l shows. The
        backward pass has two matrix products for each one of the forward pass, so that a step
        takes 3 * forward. N frozen weights have no gradients, so that they take 4 N in place of
        6 N, or 2 N where all that is trained comes after the layers; each weight of an adapter
        takes 6. A layer of linear attention has no pairs: its forward pass takes 6 K V for each
        head, with a state [K, V].

        As in PaLM, only matrix products count, and what remat recomputes does not. PaLM counts
        12 L Q H T for attention to all pairs of tokens; here only visible pairs count, under a
        causal mask T (T + 1) / 2, and fewer with a window. N leaves out the norms and the embedding
        of ids, which is a look-up.

        Args:
            seq_len: tokens in a sequence.

        References:
            PaLM, appendix B: https://arxiv.org/abs/2204.02311
        """
        pairs = sum(self._pairs(window, seq_len) for window in self.layer_windows)
        attention = 4 * self.heads * self.head_dim * pairs / seq_len
        head = (2 if self.takes_values else 1) * self.width * self.outputs
        states = self.linear_layers * self.linear.state_flops if self.linear else 0
        layers = zip(self.passes, self.kinds, strict=True)
        products = sum(passes * kind.count * kind.active for passes, kind in layers)
        products += (3 - self.frozen.head) * head + 3 * self.active_adapters
        passes = 1.0 if self.frozen.after_layers else 3.0
        return 2.0 * products + passes * (attention + states) + self._flops_of_texts(seq_len)

    @property
    def whole_attentions(self) -> int:
        """Attentions of a layer to a text and to an image."""
        return (self.text_tokens > 0) + (self.image_dim > 0)

    @property
    def whole_tokens(self) -> int:
        """Tokens of a text and an image, which are whole on every device."""
        return self.text_tokens + (IMAGE_TOKENS if self.image_dim else 0)

    def _flops_of_texts(self, seq_len: int) -> float:
        """FLOPs of a step for each token, of its attention to a text and an image, and of their
        keys and values."""
        pairs = 4.0 * self.layers * self.heads * self.head_dim * self.whole_tokens
        pairs *= 1 if self.frozen.after_layers else 3
        layers = zip(self.passes, self.kinds, strict=True)
        products = sum(passes * kind.count * kind.text_matrices for passes, kind in layers)
        return pairs + 2.0 * products * self.text_tokens / seq_len

    @property
    def linear_layers(self) -> int:
        """Layers of linear attention."""
        return self.layer_mixers.count("linear")

    @property
    def document_cost(self) -> DocumentCost:
        """Cost of tokens and visible pairs of documents, in FLOPs of a token."""
        alone, two = (self.flops_per_token(n) for n in (1, 2))
        # One token sees itself; each of two tokens sees 1.5 on average.
        pair = 2 * (two - alone)
        return DocumentCost(token=1.0, pair=pair / (alone - pair), windows=self.layer_windows)

    def _pairs(self, window: int | None, seq_len: int) -> int:
        """Pairs of a query and a key that the mask of a layer shows in a sequence."""
        if not self.causal:
            block = self.block or seq_len
            whole, rest = divmod(seq_len, block)
            return whole * (whole + 1) // 2 * block**2 + rest * seq_len
        # The first queries of a window see fewer keys than the others.
        window = min(window or seq_len, seq_len)
        return window * (window + 1) // 2 + (seq_len - window) * window


def is_size(number: Any) -> bool:
    """True if something is a whole number of at least 1."""
    return type(number) is int and number >= 1


def check_model(model: ModelSizes, seq_len: int, batch: int) -> None:
    """Raises unless a model and its batch are small enough to count their bytes."""
    widest = max(model.width + model.mlp_width, model.heads * model.head_dim, model.outputs)
    if model.layers * widest * seq_len * batch > LARGEST_SIZE // 64 or model.elements > 2**50:
        raise InputError(
            "A model and its batch must be small enough to count their bytes; got "
            f"{model.elements:.3g} weights, --seq-len {seq_len} and --batch-size {batch}. Use less."
        )
