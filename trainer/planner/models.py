"""Sizes of a model: the weights, products and FLOPs on which predictions depend."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from models.parts import attention, latent
from models.parts.gpt import stack_name
from models.parts.recurrence import Recurrence
from models.weights import (
    ADAPTERS,
    LAYERS,
    OVER_TENSOR,
    RANK,
    Weight,
    layer_weights,
)
from startrail_jax.errors import InputError
from startrail_jax.tokens.documents import DocumentCost
from trainer.frozen import frozen_names
from trainer.planner.quantities import LARGEST_SIZE

DIT: dict[str, Any] = {"kind": "dit", "causal": False, "modulated": True, "takes_values": True}
"""Settings that all diffusion transformers of `train.py` have."""


IMAGE_TOKENS = 257
"""Tokens of the image with which a Wan begins."""


@dataclass(frozen=True, kw_only=True)
class FrozenShares:
    """Shares of a model that are not trained, from 0 to 1."""

    layers: tuple[float, ...]
    """Share of the weights of a layer, for each of `ModelSizes.kinds`."""
    products: tuple[float, ...]
    """Share of the matrices of a layer that each token is multiplied with, for each kind."""
    experts: float
    """Share of the matrices of experts."""
    outside: float
    """Share of the weights outside of the layers."""
    embedding: float
    """Share of the embedding of ids."""
    head: float
    """Share of the matrices outside of the layers that each token is multiplied with."""
    after_layers: bool = False
    """True if all trained weights come after the layers, which then have no backward pass."""


DISPATCHES = 4
"""Messages of a device to each other one: see `models.experts.DISPATCHES`."""
SENT_TO_EXPERTS = 5
"""Arrays that a step sends for each assignment: inputs and outputs of experts, and backward the
inputs and two gradients."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """The layers of one kind: their number, and the sizes of each."""

    mixer: str
    """Name of its mixer, such as "attention"."""
    feed_forward: str
    """"mlp", "experts" or "none"."""
    count: int
    weights: Mapping[str, Weight]
    """The weights of a layer, by path in it, without adapters."""
    sizes: Mapping[str, int]
    """Sizes of the dimensions of the weights, by name."""
    top_k: int
    """Experts of a token."""
    rank: int
    """Rank of the adapters; 0 for none."""
    targets: tuple[str, ...]
    """The projections that have adapters."""
    moved_by_mixer: int
    """Elements of a token, split over `tensor`, that the kernels between the matrix products of
    the mixer read and write in a forward pass."""

    @property
    def stack(self) -> str:
        """The part of the model with the weights of all such layers."""
        return stack_name(self.mixer, self.feed_forward)

    @property
    def parts(self) -> int:
        """Mixer and feed-forward, or one of them."""
        return sum(part != "none" for part in (self.mixer, self.feed_forward))

    def has(self, path: str) -> bool:
        """True if a weight of the model belongs to these layers."""
        return path.partition("/")[0] == self.stack

    def sum_of(self, counts: Callable[[str, Weight], Any]) -> Any:
        """The sum over all weights of their elements times `counts(path, weight)`: True, False, or
        the share that counts."""
        total = 0
        for path, x in self.weights.items():
            if share := counts(path, x):
                total += x.elements(self.sizes) * share
        return total

    def of_token(self, weight: Weight) -> Fraction:
        """The share of a weight with which a token is multiplied."""
        return Fraction(self.top_k, self.sizes["experts"]) if weight.of_experts else Fraction(1)

    @cached_property
    def elements(self) -> int:
        """All weights without adapters."""
        return self.sum_of(lambda path, x: 1)

    @cached_property
    def matrices(self) -> int:
        """Weights of the projections of tokens."""
        return self.sum_of(lambda path, x: x.projects and not x.of_text)

    @cached_property
    def text_matrices(self) -> int:
        """Weights of the projections of the tokens of a text or of an image, once for a
        sequence."""
        return self.sum_of(lambda path, x: x.of_text)

    @cached_property
    def active(self) -> int:
        """Weights of the matrices that each token is multiplied with."""
        return int(
            self.sum_of(lambda path, x: bool(x.inputs) and not x.of_text and self.of_token(x))
        )

    @cached_property
    def expanding(self) -> int:
        """Weights of `active` and `mixing` whose products attention computes."""
        is_latent = self.mixer == "latent"
        return self.sum_of(lambda path, x: is_latent and path in latent.EXPANDING)

    @cached_property
    def mlp(self) -> int:
        """Weights of the projections of the MLP, or of all experts."""
        return self.sum_of(lambda path, x: x.projects and _in_feed_forward(path))

    @property
    def mixing(self) -> int:
        """Weights of the projections around the mixer."""
        return self.matrices - self.mlp

    @cached_property
    def again(self) -> int:
        """Weights of `active` that a backward pass multiplies with again if it recomputes the MLP:
        all but the last matrix of an MLP."""
        return self.sum_of(
            lambda path, x: (
                x.projects and _in_feed_forward(path) and not x.of_experts and "width" in x.inputs
            )
        )

    @cached_property
    def of_one_matrix(self) -> int:
        """Weights of one matrix of the experts of a token."""
        matrices = self.sum_of(lambda path, x: x.of_experts and x.projects and self.of_token(x))
        return int(matrices) // max(self.expert_matrices, 1)

    @cached_property
    def expert_matrices(self) -> int:
        """Matrices of an expert: 3 with a gate, else 2; 0 without experts."""
        return sum(x.of_experts and x.projects for x in self.weights.values())

    @property
    def padded(self) -> int:
        """Weights whose products would take as long as the padding rows of the experts."""
        return self.of_one_matrix

    @property
    def again_always(self) -> int:
        """Expert weights recomputed in every backward pass."""
        return max(self.expert_matrices - 1, 0) * self.of_one_matrix

    @cached_property
    def moved(self) -> int:
        """Elements of a token, split over `tensor`, that the kernels between the matrix products
        read and write in a forward pass."""
        width = self.sizes["width"]
        hidden = self.sum_of(
            lambda path, x: x.projects and _in_feed_forward(path) and self.of_token(x)
        )
        # Rows of inputs and outputs of experts, which are float32.
        of_rows = self.sizes.get("latent", width)
        rows = 3 * self.top_k * of_rows if self.feed_forward == "experts" else 0
        return self.moved_by_mixer + int(hidden) // width + rows

    @cached_property
    def adapters(self) -> int:
        """Weights of adapters."""
        return int(self._adapters(lambda x: Fraction(1)))

    @cached_property
    def active_adapters(self) -> int:
        """Weights of the adapters that each token is multiplied with."""
        return int(self._adapters(self.of_token))

    def _adapters(self, share: Callable[[Weight], Fraction]) -> Fraction:
        sizes = {**self.sizes, RANK: self.rank}
        return sum(
            (
                share(x) * x.adapter(name).elements(sizes)
                for path, x in self.weights.items()
                if self.rank and x.projects and path.split("/")[-2] in self.targets
                for name in ADAPTERS
            ),
            Fraction(0),
        )

    def on_device(self, tensor: Any) -> Any:
        """Weights of a layer, with adapters, on a device of so many along `tensor`."""
        return self.adapters + sum(
            shared_elements(x, self.sizes, tensor) for x in self.weights.values()
        )


def shared_elements(weight: Weight, sizes: Mapping[str, int], tensor: Any) -> Any:
    """Elements of a weight on each of so many devices along `tensor`."""
    elements, dim = weight.elements(sizes), weight.tensor_dim
    if dim is None:
        return elements
    name = weight.dims[dim]
    if not OVER_TENSOR[name]:
        return elements // tensor
    return np.where(sizes[name] % tensor == 0, elements // tensor, elements)


def _in_feed_forward(path: str) -> bool:
    return path.startswith("mlp/") or "/mlp/" in path


_OF_KEYS = ("kv_heads", "head_dim", "query_dim")
"""Sizes of attention with keys and values."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes of a transformer on which time and memory depend."""

    name: str
    """Name for texts: the name of a recipe, or the path of a config.json."""
    kind: str = "gpt"
    """"gpt"; "dit" or "wan", diffusion transformers; or the name of another task of `train.py`."""
    causal: bool = True
    """True if a token attends only to itself and to earlier ones."""
    block: int = 0
    """Tokens of a block where tokens of a diffusion transformer attend to their own block and to
    earlier ones; 0 where they attend to all. Times are predicted as for 0."""
    modulated: bool = False
    """True if layers scale and shift their inputs and gate their outputs, as adaLN does."""
    takes_values: bool = False
    """True if the input of a token is `outputs` numbers, such as a patch, and not an id."""
    weights: Mapping[str, Weight]
    """All weights, by path, without adapters."""
    sizes: Mapping[str, int]
    """Sizes of the dimensions of the weights, by name: "width", "heads" and "head_dim" at least; a
    `Recurrence` has its own."""
    layers: int
    """Number of blocks."""
    mixers: tuple[str, ...] = ("attention",)
    """Mixer of each layer, by its name in `models.parts.gpt`; the list repeats."""
    recurrences: Mapping[str, Recurrence] = field(default_factory=dict)
    """The recurrence of each mixer that has one."""
    feed_forwards: tuple[str, ...] = ("mlp",)
    """Feed-forward of each layer, "mlp", "experts" or "none"; the list repeats."""
    top_k: int = 0
    """Experts of a token."""
    dispatch: bool | None = None
    """True if ZeRO 3 sends tokens to experts; None to send them where this moves fewer bytes than
    gathering the experts of a layer."""
    outputs: int
    """Numbers for each token: size of the vocabulary, or values of a patch."""
    head: str = "head"
    """Name of the part of the model that makes its outputs; "embedding" if that serves as both."""
    text_tokens: int = 0
    """Tokens of a text that every layer attends to; 0 for models without texts."""
    image_tokens: int = 0
    """Tokens of the image that a video begins with; 0 for none."""
    attending: tuple[str, ...] = attention.ATTENTIONS
    """Mixers whose attention counts: those of `layer_windows`."""
    windows: tuple[int | None, ...] = (None,)
    """Tokens that a token of each layer attends to, itself included; None for all earlier ones. The
    list repeats: layer i has entry i modulo their number. Entries count for layers with attention
    alone."""
    seq_len: int | None = None
    """Tokens in a sequence; None if the model does not say."""
    batch: int = 1
    """Default number of sequences in a batch."""
    itemsize: int = 2
    """Bytes of an activation."""
    lora_rank: int = 0
    """Rank of the low-rank adapters that are trained in place of all other weights; 0 for none."""
    lora_targets: tuple[str, ...] = ("query", "value")
    """Projections of every layer that have adapters: names of `projections`."""
    frozen_itemsize: int = 2
    """Bytes of a weight that is not trained, beside adapters."""
    frozen_names: tuple[str, ...] = ()
    """Patterns of the names of weights that are not trained: `TrainConfig.frozen`."""
    average: bool = False
    """True if a moving average of the weights is kept."""
    assumed: str | None = None
    """Sentences about a config.json: the assumptions for an unknown architecture, or the reason why
    train.py does not take it."""

    def __post_init__(self) -> None:
        settings = {name: getattr(self, name) for name in DIT}
        if self.kind in ("dit", "wan") and settings != DIT | {"kind": self.kind}:
            raise InputError(
                "A diffusion transformer has modulated layers, takes values and is not causal; got "
                f"{settings} for model {self.name!r}. Use ModelSizes(**DIT, ...)."
            )
        if self.lora_rank and self.kind == "dit":
            raise InputError(
                "lora_rank belongs to no DiT; got "
                f"lora_rank={self.lora_rank} for model {self.name!r}. Leave it out."
            )

    def as_dict(self) -> dict[str, Any]:
        """Everything but the single weights, as numbers, texts, lists and dicts, for JSON."""
        shown = {x.name for x in fields(self)} - {"weights", "recurrences"}
        derived = ("width", "heads", "kv_heads", "head_dim", "mlp_width")
        return {name: getattr(self, name) for name in (*sorted(shown), *derived)} | {
            "sizes": dict(self.sizes),
            "recurrences": {name: asdict(x) for name, x in self.recurrences.items()},
            "elements": self.elements,
        }

    @property
    def width(self) -> int:
        """Channels of the residual stream."""
        return self.sizes["width"]

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.sizes["heads"]

    @property
    def kv_heads(self) -> int:
        """Key and value heads; latents are one."""
        return self.sizes.get("kv_heads", self.heads if self.latent_dim is None else 1)

    @property
    def head_dim(self) -> int:
        """Channels of a query or key head."""
        return self.sizes.get("head_dim", self.sizes.get("latent_query_dim", 0))

    @property
    def value_head_dim(self) -> int:
        """Channels of a value head, and of an output of attention."""
        return self.head_dim if self.latent_dim is None else self.sizes["latent_value_dim"]

    @property
    def latent_dim(self) -> int | None:
        """Channels of a latent with the rotated part of its key; None where there are keys and
        values."""
        if "head_dim" in self.sizes or "latent_rank" not in self.sizes:
            return None
        return self.sizes["latent_rank"] + self.sizes["rotary_dim"]

    @property
    def key_channels(self) -> int:
        """Channels of the key and the value of a key head, or of a latent."""
        return 2 * self.head_dim if self.latent_dim is None else self.latent_dim

    @property
    def mlp_width(self) -> int:
        """Hidden channels of the MLP; 0 if no layer has one."""
        return self.sizes.get("mlp", 0)

    @property
    def experts(self) -> int:
        """Experts of a layer; 0 for none."""
        return self.sizes.get("experts", 0)

    @property
    def shared_width(self) -> int:
        """Hidden channels of the expert of all tokens; 0 for none."""
        return self.sizes.get("shared_mlp", 0)

    @cached_property
    def mlp_matrices(self) -> int:
        """Matrices of the MLP: 3 with a gate, else 2."""
        gates = (path for path in self.weights if _in_feed_forward(path))
        return 3 if any(path.split("/")[-2] in ("gate", "expert_gate") for path in gates) else 2

    @cached_property
    def qk_norm(self) -> bool:
        """True if queries and keys are normalised before attention."""
        return any("/key_norm/" in path for path in self.weights)

    @property
    def is_gated(self) -> bool:
        """True if a projection of queries also makes a gate of the output of attention."""
        return self.sizes.get("query_dim", 0) > self.head_dim

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
        return max(layer_kind.mlp for layer_kind in self.kinds)

    @property
    def layer_kinds(self) -> tuple[Any, ...]:
        """The mixer of each layer, and the window of one with attention, None for a layer that
        attends to all earlier tokens."""
        windows = (self.windows[i % len(self.windows)] for i in range(self.layers))
        pairs = zip(self.layer_mixers, windows, strict=True)
        return tuple((x, window if x in attention.ATTENTIONS else None) for x, window in pairs)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The windows of the layers with attention."""
        return tuple(window for mixer, window in self.layer_kinds if mixer in self.attending)

    @cached_property
    def attentions(self) -> Mapping[str, ModelSizes]:
        """For each mixer with attention, the model whose other layers do not attend, and whose
        heads are those of the mixer."""
        mixers = [x for x in self.attending if x in self.layer_mixers]
        if len(mixers) == 1:
            return {mixers[0]: self}

        def of(mixer: str) -> ModelSizes:
            sizes = dict(self.sizes)
            if mixer == "latent":
                sizes = {x: y for x, y in sizes.items() if x not in _OF_KEYS}
            if mixer == attention.ATTENTIONS[1]:
                names = ("kv_heads", "head_dim", "query_dim")
                sizes |= {name: sizes[f"global_{name}"] for name in names}
            return replace(self, sizes=sizes, attending=(mixer,))

        return {mixer: of(mixer) for mixer in mixers}

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers, each with its weights and products."""
        return tuple(self._kind(*x, count) for x, count in Counter(self.layer_pairs).items())

    @property
    def unread_outputs(self) -> int:
        """Layers with a mixer whose output is only added: no norm and no feed-forward reads it."""
        return sum(
            layer_kind.count
            for layer_kind in self.kinds
            if layer_kind.mixer != "none"
            and layer_kind.feed_forward == "none"
            and not any(path.startswith("attention_out_norm/") for path in layer_kind.weights)
        )

    def _kind(self, mixer: str, feed_forward: str, count: int) -> LayerKind:
        stack = stack_name(mixer, feed_forward)
        recurrence = self.recurrences.get(mixer)
        if mixer == "none":
            moved = 0
        elif recurrence is None:
            own = self.attentions[mixer]
            if own.latent_dim is not None:
                moved = latent.moved(own.sizes)
            else:
                keys = {"kv_heads": self.kv_heads, "query_dim": self.head_dim}
                moved = attention.moved({**keys, **own.sizes})
            # Attention to a text moves queries alone.
            moved += 2 * self.heads * self.head_dim * (self.text_tokens > 0)
        else:
            moved = recurrence.moved
        return LayerKind(
            mixer=mixer,
            feed_forward=feed_forward,
            count=count,
            weights=layer_weights(self.weights, stack),
            sizes=self.sizes if recurrence is None else {**self.sizes, **recurrence.sizes},
            top_k=self.top_k,
            rank=self.lora_rank,
            targets=self.lora_targets,
            moved_by_mixer=moved,
        )

    def sizes_at(self, path: str) -> Mapping[str, int]:
        """The sizes of the dimensions of a weight, with the number of its layers."""
        layer_kind = next((layer_kind for layer_kind in self.kinds if layer_kind.has(path)), None)
        return self.sizes if layer_kind is None else {**layer_kind.sizes, LAYERS: layer_kind.count}

    @cached_property
    def frozen(self) -> FrozenShares:
        """The shares that are not trained: with adapters, everything else."""
        share, kinds = float(self.lora_rank > 0), len(self.kinds)
        if self.frozen_names and not self.lora_rank:
            return self._frozen_by_name()
        return FrozenShares(
            layers=(share,) * kinds,
            products=(share,) * kinds,
            **dict.fromkeys(("experts", "outside", "embedding", "head"), share),
        )

    def _frozen_by_name(self) -> FrozenShares:
        names = frozen_names(self.weights, self.frozen_names)

        def share(counted: Callable[[str, Weight], Any]) -> float:
            """The frozen share of all weights, each times `counted(path, weight)`."""
            frozen = total = Fraction(0)
            for path, x in self.weights.items():
                amount = x.elements(self.sizes_at(path)) * Fraction(counted(path, x))
                total += amount
                frozen += amount * (path in names)
            return float(frozen / max(total, 1))

        def active(layer_kind: LayerKind) -> Callable[[str, Weight], Any]:
            return lambda path, x: layer_kind.has(path) and x.projects and layer_kind.of_token(x)

        projections_outside = {self.head}
        projections_outside |= {"patches"} if self.takes_values else set()
        trained = {path.partition("/")[0] for path in self.weights if path not in names}
        return FrozenShares(
            layers=tuple(
                share(lambda path, x, layer_kind=layer_kind: layer_kind.has(path))
                for layer_kind in self.kinds
            ),
            products=tuple(share(active(layer_kind)) for layer_kind in self.kinds),
            experts=share(lambda path, x: x.of_experts and x.projects),
            outside=share(lambda path, x: not x.is_stacked),
            embedding=share(lambda path, x: path.startswith("embedding/")),
            head=share(
                lambda path, x: (
                    path.split("/")[0] in projections_outside
                    and path.rpartition("/")[2] in ("kernel", "embedding")
                )
            ),
            after_layers=trained <= {"norm", "head"},
        )

    @property
    def passes(self) -> tuple[float, ...]:
        """Products of a step with each weight of a layer, for each of `kinds`: forward, backward,
        and the gradient of weights that are not frozen."""
        frozen = self.frozen
        return tuple(1.0 if frozen.after_layers else 3 - x for x in frozen.products)

    @property
    def matrices(self) -> int:
        """Weights of all layers that each token is multiplied with, without adapters."""
        return sum(layer_kind.count * layer_kind.active for layer_kind in self.kinds)

    @property
    def active_adapters(self) -> int:
        """Weights of the adapters of all layers that each token is multiplied with."""
        return sum(layer_kind.count * layer_kind.active_adapters for layer_kind in self.kinds)

    @cached_property
    def other_elements(self) -> int:
        """Weights outside of the layers."""
        return sum(x.elements(self.sizes) for x in self.weights.values() if not x.is_stacked)

    @property
    def elements(self) -> int:
        """All weights."""
        layers = sum(
            layer_kind.count * (layer_kind.elements + layer_kind.adapters)
            for layer_kind in self.kinds
        )
        return layers + self.other_elements

    def dispatches(self, tokens: Any, devices: Any, tensor: Any) -> Any:
        """True if ZeRO 3 sends tokens to the experts, in place of gathering the experts.

        If not, a step gathers their weights twice, and adds up their float32 gradients.

        Args:
            tokens: tokens of a device.
            devices: devices over which ZeRO divides the experts.
            tensor: degree of tensor parallelism.
        """
        if not self.experts:
            return False
        legal = (devices > 1) & (self.experts % devices == 0)
        if self.dispatch is not None:
            return legal & self.dispatch
        return legal & (
            SENT_TO_EXPERTS * self.dispatched_bytes(tokens) < self.gathered_bytes / tensor
        )

    def dispatched_bytes(self, tokens: Any) -> Any:
        """Bytes of one array of all assignments of a device, in messages; the last one is not
        full."""
        sent = (1 + 1 / DISPATCHES) * self.top_k
        return sent * tokens * self.sizes.get("latent", self.width) * self.itemsize

    @property
    def expert_elements(self) -> int:
        """Weights of the matrices of all experts of a layer."""
        of_layers = (
            layer_kind.sum_of(lambda path, x: x.of_experts and x.projects)
            for layer_kind in self.kinds
        )
        return max(of_layers, default=0)

    @property
    def gathered_bytes(self) -> int:
        """Bytes that a step sends to gather the experts of a layer, and to add up gradients."""
        return int(self.expert_elements * (2 * self.itemsize + 4 * (1 - self.frozen.experts)))

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of a training step for each token, as `train.py` counts them for its MFU.

        forward = 2 N + 4 Q H sum_l V_l / T, with N weights in matrix products, Q heads of H
        channels (of latent attention, the mean of keys and values), T tokens, and V_l pairs of a
        query and a key that the mask of layer l shows. The backward pass has two matrix products
        for each one of the forward pass, so that a step takes 3 * forward. N frozen weights have no
        gradients, so that they take 4 N in place of 6 N, or 2 N where all that is trained comes
        after the layers; each weight of an adapter takes 6. A layer of linear attention has no
        pairs: its forward pass takes 6 K V for each head, with a state [K, V].

        As in PaLM, only matrix products count, and what remat recomputes does not. PaLM counts
        12 L Q H T for attention to all pairs of tokens; here only visible pairs count, under a
        causal mask T (T + 1) / 2, and fewer with a window. N leaves out the norms and the embedding
        of ids, which is a look-up.

        Args:
            seq_len: tokens in a sequence.

        References:
            PaLM, appendix B: https://arxiv.org/abs/2204.02311
        """
        attention = sum(x._attention_flops(seq_len) for x in self.attentions.values())
        head = (2 if self.takes_values else 1) * self.width * self.outputs
        mixers = Counter(self.layer_mixers)
        states = sum(mixers[name] * x.state_flops for name, x in self.recurrences.items())
        layers = zip(self.passes, self.kinds, strict=True)
        products = sum(
            passes * layer_kind.count * layer_kind.active for passes, layer_kind in layers
        )
        products += (3 - self.frozen.head) * head + 3 * self.active_adapters
        passes = 1.0 if self.frozen.after_layers else 3.0
        return 2.0 * products + passes * (attention + states) + self._flops_of_texts(seq_len)

    def _attention_flops(self, seq_len: int) -> float:
        """FLOPs of the forward pass of all attentions for each token, without projections."""
        pairs = sum(self._pairs(window, seq_len) for window in self.layer_windows)
        return 2 * self.heads * (self.head_dim + self.value_head_dim) * pairs / seq_len

    @cached_property
    def norms_over_heads(self) -> bool:
        """True if layers attend to a text, with queries and keys that are normalised over all
        heads."""
        return self.text_tokens > 0 and any(x.endswith("/heads_scale") for x in self.weights)

    @property
    def whole_attentions(self) -> int:
        """Attentions of a layer to a text and to an image."""
        return (self.text_tokens > 0) + (self.image_tokens > 0)

    @property
    def whole_tokens(self) -> int:
        """Tokens of a text and an image, which are whole on every device."""
        return self.text_tokens + self.image_tokens

    def _flops_of_texts(self, seq_len: int) -> float:
        """FLOPs of a step for each token, of its attention to a text and an image, and of their
        keys and values."""
        pairs = 4.0 * self.layers * self.heads * self.head_dim * self.whole_tokens
        pairs *= 1 if self.frozen.after_layers else 3
        layers = zip(self.passes, self.kinds, strict=True)
        products = sum(
            passes * layer_kind.count * layer_kind.text_matrices for passes, layer_kind in layers
        )
        return pairs + 2.0 * products * self.text_tokens / seq_len

    @property
    def document_cost(self) -> DocumentCost:
        """Cost of tokens and visible pairs of documents, in FLOPs of a token."""
        alone, two = (self.flops_per_token(n) for n in (1, 2))
        # One token sees itself; each of two tokens sees 1.5 on average.
        pair = 2 * (two - alone)
        # A layer counts as often as its heads have channels.
        channels = [x.head_dim for x in self.attentions.values()]
        windows = [
            window
            for x in self.attentions.values()
            for window in x.layer_windows * (x.head_dim // math.gcd(*channels))
        ]
        return DocumentCost(token=1.0, pair=pair / (alone - pair), windows=tuple(windows))

    def _pairs(self, window: int | None, seq_len: int) -> int:
        """Pairs of a query and a key that the mask of a layer shows in a sequence."""
        if not self.causal:
            block = self.block or seq_len
            blocks, tail = divmod(seq_len, block)
            return blocks * (blocks + 1) // 2 * block**2 + tail * seq_len
        # The first queries of a window see fewer keys than the others.
        window = min(window or seq_len, seq_len)
        return window * (window + 1) // 2 + (seq_len - window) * window


def check_model(model: ModelSizes, seq_len: int, batch: int) -> None:
    """Raises unless a model and its batch are small enough to count their bytes."""
    head_dim = max(x.head_dim for x in model.attentions.values())
    widest = max(model.width + model.mlp_width, model.heads * head_dim, model.outputs)
    if model.layers * widest * seq_len * batch > LARGEST_SIZE // 64 or model.elements > 2**50:
        raise InputError(
            "A model and its batch must be small enough to count their bytes; got "
            f"{model.elements:.3g} weights, --seq-len {seq_len} and --batch-size {batch}. Use less."
        )
