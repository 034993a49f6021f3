"""Samples of text: what sample.py draws from a run of a GPT, and what train.py shows at its end."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Integer

import startrail_jax as st
from startrail_jax.errors import InputError
from trainer.data.documents import Document
from trainer.data.files import holds_tokens
from trainer.gpt.chat.stops import read_stops
from trainer.gpt.chat.template import CONFIG_FILE, TEMPLATE_FILE, ChatTemplate
from trainer.gpt.config import TOKENIZER, GPTTrainConfig, TextOptions, attention_of
from trainer.gpt.corpus import Corpus
from trainer.gpt.generation import Generator
from trainer.gpt.pretrained.defaults import eos_of, kept_folder, kept_tokenizer, require_bytes
from trainer.gpt.text import (
    IdTokenizer,
    TextStream,
    Tokenizer,
    encode_prompt,
    open_tokenizer,
)
from trainer.gpt.token_choice import Sampling
from trainer.run.folder import KEPT_FOLDER
from trainer.session import Session
from trainer.weights.adapters import restore_model


def sample_text(
    run_dir: Path, config: GPTTrainConfig, options: TextOptions, mesh: Mesh, session: Session
) -> None:
    """Continues a prompt with the model of a run, and prints the text as it is generated."""
    if config.model.scores:
        raise InputError(
            f"sample.py continues text; got {str(run_dir)!r}, the run of a reward model. Use "
            "score.py."
        )
    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    tokenizer = tokenizer_of_run(run_dir, config, options.tokenizer, note=session.note)
    template = template_of_run(run_dir, config, options.tokenizer) if options.chat else None
    prompt = prompt_tokens(tokenizer, options, session, template)
    attention = st.Attention(mesh, causal=True, **attention_of(config.model))
    generator = Generator(config, attention, sampling, zero=options.zero)
    generator.check_prompt(prompt)
    weights, step = restore_model(run_dir, config, generator.weight_shapes, note=session.note)
    session.note(f"model: {run_dir} after step {step}")
    session.note(f"prompt: {len(prompt):,} {tokenizer.unit}s")
    if len(prompt) + options.tokens > config.seq_len:
        session.note(
            f"prompt and sample make {len(prompt) + options.tokens:,} tokens: the model was "
            f"trained on sequences of {config.seq_len:,}"
        )
    streams = [TextStream(tokenizer, prompt) for _ in range(options.samples)]
    tokens = generator(
        weights,
        [prompt] * options.samples,
        num_tokens=options.tokens,
        end_of_document=tokenizer.end_of_document,
        stops=stops_of_run(run_dir, config, options.tokenizer),
    )
    _print_streams(streams, tokens, session)


def tokenizer_of_run(
    run_dir: Path, config: GPTTrainConfig, path: Path | None, *, note: Callable[[str], None]
) -> Tokenizer:
    """The tokenizer that a sample of a run is drawn with."""
    if copy := kept_tokenizer(path, config, run_dir):
        note(f"tokenizer: {copy}, as {path} is gone")
    data = dataclasses.replace(config.data, tokenizer=copy or path)
    tokens = bool(data.path) and holds_tokens(data.path[0], "data.path")
    if not config.steps and path is None and not tokens:
        require_bytes(run_dir / KEPT_FOLDER, config.model.vocab_size, "--tokenizer")
    return open_tokenizer(data, vocab_size=config.model.vocab_size)


def template_of_run(run_dir: Path, config: GPTTrainConfig, path: Path | None) -> ChatTemplate:
    """The chat template that a sample of a run is drawn with."""
    tokenizer = kept_tokenizer(path, config, run_dir) or path
    template = tokenizer and ChatTemplate.find(tokenizer, config.data.chat_template)
    if not template:
        raise InputError(
            f"--chat must have a chat template, beside the tokenizer as {TEMPLATE_FILE} or in "
            f"{CONFIG_FILE}; got tokenizer={None if tokenizer is None else str(tokenizer)!r} "
            "without one. Leave out --chat, or give --tokenizer."
        )
    return template


def stops_of_run(run_dir: Path, config: GPTTrainConfig, path: Path | None) -> tuple[int, ...]:
    """The tokens that ended answers in the data of a run, and those at which its pretrained model
    stops elsewhere. If `path`, the tokenizer.json of the sample, is another one than theirs, there
    are none: its ids are other tokens."""
    stops = read_stops(run_dir) if _same_file(path, config.data.tokenizer) else ()
    if config.init_from is None:
        return stops
    folder = kept_folder(run_dir)
    if path in (None, config.init_from / TOKENIZER) or _same_file(path, folder / TOKENIZER):
        stops = (*stops, *eos_of(folder))
    return stops


def _same_file(path: Path | None, other: Path | None) -> bool:
    """Whether two paths are the same, or files with the same content."""
    if path == other or path is None or other is None:
        return path == other
    return path.is_file() and other.is_file() and path.read_bytes() == other.read_bytes()


def _print_streams(streams: list[TextStream], tokens: Any, session: Session) -> None:
    """Prints the first text as it is generated, and the others, generated beside it, after it."""
    waiting = ["" for _ in streams]

    def show(row: int, text: str) -> None:
        if row:
            waiting[row] += text
        else:
            session.print(text, end="")

    def print_heading(row: int) -> None:
        if len(streams) > 1:
            session.print(f"--- sample {row + 1}")

    print_heading(0)
    for step in tokens:
        for row, token in enumerate(step):
            if token is not None:
                show(row, streams[row].add(token))
    for row, stream in enumerate(streams):
        show(row, stream.end())
        if row:
            print_heading(row)
        session.print(waiting[row])


def prompt_tokens(
    tokenizer: Tokenizer,
    options: TextOptions,
    session: Session,
    template: ChatTemplate | None = None,
) -> Integer[np.ndarray, " prompt"]:
    """The tokens to continue, as a conversation if there is a template. Without a prompt, a new
    line as in nanoGPT: the program does not wait silently for standard input."""
    given = options.prompt is not None or options.prompt_file is not None
    if given or sys.stdin is None or not sys.stdin.isatty():
        text = _read_prompt(options)
        if template is None:
            return encode_prompt(tokenizer, text)
        if text.strip():
            return encode_prompt(tokenizer, template.question(text.strip()))
    if template:
        raise InputError("--chat must have a prompt with text; got none. Give --prompt TEXT.")
    session.note("no prompt is given: the sample begins at a new line; --prompt TEXT gives one")
    end = tokenizer.end_of_document
    if not isinstance(tokenizer, IdTokenizer):
        (tokens,) = tokenizer.encode([Document(key="", place="a new line", text="\n")])
        if len(tokens) > 1:
            return tokens[:-1]
    # Of tokens whose text is not known, or with a tokenizer that drops spaces.
    return np.array([0 if end is None else end], np.int32)


def _read_prompt(options: TextOptions) -> str:
    """The text to continue."""
    if options.prompt is not None:
        return options.prompt
    file = options.prompt_file
    if file is None and sys.stdin is None:
        raise InputError(
            "There must be a prompt; got none, and a standard input that is closed. Give --prompt "
            "or --prompt-file."
        )
    try:
        raw = sys.stdin.buffer.read() if file is None else file.read_bytes()
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = "standard input" if file is None else repr(str(file))
        raise InputError(
            f"The prompt must be UTF-8; got the byte {error.object[error.start]:#04x} at offset "
            f"{error.start} of {place}. Convert it to UTF-8."
        ) from error
    except OSError as error:
        raise InputError(
            f"--prompt-file must be a file that can be read; got {str(file)!r}: "
            f"{error.strerror}. Correct the path."
        ) from error


class Continuation:
    """Continues the start of the held-out data: a `trainer.task.Sampler`."""

    def __init__(self, program: Any, corpus: Corpus) -> None:
        """Compiles nothing yet. Prompt and text have `sample.length` tokens, or fewer if the
        sequence is too short or a document ends."""
        config: Any = program.config
        self._corpus, self._length = corpus, config.sample.length
        length = min(self._length, config.seq_len - self._length)
        self._prompt = _longest_part(corpus.held_out[0].read(0, length), corpus.end_of_document)
        window = attention_of(config.model)["window"]
        attention = dataclasses.replace(program.attention, window=window)
        sampling = Sampling(temperature=config.sample.temperature, seed=config.seed)
        self._generator = Generator(config, attention, sampling, zero=config.zero)

    def __call__(self, weights: Any, step: int, interrupted: Callable[[], bool]) -> tuple[str, ...]:
        """Prompt and text, as ids if their text is not known."""
        del step
        tokens = self._generator(
            weights,
            [self._prompt],
            num_tokens=self._length,
            end_of_document=self._corpus.end_of_document,
            stops=self._corpus.stops,
        )
        text = []
        while not interrupted() and (new := next(tokens, None)) is not None:
            text += [token for token in new if token is not None]
        show: Any = self._corpus.decode or (lambda tokens: " ".join(map(str, tokens)))
        return (
            f"--- {self._corpus.shown}\n{show(self._prompt)}",
            f"--- continued by the model\n{show(np.array(text, np.int32))}",
        )


def _longest_part(
    tokens: Integer[np.ndarray, " tokens"], end_of_document: int | None
) -> Integer[np.ndarray, " part"]:
    """The longest run of tokens in which no document ends; all tokens if there is no such run."""
    if end_of_document is None:
        return tokens
    ends = np.flatnonzero(tokens == end_of_document)
    parts = [part[part != end_of_document] for part in np.split(tokens, ends)]
    return max(parts, key=len) if any(map(len, parts)) else tokens
