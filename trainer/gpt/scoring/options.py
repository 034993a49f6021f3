"""What score.py is asked. Imports no jax: `--help` must be fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from models.checks import check_minimum, check_range
from startrail_jax.errors import InputError
from trainer.gpt.config import GPTTrainConfig
from trainer.task import SampleOptions


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(SampleOptions):
    """What score.py writes, and how it reads."""

    key: Literal["ref_logprobs", "old_logprobs", "logprobs"] = "ref_logprobs"
    """The key under which log-probabilities are written: those of a reference, of the model before
    its steps on a file, or of an engine."""
    entropy: bool = False
    """Whether to write the entropy of each target's distribution too, under `entropy`."""
    top_k: int | None = None
    """Number of the likeliest tokens in each place whose ids and log-probabilities are written
    under `teacher`, for distillation. The default is none."""
    temperature: float = 1.0
    """Divisor of the logits: that of the sampler with whose log-probabilities these are
    compared."""
    replay_experts: bool = False
    """Whether each token goes to the experts that its record names under `experts`, in place of the
    router's choice, as with `--replay-experts` of train.py."""
    step: int | None = None
    """Step of the checkpoint of a run. The default is the newest one that is whole."""
    seq_len: int
    """Number of tokens in a row, which holds several records; none may be longer."""
    batch_size: int | None = None
    """Number of rows at a time, over all devices together. The default is one for each shard of the
    batch."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of activations. The default is that of the model."""
    zero: Literal[0, 3] = 0
    """ZeRO level. 3 splits the weights over the devices, which models need that do not fit one."""
    tile: int | None = 1024
    """Largest number of tokens of a device whose logits are there at a time; None for all."""
    text_key: str = "text"
    """The key under which a record holds a text, if it has no tokens."""
    loss: Literal["answers", "last", "all"] = "answers"
    """Which tokens of conversations and completions count, as in `--data.loss` of train.py."""
    messages: str = "messages"
    """The key of conversations."""
    ignored_keys: tuple[str, ...] = ()
    """Keys of records with nothing to score, which are copied."""
    tokenizer: Path | None = None
    """A Hugging Face tokenizer.json for text. The default is that of the model."""
    chat_template: Path | None = None
    """A file with the chat template. The default is that of the tokenizer."""

    @classmethod
    def of_run(cls, config: GPTTrainConfig) -> ScoreOptions:
        return cls(
            devices=config.devices,
            mesh=config.mesh,
            seq_len=config.seq_len,
            zero=3 if config.zero == 3 else 0,
            tokenizer=config.data.tokenizer,
            chat_template=config.data.chat_template,
            messages=config.data.messages,
            text_key=config.data.text_key,
        )

    def __post_init__(self) -> None:
        for name in ("top_k", "step", "seq_len", "batch_size", "tile"):
            check_minimum(name, getattr(self, name), 0 if name == "step" else 1)
        check_range("temperature", self.temperature, "above 0 and finite")

    def check(self, *, rewards: bool) -> None:
        """Raises if an option has no meaning for a reward model, which gives no probabilities."""
        if not rewards:
            return
        names = ("key", "entropy", "top_k", "temperature", "replay_experts")
        given = {x: getattr(self, x) for x in names if getattr(self, x) != getattr(type(self), x)}
        if given:
            raise InputError(
                "A reward model gives rewards, and no probabilities; got "
                f"{', '.join(f'{name}={x!r}' for name, x in given.items())}. Leave these out."
            )
