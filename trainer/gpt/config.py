"""Settings of a run of a GPT, and of sampling from it. Imports no jax: `--help` must be fast."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from startrail_jax.errors import InputError
from trainer.config import LoraConfig, SampleConfig, TrainConfig, check_minimum, check_range
from trainer.places import check_folder, check_on_disk
from trainer.task import SampleOptions

TOKENIZER = "tokenizer.json"
"""The file of a tokenizer in the folder of a model."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions, and how they extend to longer contexts than a model was trained on."""

    bases: tuple[float | Literal["none"], ...] = (10_000.0,)
    """Base of each layer, the ratio of the longest to the shortest wavelength: the list repeats,
    and `none` is a layer without rotary positions. `10000 10000 1000000` gives every third layer a
    longer wavelength."""
    scaling: Literal["none", "linear", "ntk", "llama3", "yarn"] = "none"
    """How the angles shrink for longer contexts: "none" shrinks no angle; "linear" shrinks all
    angles by the same factor (https://arxiv.org/abs/2306.15595); "ntk" shrinks those of long
    wavelengths more, by a larger base; "llama3" and "yarn" shrink only those of long wavelengths,
    as in Llama 3.1 and in YaRN (https://arxiv.org/abs/2309.00071)."""
    factor: float = 1.0
    """Length of the new context divided by that of the context that the model was trained on."""
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
    """Whether "yarn" begins and ends its blend at whole pairs of channels; gpt-oss does not."""
    channels: int | None = None
    """Number of channels of each head that turn: the first ones, an even number. The default is all
    of them."""
    stretches: Literal["all", "global"] = "all"
    """The layers whose angles `scaling` shrinks: all, or those without a window, as in Gemma 3.
    Without a scaling, it has no effect."""

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
class LinearConfig:
    """Layers of linear attention: Gated DeltaNet (https://arxiv.org/abs/2412.06464)."""

    heads: int | None = None
    """Number of heads of values, each with a state of its own. The default is `model.heads`."""
    key_heads: int | None = None
    """Number of heads of queries and keys, a divisor of `heads`. The default is `heads`."""
    key_dim: int | None = None
    """Number of channels of a head of queries and keys. The default is `model.head_dim`."""
    value_dim: int | None = None
    """Number of channels of a head of values. The default is `key_dim`."""
    conv: int = 4
    """Number of tokens that the short convolution sees, the token itself included."""
    largest_beta: float = 1.0
    """Largest share of an old value that a token replaces; 2 allows states that change their sign
    (https://arxiv.org/abs/2411.12537)."""
    norm_eps: float | None = None
    """Number that the norm of the outputs adds to the mean square. The default is
    `model.norm_eps`."""
    norms: Literal["before", "both", "after"] | None = None
    """Where such layers have norms. The default is `model.norms`."""

    def __post_init__(self) -> None:
        for name in ("heads", "key_heads", "key_dim", "value_dim", "conv"):
            check_minimum(f"model.linear.{name}", getattr(self, name), 1)
        if not 0 < self.largest_beta <= 2:
            raise InputError(
                "model.linear.largest_beta must be above 0 and at most 2, above which states "
                f"grow; got largest_beta={self.largest_beta}. Use 1 or 2."
            )
        check_range("model.linear.norm_eps", self.norm_eps, "above 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Layers whose feed-forward is one of experts, of which each token goes to a few."""

    count: int = 8
    """Number of experts."""
    top_k: int = 2
    """Number of experts of each token."""
    width: int | None = None
    """Number of hidden channels of an expert. The default is `model.mlp_width`."""
    shared_width: int = 0
    """The same of a further expert, to which all tokens go. The default is none."""
    shared_gate: bool = False
    """Whether the sigmoid of a projection multiplies the output of that expert."""
    activation: Literal["swiglu", "clamped"] = "swiglu"
    """Activation of the experts: "clamped" is that of gpt-oss."""
    biases: bool = False
    """Whether the router and the experts have biases, as in gpt-oss."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What turns the logits of the router into the shares of experts in the output."""
    normalised: bool = True
    """Whether the shares of the experts of a token are divided by their sum."""
    balance_loss: float = 0.001
    """Factor of the loss that balances the experts: count * sum_e load_e * probability_e, where
    load_e is the number of tokens that go to expert e, for each token, and probability_e its mean
    probability, so that the loss is top_k in balance (Switch Transformers, equation (4),
    https://arxiv.org/abs/2101.03961). Tokens are those of the whole batch that the loss counts;
    with gradient accumulation, or batches of whole documents, those of each part."""
    balance_over: Literal["layer", "model"] = "layer"
    """Of what load_e and probability_e are means: of each layer, whose losses are added up, or of
    all layers together, as in transformers. The default is "model" for a pretrained model."""
    balance_rate: float = 0.0
    """How far each step moves a bias of every expert, up if the expert has fewer tokens than the
    mean, and down if it has more. The bias counts in the choice of experts alone, and balances them
    without a loss (https://arxiv.org/abs/2408.15664, with 0.001); 0 for none."""
    z_loss: float = 0.0
    """Factor of the mean square of the log-sum-exp of the router's logits (ST-MoE,
    https://arxiv.org/abs/2202.08906)."""

    def __post_init__(self) -> None:
        for name in ("count", "top_k", "width"):
            check_minimum(f"model.experts.{name}", getattr(self, name), 1)
        check_minimum("model.experts.shared_width", self.shared_width, 0)
        if self.top_k > self.count:
            raise InputError(
                "model.experts.top_k must be at most model.experts.count; got "
                f"top_k={self.top_k}, count={self.count}. Change one of them."
            )
        if self.shared_gate and not self.shared_width:
            raise InputError(
                "model.experts.shared_gate needs a shared expert; got shared_width=0. Give "
                "--model.experts.shared-width, or leave it out."
            )
        for name in ("balance_loss", "balance_rate", "z_loss"):
            value, way_out = getattr(self, name), "Use 0.001, or 0 for none."
            check_range(f"model.experts.{name}", value, "at least 0 and finite", way_out)


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of the model: the keyword arguments of `models.gpt.GPT`."""

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
    mlp: Literal["swiglu", "geglu", "gelu"] = "swiglu"
    """Kind of MLP: "swiglu" and "geglu" are gated and have three matrices, "gelu" has two."""
    tied_head: bool = False
    """Whether the embedding also serves as the output projection."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the square root of `width`, as in Gemma."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have a bias, as in Qwen2."""
    out_bias: bool = False
    """Whether the projection from attention has a bias, as in gpt-oss."""
    qk_norm: bool = False
    """Whether queries and keys are normalised before they are rotated, as in Qwen3."""
    qk_norm_over: Literal["head", "heads"] = "head"
    """What such a norm takes the mean over: the channels of each head, or those of all heads, as in
    OLMo 2."""
    sinks: bool = False
    """Whether each head has a learned logit that counts in the denominator of its softmax, as in
    gpt-oss."""
    softcap: float | None = None
    """Cap c of the logits of attention, c * tanh(logit / c), as in Gemma 2. The default is none."""
    output_softcap: float | None = None
    """Cap of the logits of the next token, by the same formula. The default is none."""
    scale_dim: int | None = None
    """The logits of attention are scaled by scale_dim ** -0.5. The default is `head_dim`."""
    norms: Literal["before", "both", "after"] = "before"
    """Whether what attention and MLP take is normalised, what they add to the residual stream, as
    in OLMo 2 ("after"), or both, as in Gemma 2."""
    norm_offset: bool = False
    """Whether norms multiply by 1 + their scale, as in Gemma."""
    norm_eps: float = 1e-6
    """Number that norms add to the mean square."""
    attention_gate: bool = False
    """Whether a gate, the sigmoid of a projection, multiplies the outputs of attention, as in
    Qwen3.5."""
    mixers: tuple[Literal["attention", "linear"], ...] = ("attention",)
    """What each layer mixes tokens with: the list repeats. `linear linear linear attention` is
    three layers of linear attention and one of attention, repeated, as in Qwen3.5."""
    linear: LinearConfig = field(default_factory=LinearConfig)
    """Layers of linear attention."""
    feed_forwards: tuple[Literal["mlp", "experts"], ...] = ("mlp",)
    """What follows attention in each layer: the list repeats. `mlp experts` is Llama 4, and
    `experts` a model with experts in all layers."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    """Layers of experts."""
    windows: tuple[int | Literal["none"], ...] = ("none",)
    """Number of tokens that a token of each layer attends to, itself and those before it: the list
    repeats, and `none` attends to all earlier tokens. `4096` is Mistral, and `512 512 512 none` is
    three local layers and a global layer, repeated. Entries for layers of linear attention have no
    effect, and neither have those of rope.bases."""
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
        check_minimum("model.scale_dim", self.scale_dim, 1)
        for name in ("softcap", "output_softcap"):
            value, way_out = getattr(self, name), "Leave it out for none."
            check_range(f"model.{name}", value, "above 0 and finite", way_out)
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
        for name, given in patterns.items():
            if len(given) > self.layers:
                raise InputError(
                    f"model.{name} must have no more entries than the model has layers; got "
                    f"{name}={given}, layers={self.layers}. Leave the last ones out."
                )
        if "attention" not in self.layer_mixers:
            raise InputError(
                "model.mixers must give one layer or more attention; got "
                f"mixers={self.mixers}, layers={self.layers}. Leave it out for attention alone."
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
        self._check_linear()
        given = _changed(self.experts)
        if given and "experts" not in self.layer_feed_forwards:
            raise InputError(
                f"model.experts.{given[0]} needs layers of experts; got "
                f"feed_forwards={self.feed_forwards}. Use --model.feed-forwards experts, or leave "
                "it out."
            )
        stretches_some = self.rope.stretches == "global" and self.rope.scaling != "none"
        if stretches_some and all(x is not None for x in self.attention_windows):
            raise InputError(
                "model.rope.stretches='global' needs layers without a window; got "
                f"windows={self.windows}. Give model.windows a `none`, or use "
                "--model.rope.stretches all."
            )

    def _check_linear(self) -> None:
        """Raises unless the options of linear attention fit each other."""
        given = _changed(self.linear)
        if given and "linear" not in self.layer_mixers:
            raise InputError(
                f"model.linear.{given[0]} needs layers of linear attention; got "
                f"mixers={self.mixers}. Use --model.mixers linear linear linear attention, or "
                "leave it out."
            )
        sizes = self.linear_sizes
        if sizes["heads"] % sizes["key_heads"]:
            raise InputError(
                "model.linear.key_heads must divide model.linear.heads; got "
                f"key_heads={sizes['key_heads']}, heads={sizes['heads']}. Use "
                f"key_heads={sizes['heads']} or key_heads=1."
            )

    @property
    def layer_mixers(self) -> tuple[str, ...]:
        """What each layer mixes tokens with: "attention" or "linear"."""
        return _of_layers(self.mixers, self.layers)

    @property
    def layer_feed_forwards(self) -> tuple[str, ...]:
        """The feed-forward of each layer: "mlp" or "experts"."""
        return _of_layers(self.feed_forwards, self.layers)

    @property
    def expert_sizes(self) -> dict[str, Any]:
        """The sizes of layers of experts: the fields of `models.ExpertSizes`."""
        sizes = vars(self.experts) | {"width": self.experts.width or self.mlp_width}
        sizes["balanced_by_bias"] = sizes.pop("balance_rate") > 0
        return sizes

    @property
    def linear_sizes(self) -> dict[str, Any]:
        """The sizes of layers of linear attention: the fields of `models.GatedDeltaSizes`."""
        given = self.linear
        heads, key_dim = given.heads or self.heads, given.key_dim or self.head_dim
        return {
            "heads": heads,
            "key_heads": given.key_heads or heads,
            "key_dim": key_dim,
            "value_dim": given.value_dim or key_dim,
            "conv": given.conv,
            "largest_beta": given.largest_beta,
            "norm_eps": given.norm_eps or self.norm_eps,
        }

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None for a layer that attends to all earlier tokens."""
        return _of_layers(self.windows, self.layers)

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """The windows of the layers with attention."""
        return self.of_attention(self.layer_windows)

    def of_attention(self, entries: tuple[Any, ...]) -> tuple[Any, ...]:
        """Those entries of a list for all layers that are for layers with attention."""
        pairs = zip(self.layer_mixers, entries, strict=True)
        return tuple(entry for mixer, entry in pairs if mixer == "attention")

    @property
    def has_one_window(self) -> bool:
        """Whether all layers with attention have the same window, or none: it is then that of the
        attention."""
        return len(set(self.attention_windows)) <= 1

    @property
    def layer_bases(self) -> tuple[float | None, ...]:
        """The base of the rotary positions of each layer; None for a layer without."""
        return _of_layers(self.rope.bases, self.layers)


def _changed(config: LinearConfig | ExpertsConfig) -> list[str]:
    """The settings that are not their defaults."""
    return [name for name, value in vars(config).items() if value != getattr(type(config), name)]


def _of_layers(pattern: tuple[Any, ...], layers: int) -> tuple[Any, ...]:
    """The entries of a list that repeats, for each layer; None for the word."""
    entries = (pattern[i % len(pattern)] for i in range(layers if pattern else 0))
    return tuple(None if entry == "none" else entry for entry in entries)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data to train on, and how documents become sequences."""

    path: tuple[Path, ...] = ()
    """A text file, a *.jsonl file (either also as *.gz), a table in *.parquet or *.arrow, a *.bin
    or *.npy file of tokens, or a folder of such files, all of one kind. Files and folders named val
    or test, among other usual names, are held out (docs/train.md). Several paths are mixed, as
    `weights` says. The default is the source code of the Python standard library."""
    weights: tuple[float, ...] = ()
    """Weight of each path: its share of the rows of every run of rows, to the row, or with
    `batches="documents"` its share of the tokens. They need not add up to 1. By default, all paths
    have the same weight. A path is read again, in another order, once it ends."""
    tokenizer: Path | None = None
    """A Hugging Face tokenizer.json for text. By default, every byte of UTF-8 is a token."""
    text_key: str = "text"
    """The key or column under which a line of a *.jsonl file or a row holds its text."""
    loss: Literal["all", "answers", "last"] | None = None
    """The tokens that the loss counts. Conversations, and prompts with completions, need one of
    these: "answers" for what the assistant says and for completions, "last" for the last answer of
    a conversation alone, or "all". They are kept whole, in *.jsonl files or tables. Of text, all
    tokens count."""
    chat_template: Path | None = None
    """A file with the chat template, which turns conversations into text. The default is that of
    the tokenizer: chat_template.jinja beside it, or the one in tokenizer_config.json."""
    messages: str = "messages"
    """The key or column of conversations. Their messages have role and content, or from and value
    as in ShareGPT."""
    ignored_keys: tuple[str, ...] = ()
    """Keys of conversations and completions, or columns, with nothing to learn, such as "id". Any
    other unused key or column is an error."""
    bin_dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    """Data type of the tokens in *.bin files."""
    end_of_document: int | None = None
    """Id of the token that ends a document. The default is 0 for bytes, and for a tokenizer the
    token with one of the usual names. For files of tokens there is no default, and each file is a
    single document. With --init-from and --data.loss, the default is the stop token
    of the model."""
    begin_of_document: int | None = None
    """Id of a token that is put in front of every document and prompt, such as that of <s>. With
    --init-from, the default is the token that the model's tokenizer puts there; otherwise there is
    none."""
    mask_documents: bool = True
    """Whether a token attends only to its own document, instead of to everything before it in its
    sequence."""
    longest_document: int | None = None
    """Largest number of tokens of a document in a row. Longer documents are cut into pieces of this
    length, which do not attend to each other, so that devices send each other only the keys of the
    last so many tokens. The default is `seq_len`."""
    batches: Literal["rows", "documents"] = "rows"
    """What a batch consists of: "rows" of `seq_len` tokens, which all devices of a sequence share,
    or whole "documents", each on as few devices as can hold it. With "documents", `seq_len` is the
    largest length, and longer documents are cut. Evaluation always uses rows."""
    draw: int = 4096
    """Approximate number of documents that are drawn at a time with `batches="documents"`. Those of
    similar length share a part of a batch, so that devices wait less for each other."""
    validation_path: Path | None = None
    """Held-out data of the same kind as `path`. Those of its files that lie inside `path` are not
    trained on. The default is a fraction of `path`."""
    validation_fraction: float = 0.05
    """Fraction that is held out if there is no `validation_path`: of the documents of text, or of
    every file of tokens, at its end. If whole documents cannot be divided so that both parts have
    text, the end of every document is held out; with few completions, one completion is held
    out."""
    cache: Path | None = None
    """Folder for the tokens of text, from which later runs with the same text and tokenizer read
    them. The default is the folder `tokens` beside that of the run; without a tokenizer, bytes are
    kept in memory."""

    @staticmethod
    def of_older_file(values: dict[str, Any]) -> dict[str, Any]:
        """The settings of a config.json with one path, or with another name for `loss`."""
        former = {"all": None, "completion": "answers"}
        if isinstance(path := values.get("path", ()), str | None):
            values = {**values, "path": [] if path is None else [path]}
        if values.get("loss_on") not in former:
            return values
        others = {name: x for name, x in values.items() if name != "loss_on"}
        return {**others, "loss": former[values["loss_on"]]}

    def __post_init__(self) -> None:
        for path in self.path:
            check_on_disk("data.path", path)
        for name in ("validation_path", "tokenizer", "chat_template"):
            check_on_disk(f"data.{name}", getattr(self, name))
        if self.weights and len(self.weights) != max(len(self.path), 1):
            raise InputError(
                "data.weights must have one weight for each path; got "
                f"{len(self.weights)} for {len(self.path)} paths. Give one for each, or leave them "
                "out for equal shares."
            )
        if not all(0 < x < math.inf for x in self.weights):
            raise InputError(
                "data.weights must be above 0, and finite; got "
                f"{' '.join(map(str, self.weights))}. Leave out a path that is not trained on."
            )
        check_folder("data.cache", self.cache or Path())
        way_out, fraction = "Use 0.05, or give --data.validation-path.", self.validation_fraction
        check_range("data.validation_fraction", fraction, "above 0 and below 1", way_out)
        for name in ("end_of_document", "begin_of_document"):
            check_minimum(f"data.{name}", getattr(self, name), 0)
        check_minimum("data.draw", self.draw, 1)
        check_minimum("data.longest_document", self.longest_document, 1)
        in_vain = self.batches == "documents" or not self.mask_documents
        if self.longest_document is not None and in_vain:
            raise InputError(
                "data.longest_document needs rows of documents that do not attend to each "
                f"other; got longest_document={self.longest_document}, batches="
                f"{self.batches!r}, mask_documents={self.mask_documents}. Use --data.batches "
                "rows and --data.mask-documents, or leave it out."
            )
        if self.batches == "documents" and not self.mask_documents:
            raise InputError(
                "Whole documents attend to themselves alone; got data.batches='documents' and "
                "mask_documents=False. Leave out --data.no-mask-documents, or use --data.batches "
                "rows."
            )
        if self.batches == "rows" and self.draw != DataConfig.draw:
            raise InputError(
                "data.draw is a number of documents, for batches of these; got "
                f"draw={self.draw} with data.batches='rows'. Leave it out, or use "
                "--data.batches documents."
            )


@dataclass(frozen=True, kw_only=True)
class TextSampleConfig(SampleConfig):
    """Continuations of the held-out data by the model, during training and after it."""

    length: int = 0
    """Number of tokens of a sample; 0 for no samples."""
    temperature: float = 0.8
    """Temperature of samples; 0 always takes the likeliest token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("length", "temperature"):
            check_minimum(f"sample.{name}", getattr(self, name), 0)
        if self.every is not None and not self.length:
            raise InputError(
                f"sample.every needs sample.length tokens; got every={self.every}, length=0. Give "
                "--sample.length 100, or leave --sample.every out."
            )


@dataclass(frozen=True, kw_only=True)
class GPTTrainConfig(TrainConfig):
    """A training run of a GPT."""

    kind: ClassVar[str] = "gpt"
    causal: ClassVar[bool] = True

    model: GPTConfig
    """Sizes of the model."""
    data: DataConfig = field(default_factory=DataConfig)
    """Data to train on."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters."""

    init_from: Path | None = None
    """A folder with a pretrained model in the format of Hugging Face: config.json, *.safetensors
    and tokenizer.json. Its config.json defines the model; flags --model.* change it."""
    init_text_only: bool = False
    """Whether `init_from` may hold a model of images and text, of which only the text model is
    taken."""
    seq_len: int
    """Number of tokens in a sequence."""
    experts: Literal["auto", "gather", "dispatch"] = "auto"
    """Whether ZeRO 3 gathers the experts of a layer, or sends each token to the devices that have
    its experts. The default is what sends fewer bytes: to gather them, if sequences are long."""
    sample: TextSampleConfig = field(default_factory=TextSampleConfig)
    """Continuations of the held-out data, in the log."""

    @staticmethod
    def of_older_file(values: dict[str, Any]) -> dict[str, Any]:
        """The settings of a config.json with other names for `sample`."""
        names = {"sample_length": "length", "temperature": "temperature"}
        sample = {new: values[old] for old, new in names.items() if old in values}
        others = {name: x for name, x in values.items() if name not in names}
        return {**others, "sample": sample} if sample else values

    def __post_init__(self) -> None:
        super().__post_init__()
        check_on_disk("init_from", self.init_from)
        if self.init_text_only and self.init_from is None:
            raise InputError(
                "init_text_only needs a pretrained model; got no init_from. Leave it out."
            )
        check_minimum("seq_len", self.seq_len, 1)
        has_experts = "experts" in self.model.layer_feed_forwards
        if self.experts != "auto" and not (has_experts and self.zero == 3):
            raise InputError(
                "experts needs layers of experts, and zero 3, which divides them; got "
                f"experts={self.experts}, zero={self.zero}, "
                f"feed_forwards={' '.join(self.model.feed_forwards)}. Leave it out."
            )
        if self.sample.length >= self.seq_len:
            raise InputError(
                "sample.length must be below seq_len, which holds prompt and sample; got "
                f"sample.length={self.sample.length}, seq_len={self.seq_len}. "
                f"Use {self.seq_len // 2}."
            )
        longest = self.data.longest_document
        if longest is not None and longest >= self.seq_len:
            raise InputError(
                "data.longest_document must be below seq_len, at which documents are cut anyway; "
                f"got longest_document={longest}, seq_len={self.seq_len}. Leave it out."
            )
        lacking = {"gate"} if self.model.mlp == "gelu" else set()
        if "linear" not in self.model.layer_mixers:
            lacking |= {"out_gate", "decay", "beta"}
        if "mlp" not in self.model.layer_feed_forwards and not self.model.experts.shared_width:
            lacking |= {"gate", "up", "down"}
        if "experts" not in self.model.layer_feed_forwards:
            lacking |= {"expert_gate", "expert_up", "expert_down"}
        absent = [x for x in self.lora.targets if x in lacking]
        if self.lora.rank is not None and self.model.experts.balance_rate:
            raise InputError(
                "model.experts.balance_rate moves weights, which adapters freeze; got "
                f"balance_rate={self.model.experts.balance_rate}, lora.rank={self.lora.rank}. Use "
                "--model.experts.balance-loss."
            )
        if self.lora.rank is not None and absent:
            raise InputError(
                f"lora.targets must name projections of the model; got {absent[0]}, and no layer "
                f"has one. Leave {absent[0]} out."
            )

    @property
    def num_tokens(self) -> int:
        return self.seq_len

    @property
    def steps_between_samples(self) -> int | None:
        return self.sample.every

    @property
    def documents_drawn(self) -> int | None:
        return self.data.draw if self.data.batches == "documents" else None

    @property
    def has_adapters(self) -> bool:
        return self.lora.rank is not None

    @property
    def idle_settings(self) -> tuple[str, ...]:
        idle = ("model.rope.stretches",) if self.model.rope.scaling == "none" else ()
        return idle if self.model.experts.balance_loss else (*idle, "model.experts.balance_over")

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer in training: no token sees further than the longest document."""
        longest, windows = self.data.longest_document, self.model.layer_windows
        return windows if longest is None else tuple(min(x or longest, longest) for x in windows)

    @property
    def attention_of_model(self) -> dict[str, Any]:
        windows = set(self.model.of_attention(self.layer_windows))
        alike = self.model.has_one_window and windows
        return attention_of(self.model) | {"window": windows.pop() if alike else None}

    @property
    def attention_call(self) -> dict[str, Any]:
        windows = Counter(self.model.of_attention(self.layer_windows))
        if all(window is None or window >= self.seq_len for window in windows):
            return super().attention_call
        own = {"windows": dict(windows), "exchange": self.attention.exchange}
        return super().attention_call | {"seq_len": self.seq_len} | own


def attention_of(model: GPTConfig) -> dict[str, Any]:
    """Options of `startrail_jax.Attention` that belong to a model."""
    windows = set(model.attention_windows)
    return {
        "layout": "zigzag",
        "window": windows.pop() if len(windows) == 1 else None,
        "softcap": model.softcap,
        "scale": None if model.scale_dim is None else model.scale_dim**-0.5,
    }


@dataclass(frozen=True, kw_only=True)
class TextOptions(SampleOptions):
    """What sample.py draws from a run of a GPT."""

    prompt: str | None = None
    """Text to continue. If the run was trained on files of tokens and no tokenizer is given, the
    prompt must be token ids. The default is to read standard input; on a terminal, a new line."""
    prompt_file: Path | None = None
    """A UTF-8 file whose content is the prompt."""
    chat: bool = False
    """Whether the prompt is a user's message to the model: the chat template beside the tokenizer,
    or that of the run, makes a conversation of it, and the answer is drawn."""
    tokens: int = 256
    """Number of tokens to add; fewer if the model ends the document earlier."""
    samples: int = 1
    """Number of continuations, which are drawn at the same time."""
    temperature: float = 0.8
    """Divisor of the logits; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Number of tokens to choose from: the likeliest ones. The default is all tokens."""
    top_p: float = 1.0
    """Total probability of the tokens to choose from: the likeliest ones."""
    seed: int = 0
    """Seed of the random draws; the result does not depend on the mesh."""
    tokenizer: Path | None = None
    """A Hugging Face tokenizer.json. The default is that of the run."""
    zero: Literal[0, 3] = 0
    """ZeRO level. 3 splits the weights over the devices, which gather them for every token; models
    that do not fit on one device need it. The default is 3 if the run used 3, and 0 otherwise."""

    @classmethod
    def of_run(cls, config: Any) -> TextOptions:
        return cls(
            temperature=config.sample.temperature,
            tokenizer=config.data.tokenizer,
            devices=config.devices,
            mesh=config.mesh,
            zero=3 if config.zero == 3 else 0,
        )

    def __post_init__(self) -> None:
        for name in ("tokens", "samples"):
            check_minimum(name, getattr(self, name), 1)
        if self.prompt is not None and self.prompt_file is not None:
            raise InputError(
                "The prompt must be given once; got --prompt and --prompt-file "
                f"{str(self.prompt_file)!r}. Leave one of them out."
            )
