"""Turns text into files of tokens, which training maps into memory and never tokenises again.

    python -m trainer.gpt.tokenize books/ tokens/books --tokenizer tokenizer.json
    python -m trainer.gpt.tokenize articles.jsonl.gz tokens/articles --tokenizer tokenizer.json
    python train.py llama3_8b --data.path tokens/books        # with the flags that are printed

IN is what `--data.path` of train.py takes as text: a file (*.txt, *.jsonl, either also as *.gz), or
a folder of such files. OUT is a new folder with the tokens to train
on, train.npy, and those that are held out, val.npy; it appears only when it is whole.
"""

from __future__ import annotations

import trainer.packages  # noqa: F401  First: it says what is not installed.

# isort: split

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from startrail_jax.errors import InputError
from trainer.data.cache import check_new, write_folder
from trainer.gpt.config import DataConfig
from trainer.gpt.corpus import check_effects, find_inputs, open_text
from trainer.gpt.encoding import encode_to_folder, read_encoded
from trainer.gpt.tokenizer import FileTokenizer
from trainer.printable import printable, say

# More than any tokenizer has: the model, which is not known here, has as many as it needs.
ANY_VOCABULARY = 1 << 31


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions:
    """What to tokenise, and where to write the tokens."""

    text: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="IN")]
    """Text, or a folder of it."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder for the tokens, which must not exist yet."""
    tokenizer: Path | None = None
    """A Hugging Face tokenizer.json. By default, every byte of UTF-8 is a token."""
    text_key: str = "text"
    """The key under which a line of a *.jsonl file holds its text."""
    end_of_document: int | None = None
    """Id of the token that ends a document. The default is 0 for bytes, and the token with one of
    the usual names for a tokenizer."""
    begin_of_document: int | None = None
    """Id of a token that is put in front of every document. The default is none."""
    validation_path: Path | None = None
    """Held-out text. The default is a fraction of IN."""
    validation_fraction: float = 0.05
    """Fraction that is held out if there is no `validation_path`: of the documents, or of every
    document at its end where no whole ones can be."""


def tokenize(options: TokenizeOptions) -> str:
    """Writes the folder of tokens.

    Returns:
        The command that trains on it.
    """
    check_new("OUT", options.out)
    settings = {x: value for x, value in vars(options).items() if x not in ("text", "out")}
    config = DataConfig(path=(options.text,), **settings)
    (found,) = inputs = find_inputs(config)
    files = found.files
    if found.holds_tokens:
        raise InputError(
            f"IN must be text; got {files.kind} files in {files.name!r}. They hold tokens already: "
            f"give them to train.py as --data.path {files.name}."
        )
    check_effects(config, inputs)
    text = open_text(files, found.validation, config, ANY_VOCABULARY)
    write_folder(options.out, lambda part: encode_to_folder(text, part), option="OUT")
    train, held_out = read_encoded(options.out)
    say(
        f"{options.out}: {len(train.tokens):,} tokens of {train.documents:,} documents to train "
        f"on; {len(held_out.tokens):,} of {held_out.documents:,} held out"
    )
    if options.begin_of_document is not None and isinstance(text.tokenizer, FileTokenizer):
        say(
            f"every document begins with {text.tokenizer.name_of(options.begin_of_document)}: "
            "begin prompts of sample.py --tokenizer with it too, which files of tokens do not say"
        )
    flags = f"--data.path {options.out} --data.end-of-document {text.tokenizer.end_of_document}"
    return f"python train.py {flags} --model.vocab-size {text.tokenizer.num_ids}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; on a mistake, prints a message and exits with status 1 or 2."""
    options = tyro.cli(
        TokenizeOptions,
        prog="python -m trainer.gpt.tokenize",
        description=__doc__,
        args=arguments,
    )
    try:
        command = tokenize(options)
    except InputError as error:
        # The flags have no prefix here.
        sys.exit(printable(str(error)).replace("--data.", "--"))
    print(printable(f"next: {command}"))


if __name__ == "__main__":
    from trainer.run.exit import exit_on_user_errors

    with exit_on_user_errors():
        main()
