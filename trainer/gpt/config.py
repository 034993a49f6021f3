"""Settings of a run of a GPT, and of sampling from it. Imports no jax: `--help` must be fast."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from models.checks import check_minimum, check_range
from models.config import GPTConfig
from models.parts.attention import Keys, keys_of
from models.parts.gpt import gpt_weights
from models.weights import projections
from startrail_jax.errors import InputError
from trainer.config import LoraConfig, SampleConfig, TrainConfig
from trainer.gpt.objectives.distill import Distill
from trainer.gpt.objectives.loss import RowLoss
from trainer.gpt.objectives.policy import Policy
from trainer.gpt.objectives.preference import Preference
from trainer.gpt.objectives.replay import Replay
from trainer.gpt.objectives.reward import Reward
from trainer.places import check_folder, check_on_disk
from trainer.task import SampleOptions

TOKENIZER = "tokenizer.json"
"""The file of a tokenizer in the folder of a model."""


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
    share_prefix: bool | None = None
    """Whether rollouts that begin alike, wherever in a file, and the two answers of a pair stand in
    a row as one tree, with their common beginning once. Losses and gradients are those of separate
    texts. The default is yes where an objective reads rollouts or pairs, except with
    --replay-experts and --attention.linear-backend jla, which need separate texts."""
    follow: bool = False
    """Whether `path` is a folder in which files of rollouts or pairs appear while the run trains.
    They are trained on in the order of their names, in which step_9 comes before step_10; a file
    must appear whole, as by renaming it. A file is one step, unless `epochs_a_file` says more. The
    same command goes on with the file at which a run was stopped, which must still be there."""
    epochs_a_file: int | None = None
    """Number of times that each file is trained on with `follow`, in batches and in random order.
    The default is one step on the whole file."""
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
        self._check_follow()
        if self.batches == "rows" and self.draw != DataConfig.draw:
            raise InputError(
                "data.draw is a number of documents, for batches of these; got "
                f"draw={self.draw} with data.batches='rows'. Leave it out, or use "
                "--data.batches documents."
            )

    def _check_follow(self) -> None:
        """Raises if a setting does not suit files that appear while the run trains."""
        check_minimum("data.epochs_a_file", self.epochs_a_file, 1)
        if not self.follow:
            if self.epochs_a_file is not None:
                raise InputError(
                    "data.epochs_a_file needs data.follow; got "
                    f"epochs_a_file={self.epochs_a_file} alone. Use --data.follow, or leave it out."
                )
            return
        self.check_rollouts()
        if len(self.path) != 1 or self.batches == "documents":
            raise InputError(
                "data.follow needs one folder as data.path, and batches of rows; got "
                f"{len(self.path)} paths, batches={self.batches!r}. Give one folder, and leave out "
                "--data.batches."
            )
        if self.validation_fraction != DataConfig.validation_fraction:
            raise InputError(
                "Nothing is held out of files that appear while a run trains; got "
                f"validation_fraction={self.validation_fraction}, follow=True. Use "
                "--data.validation-path."
            )

    def check_rollouts(self) -> None:
        """Raises if a setting does not suit rollouts."""
        if self.loss is not None or not self.mask_documents or self.longest_document is not None:
            raise InputError(
                "Rollouts have weights of their own, and attend to themselves alone; got "
                f"data.loss={self.loss!r}, mask_documents={self.mask_documents}, "
                f"longest_document={self.longest_document}. Leave these out."
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
class ExportConfig:
    """Weights for an inference engine, while the run trains."""

    every: int | None = None
    """Number of steps between exports, the first one before the first step; None for none. Each is
    a folder in the format of Hugging Face, such as step_000012, which appears when it is whole;
    adapters are exported by themselves, in PEFT's format."""
    dir: Path | None = None
    """Folder for these folders. The default is `exported` in that of the run."""
    keep: int | None = None
    """Number of these folders to keep: the newest ones. The default is all."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of the tensors. The default is that of python -m trainer.gpt.export."""

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            check_minimum(f"export.{name}", getattr(self, name), 1)
        check_folder("export.dir", self.dir or Path())
        given = [x for x in ("dir", "keep", "dtype") if getattr(self, x) is not None]
        if given and self.every is None:
            raise InputError(
                f"export.{given[0]} needs export.every; got {given[0]}="
                f"{str(getattr(self, given[0]))!r} alone. Give --export.every too."
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
    policy: Policy = field(default_factory=Policy)
    """Policy gradients."""
    preference: Preference = field(default_factory=Preference)
    """Losses of pairs of answers."""
    reward: Reward = field(default_factory=Reward)
    """A reward model."""
    distill: Distill = field(default_factory=Distill)
    """Divergence from a teacher."""

    init_from: Path | None = None
    """A folder with a pretrained model in the format of Hugging Face: config.json, *.safetensors
    and tokenizer.json. Its config.json defines the model; flags --model.* change it."""
    init_text_only: bool = False
    """Whether `init_from` may hold a model of images and text, of which only the text model is
    taken."""
    seq_len: int
    """Number of tokens in a sequence."""
    objective: Literal["next_token", "policy", "preference", "reward", "distill"] = "next_token"
    """What is learned (docs/posttraining.md): to predict the next token; a "policy", from rollouts
    with rewards; a "preference" or a "reward" model, from pairs of answers; or to "distill" a
    teacher, from its log-probabilities. The settings of an objective begin with its name."""
    export: ExportConfig = field(default_factory=ExportConfig)
    """Exports while the run trains."""
    experts: Literal["auto", "gather", "dispatch"] = "auto"
    """Whether ZeRO 3 gathers the experts of a layer, or sends each token to the devices that have
    its experts. The default is what sends fewer bytes: to gather them, if sequences are long."""
    replay_experts: bool = False
    """Whether each token of a rollout goes to the experts that its record names (`experts`), those
    of the engine, in place of the router's choice. Their shares are computed from the router's
    logits, so that it learns, and the losses and biases that balance experts count these."""
    sample: TextSampleConfig = field(default_factory=TextSampleConfig)
    """Continuations of the held-out data, in the log."""

    @staticmethod
    def of_older_file(values: dict[str, Any]) -> dict[str, Any]:
        """The settings of a config.json with other names for `sample`."""
        values = TrainConfig.of_older_file(values)
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
        for name, loss in self.row_losses.items():
            if loss.changed and name != self.objective:
                raise InputError(
                    f"{name}.{loss.changed[0]} needs objective={name!r}; got objective="
                    f"{self.objective!r}. Use --objective {name}, or leave it out."
                )
        if self.row_loss is not None:
            self.data.check_rollouts()
        self._check_scores()
        if self.replay is not None and getattr(self.row_loss, "form", None) != "rollouts":
            raise InputError(
                "replay_experts needs an objective on rollouts, whose records name experts; got "
                f"objective={self.objective!r}. Leave it out."
            )
        if self.data.share_prefix:
            self._check_share_prefix()
        if self.export.every is not None and self.has_adapters and self.init_from is None:
            raise InputError(
                "export.every needs init_from for adapters, which are exported for a pretrained "
                f"model; got every={self.export.every}, init_from=None. Leave out --export.every, "
                "or --lora.rank."
            )
        longest = self.data.longest_document
        if longest is not None and longest >= self.seq_len:
            raise InputError(
                "data.longest_document must be below seq_len, at which documents are cut anyway; "
                f"got longest_document={longest}, seq_len={self.seq_len}. Leave it out."
            )
        if self.lora.rank is not None and self.model.experts.balance_rate:
            raise InputError(
                "model.experts.balance_rate moves weights, which adapters freeze; got "
                f"balance_rate={self.model.experts.balance_rate}, lora.rank={self.lora.rank}. Use "
                "--model.experts.balance-loss."
            )
        self.lora.check_targets(projections(gpt_weights(self.model)))

    def _check_share_prefix(self) -> None:
        """Raises unless beginnings can be shared."""
        if self.row_loss is None:
            raise InputError(
                "data.share_prefix needs rollouts or pairs; got share_prefix=True with objective="
                f"{self.objective!r}. Leave it out."
            )
        if name := self._needs_separate_texts:
            raise InputError(
                f"{name} needs separate texts; got it with data.share_prefix=True. Use "
                "--data.share-prefix False, or leave it out."
            )

    def _check_scores(self) -> None:
        """Raises unless a model of scores, and nothing else, learns to reward."""
        scores = self.model.scores
        if scores != (self.objective == "reward"):
            raise InputError(
                "objective='reward' and model.scores need each other; got objective="
                f"{self.objective!r}, scores={scores}. Use --objective reward for a reward model, "
                "and another model for anything else."
            )
        if scores and self.sample.length:
            raise InputError(
                "sample.length must be 0 for a reward model, which continues no text; got "
                f"sample.length={self.sample.length}. Leave it out."
            )
        if scores and self.lora.rank is not None:
            raise InputError(
                "A reward model has a new head, which adapters would freeze; got objective="
                f"'reward', lora.rank={self.lora.rank}. Leave out --lora.rank, or use --frozen."
            )

    @property
    def row_losses(self) -> dict[str, RowLoss]:
        """The settings of all objectives but the next token, by name."""
        return {name: x for name, x in vars(self).items() if isinstance(x, RowLoss)}

    @property
    def row_loss(self) -> RowLoss | None:
        """The loss and settings of the objective; None for the next token."""
        return self.row_losses.get(self.objective)

    @property
    def replay(self) -> Replay | None:
        """What the experts of rollouts are; None to leave the choice to the routers."""
        return Replay.of_model(self.model) if self.replay_experts else None

    @property
    def arrays(self) -> dict[str, tuple[str, tuple[int, ...]]] | None:
        """The numbers that tokens have in a batch, as `RowLoss.arrays`; None for the next token."""
        if self.row_loss is None:
            return None
        return self.row_loss.arrays | ({} if self.replay is None else self.replay.arrays)

    @property
    def shares_prefixes(self) -> bool:
        """Whether rows of the data are trees."""
        if self.data.share_prefix is None:
            return self.row_loss is not None and not self._needs_separate_texts
        return self.data.share_prefix

    @property
    def _needs_separate_texts(self) -> str:
        """The setting that needs texts without shared beginnings; "" for none."""
        if self.replay_experts:
            return "replay_experts"
        return "attention.linear_backend" if self.attention.linear_backend == "jla" else ""

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
        idle += tuple(name for name in self.row_losses if name != self.objective)
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
        keys = keys_of(self.model)
        if len(keys) > 1:
            return super().attention_call | self._calls_by_mixer(keys)
        if (latents := keys.get("latent")) is not None:
            return super().attention_call | _sizes_of(latents)
        if all(window is None or window >= self.seq_len for window in windows):
            return super().attention_call
        own = {"windows": dict(windows), "exchange": self.attention.exchange}
        return super().attention_call | {"seq_len": self.seq_len} | own

    def _calls_by_mixer(self, keys: Mapping[str, Keys]) -> dict[str, Any]:
        """`attention_call` of layers with different heads. Degrees that fit the greatest common
        divisor of their key heads are looked at."""
        pairs = [*zip(self.model.layer_mixers, self.layer_windows, strict=True)]
        kinds = tuple(
            _sizes_of(own)
            | {"windows": dict(Counter(window for name, window in pairs if name == mixer))}
            for mixer, own in keys.items()
        )
        heads = math.gcd(*(own.heads for own in keys.values() if own.latent_dim is None))
        heads = heads or 1
        own: dict[str, Any] = {"seq_len": self.seq_len, "exchange": self.attention.exchange}
        return own | {"kv_heads": heads, "windows": {None: 1}, "kinds": kinds}


def _sizes_of(keys: Keys) -> dict[str, Any]:
    """The sizes of the heads of a kind of layers, as `attention_call` has them."""
    return {
        "kv_heads": keys.heads,
        "head_dim": keys.head_dim,
        "value_head_dim": keys.value_dim,
        "latent_dim": keys.latent_dim,
    }


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
