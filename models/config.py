"""Settings with which `models.gpt.GPT` is built. Imports no jax: `--help` must be fast."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from models.checks import check_minimum, check_range
from models.parts.attention import ATTENTIONS, GlobalConfig
from models.parts.experts import ExpertsConfig
from models.parts.gated_delta import LinearConfig
from models.parts.kda import KDAConfig
from models.parts.latent import LatentConfig
from models.parts.ssd import SSDConfig
from models.weights import Norms
from startrail_jax.errors import InputError


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions, and how they extend to longer contexts than a model was trained on."""

    bases: tuple[float | Literal["none"], ...] = (10_000.0,)
    """Base of each layer, the ratio of the longest to the shortest wavelength: the list repeats,
    and `none` is a layer without rotary positions. `10000 10000 1000000` gives every third layer a
    longer wavelength."""
    scaling: Literal["none", "linear", "ntk", "llama3", "yarn"] = "none"
    """Rule that shrinks the angles for longer contexts: "none" shrinks no angle; "linear" shrinks
    all angles by the same factor (https://arxiv.org/abs/2306.15595); "ntk" shrinks the angles of
    long wavelengths more, by a larger base; "llama3" and "yarn" shrink only the angles of long
    wavelengths, as in Llama 3.1 and in YaRN (https://arxiv.org/abs/2309.00071)."""
    factor: float = 1.0
    """Length of the new context divided by the length that the model was trained on."""
    original_length: int | None = None
    """Length in tokens of the context that the model was trained on; "llama3" and "yarn" need
    it."""
    turns: tuple[float, float] | None = None
    """Turns in the original context: channels with more turns than the first number keep their
    wavelength, and channels with fewer turns than the second are stretched by the whole factor. The
    default is 4 and 1 for "llama3", 32 and 1 for "yarn"; no other scaling uses them."""
    attention_factor: float | None = None
    """Factor of queries and keys with "yarn". The default is 0.1 * ln(factor) + 1."""
    truncate: bool = True
    """True if "yarn" begins and ends its blend at whole pairs of channels; gpt-oss does not."""
    channels: int | None = None
    """Number of channels of each head that turn: the first ones, an even number. The default is all
    of them."""
    interleaved: bool = False
    """True if neighbouring channels (2 i, 2 i + 1) turn together, as in GLM 4; by default, the
    channels i and i + channels / 2 do."""
    stretches: Literal["all", "global"] = "all"
    """The layers whose angles `scaling` shrinks: all, or the layers without a window, as in Gemma
    3. Without a scaling, it has no effect."""

    def __post_init__(self) -> None:
        wrong = [x for x in self.bases if x != "none" and not x > 1]
        if wrong or not self.bases:
            raise InputError(
                "model.rope.bases must be one or more numbers above 1, or `none` for layers "
                f"without rotary positions; got bases={self.bases}. Use 10000, or more for long "
                "contexts."
            )
        if not self.factor >= 1:
            raise InputError(
                f"model.rope.factor must be at least 1; got factor={self.factor}. Use the new "
                "length over the one that the model was trained on."
            )
        # YaRN may sharpen the attention and stretch nothing.
        only_sharpens = self.scaling == "yarn" and self.attention_factor is not None
        if (self.scaling == "none") != (self.factor == 1) and not only_sharpens:
            raise InputError(
                "model.rope.factor must be above 1 with a scaling, and 1 without; got "
                f"scaling={self.scaling!r}, factor={self.factor}. Set both or neither."
            )
        if (self.scaling in ("llama3", "yarn")) != (self.original_length is not None):
            raise InputError(
                "model.rope.original_length must be given for scaling 'llama3' or 'yarn', and for "
                f"no other; got scaling={self.scaling!r}, original_length={self.original_length}. "
                "Set both or neither."
            )
        check_minimum("model.rope.original_length", self.original_length, 1)
        if self.turns is not None and (
            self.scaling not in ("llama3", "yarn") or not self.turns[0] > self.turns[1] > 0
        ):
            raise InputError(
                "model.rope.turns must be two numbers above 0, the larger one first, for scaling "
                f"'llama3' or 'yarn'; got turns={self.turns}, scaling={self.scaling!r}. Leave them "
                "out for the default."
            )
        if not self.truncate and self.scaling != "yarn":
            raise InputError(
                "model.rope.truncate is an option of scaling 'yarn'; got "
                f"scaling={self.scaling!r}. Leave it out."
            )
        if self.attention_factor is not None and (
            self.scaling != "yarn" or not 0 < self.attention_factor < math.inf
        ):
            raise InputError(
                "model.rope.attention_factor must be above 0 and finite, for scaling 'yarn'; got "
                f"attention_factor={self.attention_factor}, scaling={self.scaling!r}. Leave it out "
                "for the default."
            )


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes and options of a GPT."""

    vocab_size: int = 256
    """Number of token ids; bytes need 256."""
    width: int
    """Number of channels of the residual stream."""
    layers: int
    """Number of blocks."""
    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of key and value heads, a divisor of `heads`."""
    head_dim: int
    """Number of channels of a head; an even number."""
    mlp_width: int
    """Number of hidden channels of the MLP."""
    mlp: Literal["swiglu", "geglu", "gelu", "relu2"] = "swiglu"
    """Kind of MLP: "swiglu" and "geglu" are gated and have three matrices; "gelu" and "relu2", the
    square of a ReLU as in Nemotron-H, have two."""
    tied_head: bool = False
    """True if the embedding also serves as the output projection."""
    scores: bool = False
    """True if each token gets one score in place of the logits of the next one, as in a reward
    model. Such a model has a head of its own, `score`."""
    scaled_embedding: bool = False
    """True if embeddings are multiplied by the square root of `width`, as in Gemma."""
    embedding_scale: float = 1.0
    """Factor of the embeddings, as in Granite 4."""
    residual_scale: float = 1.0
    """Factor of the output of each mixer and each feed-forward, before it is added to the residual
    stream, as in Granite 4."""
    logit_divisor: float = 1.0
    """Number that divides the logits of the next token, before a cap, as in Granite 4: logits of 12
    become 2 with a divisor of 6. The scores of a reward model are not divided."""
    qkv_bias: bool = False
    """True if the projections to queries, keys and values have a bias, as in Qwen2."""
    out_bias: bool = False
    """True if the projection from attention has a bias, as in gpt-oss."""
    qk_norm: bool = False
    """True if queries and keys are normalised before they are rotated, as in Qwen3."""
    qk_norm_over: Literal["head", "heads"] = "head"
    """Channels that a norm of queries and keys takes its mean over: the channels of each head, or
    of all heads together, as in OLMo 2."""
    sinks: bool = False
    """True if each head has a learned logit that counts in the denominator of its softmax, as in
    gpt-oss."""
    softcap: float | None = None
    """Cap c of the logits of attention, c * tanh(logit / c), as in Gemma 2. The default is none."""
    output_softcap: float | None = None
    """Cap of the logits of the next token, by the same formula. The default is none."""
    scale_dim: float | None = None
    """The logits of attention are scaled by scale_dim ** -0.5. The default is the number of
    channels of a query head."""
    value_norm: bool = False
    """True if the values of each head are normalised, by a norm without a scale, as in Gemma 4."""
    norms: Norms = "before"
    """Place of the norms of a block: the inputs of attention and MLP ("before"), their outputs, as
    in OLMo 2 ("after"), or both, as in Gemma 2."""
    norm_offset: bool = False
    """True if norms multiply by 1 + their scale, as in Gemma."""
    norm_eps: float = 1e-6
    """Number that norms add to the mean square."""
    layer_scalar: bool = False
    """True if the output of each layer is multiplied by a number of its own, as in Gemma 4. A
    pretrained model brings the numbers, and training leaves them as they are."""
    attention_gate: bool = False
    """True if a gate, the sigmoid of a projection, multiplies the outputs of attention, as in
    Qwen3.5."""
    mixers: tuple[
        Literal["attention", "global_attention", "latent", "linear", "kda", "ssd", "none"], ...
    ] = ("attention",)
    """Mixer of each layer, which combines tokens: the list repeats. `linear linear linear
    attention` is three layers of linear attention and one of attention, repeated, as in Qwen3.5;
    `none` is a layer of a feed-forward alone, as in Nemotron-H. `global_attention` is attention
    with other sizes, and without a window; `latent` is the attention of DeepSeek V3, which keeps
    one latent of each token."""
    global_attention: GlobalConfig = field(default_factory=GlobalConfig)
    """Layers of "global_attention"."""
    latent: LatentConfig = field(default_factory=LatentConfig)
    """Layers of latent attention."""
    linear: LinearConfig = field(default_factory=LinearConfig)
    """Layers of linear attention."""
    kda: KDAConfig = field(default_factory=KDAConfig)
    """Layers of Kimi Delta Attention."""
    ssd: SSDConfig = field(default_factory=SSDConfig)
    """Layers of Mamba-2."""
    feed_forwards: tuple[Literal["mlp", "experts", "none"], ...] = ("mlp",)
    """Feed-forward of each layer, which follows its mixer: the list repeats. `mlp experts` is Llama
    4, `experts` a model with experts in all layers, and `none` a layer of a mixer alone."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    """Layers of experts."""
    windows: tuple[int | Literal["none"], ...] = ("none",)
    """Number of tokens that a token of each layer attends to, itself and earlier ones: the list
    repeats, and `none` attends to all earlier tokens. `4096` is Mistral, and `512 512 512 none` is
    three local layers and a global layer, repeated. Layers of linear attention ignore their entries
    here and in rope.bases."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Rotary positions."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the activations; weights and logits are float32."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "mlp_width"):
            check_minimum(f"model.{name}", getattr(self, name), 1)
        if self.heads % self.kv_heads:
            raise InputError(
                f"model.kv_heads must divide model.heads; got kv_heads={self.kv_heads}, "
                f"heads={self.heads}. Use kv_heads={self.heads} or kv_heads=1."
            )
        if self.head_dim % 2:
            raise InputError(
                "model.head_dim must be even for rotary positions; got "
                f"head_dim={self.head_dim}. Use {self.head_dim + 1}."
            )
        for name in ("softcap", "output_softcap", "scale_dim"):
            value, way_out = getattr(self, name), "Leave it out for none."
            check_range(f"model.{name}", value, "above 0 and finite", way_out)
        for name in ("embedding_scale", "residual_scale", "logit_divisor"):
            check_range(f"model.{name}", getattr(self, name), "above 0 and finite")
        if self.scaled_embedding and self.embedding_scale != 1:
            raise InputError(
                "model.embedding_scale must be 1 with model.scaled_embedding; got "
                f"embedding_scale={self.embedding_scale}. Leave one of them out."
            )
        self._check_patterns()
        check_range("model.norm_eps", self.norm_eps, "above 0 and below 1")

    def _check_patterns(self) -> None:
        """Raises unless the options of layers that differ fit each other."""
        if not self.windows or any(x != "none" and not x >= 1 for x in self.windows):
            raise InputError(
                "model.windows must be one or more numbers from 1 on, or `none` for layers without "
                f"a window; got windows={self.windows}. Leave it out for none."
            )
        patterns = {
            "mixers": self.mixers,
            "feed_forwards": self.feed_forwards,
            "windows": self.windows,
            "rope.bases": self.rope.bases,
        }
        for name, pattern in patterns.items():
            if len(pattern) > self.layers:
                raise InputError(
                    f"model.{name} must have no more entries than the model has layers; got "
                    f"{name}={pattern}, layers={self.layers}. Leave the last ones out."
                )
        if not {"attention", "latent"} & {*self.layer_mixers}:
            raise InputError(
                "model.mixers must give one layer or more attention; got "
                f"mixers={self.mixers}, layers={self.layers}. Leave it out for attention alone."
            )
        pairs = [*zip(self.layer_mixers, self.layer_feed_forwards, strict=True)]
        if ("none", "none") in pairs:
            raise InputError(
                "Every layer must have a mixer or a feed-forward; got none of both in layer "
                f"{pairs.index(('none', 'none'))}, of mixers={self.mixers}, "
                f"feed_forwards={self.feed_forwards}. Change one of them."
            )
        pairs = zip(self.layer_mixers, self.layer_windows, strict=True)
        whole = ("global_attention", "latent")
        if any(mixer in whole and window is not None for mixer, window in pairs):
            raise InputError(
                "model.windows must be `none` for layers of global_attention or latent; got "
                f"windows={self.windows}, mixers={self.mixers}. Give each its own entry."
            )
        channels = self.rope.channels
        if channels is not None and (channels % 2 or not 2 <= channels <= self.head_dim):
            raise InputError(
                "model.rope.channels must be even, at least 2 and at most model.head_dim; got "
                f"channels={channels}, head_dim={self.head_dim}. Leave it out for all."
            )
        if self.qk_norm_over != "head" and not self.qk_norm:
            raise InputError(
                "model.qk_norm_over='heads' needs norms of queries and keys; got qk_norm=False. "
                "Use --model.qk-norm, or leave it out."
            )
        self.global_attention.check(self)
        self.latent.check(self)
        self.linear.check(self)
        self.kda.check(self)
        self.ssd.check(self)
        self.experts.check(self)
        stretches_some = self.rope.stretches == "global" and self.rope.scaling != "none"
        if stretches_some and all(x is not None for x in self.attention_windows):
            raise InputError(
                "model.rope.stretches='global' needs layers without a window; got "
                f"windows={self.windows}. Give model.windows a `none`, or use "
                "--model.rope.stretches all."
            )

    @property
    def head(self) -> str:
        """The name of the part of the model that turns hidden states into its outputs."""
        if self.scores:
            return "score"
        return "embedding" if self.tied_head else "head"

    @property
    def layer_mixers(self) -> tuple[str, ...]:
        """The mixer of each layer: "attention", one with a recurrence, or "none"."""
        return _repeated(self.mixers, self.layers)

    @property
    def layer_feed_forwards(self) -> tuple[str, ...]:
        """The feed-forward of each layer: "mlp", "experts" or "none"."""
        return _repeated(self.feed_forwards, self.layers)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None for a layer that attends to all earlier tokens."""
        return _of_layers(self.windows, self.layers)

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """The windows of the layers with attention."""
        return self.of_attention(self.layer_windows)

    def of_attention(self, entries: tuple[Any, ...]) -> tuple[Any, ...]:
        """The entries for layers with attention, from a list with an entry for each layer."""
        pairs = zip(self.layer_mixers, entries, strict=True)
        return tuple(entry for mixer, entry in pairs if mixer in ATTENTIONS)

    @property
    def has_one_window(self) -> bool:
        """True if all layers with attention have the same window, or none: the attention callable
        then has it."""
        return len(set(self.attention_windows)) <= 1

    @property
    def layer_bases(self) -> tuple[float | None, ...]:
        """The base of the rotary positions of each layer; None for a layer without."""
        return _of_layers(self.rope.bases, self.layers)


def _repeated(pattern: tuple[Any, ...], layers: int) -> tuple[Any, ...]:
    """An entry for each layer, from a list that repeats."""
    return tuple(pattern[i % len(pattern)] for i in range(layers if pattern else 0))


def _of_layers(pattern: tuple[Any, ...], layers: int) -> tuple[Any, ...]:
    """An entry for each layer, from a list that repeats; None in place of the word `none`."""
    return tuple(None if entry == "none" else entry for entry in _repeated(pattern, layers))
