"""The text encoder of captions: a model of the library transformers, on PyTorch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from startrail_jax.errors import InputError
from trainer.data.files import digest_of_tokens
from trainer.data.opening import read_object, reading
from trainer.dit.vae import require_weights
from trainer.errors import MissingPackageError

OPTION = "--text-encoder"
TOKENS_AT_A_TIME = 2**13
"""Tokens that a GPU encodes at a time, unless a text has more."""
_PATTERNS = ("*.safetensors", "*.bin", "*.json", "*.model", "*.txt")
"""Files on which depends what a text becomes."""


class TextSizes(NamedTuple):
    """What the configs of a text encoder say."""

    text_dim: int
    """Channels of an embedded token."""
    most: int | None
    """Tokens of a text at most; None if any number."""


class TextEncoder:
    """A text encoder with its tokenizer, loaded in float32: T5, CLIP and others whose class in
    transformers is one of `AutoModelForTextEncoding`, and language models.

    A token becomes its vector in the last layer, after the last norm.
    """

    def __init__(self, folder: Path, *, device: str | None = None) -> None:
        """Loads config and tokenizer; the model, when it first encodes.

        Args:
            folder: of the model and its tokenizer, or of a pipeline of diffusers with the
                subfolders text_encoder and tokenizer.
            device: of PyTorch; None for the first GPU, or the CPU.

        Raises:
            ValueError: if the folder holds none, or one of another kind.
        """
        self._folder, of_tokenizer = _folders(folder)
        transformers = _library()
        try:
            config = transformers.AutoConfig.from_pretrained(self._folder, local_files_only=True)
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                of_tokenizer, local_files_only=True
            )
        except ImportError as error:
            raise MissingPackageError(
                f"The tokenizer of {str(of_tokenizer)!r} needs a package that is missing; got "
                f"{error}. Install it, or save the tokenizer as a tokenizer.json."
            ) from error
        except (OSError, ValueError, KeyError) as error:
            raise InputError(
                f"{OPTION} must be a folder of transformers with the config of a text encoder and "
                f"its tokenizer; got {str(folder)!r}: {error}. Download it again."
            ) from error
        self._config, self._class = _class_of(config, folder)
        self._device = device
        self._model: Any = None
        positions = getattr(self._config, "max_position_embeddings", None)
        limits = self._tokenizer.model_max_length, positions
        known = [x for x in limits if x is not None and x < 10**6]  # Those without have 10**30.
        self.sizes = TextSizes(self._config.hidden_size, min(known, default=None))

    def tokens(self, text: str, most: int) -> list[int]:
        """The tokens of a text.

        Raises:
            ValueError: if they are more than `most`.
        """
        # The tokenizer would warn of a text that is too long for the model.
        found = self._tokenizer(text, verbose=False).input_ids
        if len(found) > most:
            shown = text if len(text) <= 40 else f"{text[:40]}..."
            limit, way_out = self.sizes.most, f"Shorten it, or use --text-tokens {len(found)}."
            if limit is not None and len(found) > limit:
                way_out = f"Shorten it: the encoder takes {limit}."
            raise InputError(
                f"A caption must have at most {most} tokens; got {shown!r} with {len(found)}. "
                f"{way_out}"
            )
        return found

    def encode(
        self, texts: Sequence[str], *, most: int | None = None
    ) -> list[Float32[np.ndarray, "_ D"]]:
        """The embedded tokens of texts; none of an empty text, which is no text.

        Raises:
            ValueError: if one has more than `most` tokens, or more than the encoder takes.
        """
        limit = min((x for x in (most, self.sizes.most) if x is not None), default=2**31)
        rows = [self.tokens(text, limit) if text else [] for text in texts]
        found = [np.zeros((0, self.sizes.text_dim), np.float32) for _ in rows]
        numbers = sorted((i for i, row in enumerate(rows) if row), key=lambda i: len(rows[i]))
        if numbers and self._model is None:
            self._load()
        while numbers:
            # A CPU gains nothing by several at a time, which would round otherwise.
            on_cpu = self._device == "cpu"
            count = 1 if on_cpu else max(TOKENS_AT_A_TIME // len(rows[numbers[-1]]), 1)
            part, numbers = numbers[-count:], numbers[:-count]
            for i, x in zip(part, self._encoded([rows[i] for i in part]), strict=True):
                found[i] = x
        return found

    def _encoded(self, rows: list[list[int]]) -> list[Float32[np.ndarray, "_ D"]]:
        import torch  # pyright: ignore[reportMissingImports]

        length = max(map(len, rows))
        padding = self._tokenizer.pad_token_id or 0
        filled = [[*row, *[padding] * (length - len(row))] for row in rows]
        mask = [[1] * len(row) + [0] * (length - len(row)) for row in rows]
        ids, mask = (torch.tensor(x, device=self._device) for x in (filled, mask))
        with torch.no_grad():
            hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        hidden = hidden.float().cpu().numpy()
        if hidden.shape[-1] != self.sizes.text_dim:
            raise InputError(
                f"{OPTION} must give tokens of its hidden_size, {self.sizes.text_dim}; got "
                f"{hidden.shape[-1]} from {str(self._folder)!r}. Give another folder."
            )
        return [x[: len(row)] for x, row in zip(hidden, rows, strict=True)]

    def _load(self) -> None:
        try:
            import torch  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise _missing(error) from error
        self._device = self._device or ("cuda" if torch.cuda.is_available() else "cpu")
        transformers = _library()
        verbosity = transformers.logging.get_verbosity()
        # It lists all weights of a CLIP that are not of its text encoder.
        transformers.logging.set_verbosity_error()
        try:
            model, found = getattr(transformers, self._class).from_pretrained(
                self._folder,
                config=self._config,
                local_files_only=True,
                dtype=torch.float32,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(
                f"{OPTION} must be a whole folder of transformers; got {str(self._folder)!r}: "
                f"{error}. Download it again."
            ) from error
        finally:
            transformers.logging.set_verbosity(verbosity)
        require_weights(found, f"{OPTION} must hold all weights of its model", self._folder)
        self._model = model.to(self._device).eval()


def digest_of_encoder(folder: Path) -> str:
    """A hash of the files of a text encoder and its tokenizer. Of a large file, parts count."""
    files = {
        path for place in _folders(folder) for pattern in _PATTERNS for path in place.glob(pattern)
    }
    with reading(folder):
        content = [f"{path.name} {digest_of_tokens(path)}" for path in sorted(files)]
    return hashlib.sha256("\n".join(content).encode()).hexdigest()[:16]


def _folders(folder: Path) -> tuple[Path, Path]:
    """The folders of a model and of its tokenizer."""
    if (folder / "text_encoder" / "config.json").is_file():
        return folder / "text_encoder", folder / "tokenizer"
    values = read_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    if "model_type" not in values:
        got = "one without model_type" if values else "none"
        raise InputError(
            f"{OPTION} must be a folder of transformers with the config.json of a text encoder, "
            f"such as a download of google/t5-v1_1-xxl; got {got} in {str(folder)!r}. Give "
            "another folder."
        )
    return folder, folder


def _class_of(config: Any, folder: Path) -> tuple[Any, str]:
    """The config of the part of a model that encodes texts, and its class in transformers."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    )

    # A CLIP holds a text encoder; get_text_config gives that of T5 itself.
    text = config.get_text_config()
    if text.model_type in MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES:
        return text, "AutoModelForTextEncoding"
    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and text is config:
        return config, "AutoModel"
    raise InputError(
        f"{OPTION} must be a T5, a CLIP, or another text encoder or language model of "
        f"transformers; got one of {config.model_type} in {str(folder)!r}. Give another folder."
    )


def _library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise _missing(error) from error
    return transformers


def _missing(error: ImportError) -> MissingPackageError:
    return MissingPackageError(
        f"Captions are encoded with transformers and PyTorch; got {error}. Run: pip install -e "
        "'.[video]'"
    )
