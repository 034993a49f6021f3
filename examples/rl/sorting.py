"""A task whose answers a program can check: `vtkgn>` asks for the letters in order, `gkntv`.

    python examples/rl/sorting.py start.jsonl      # prompts with completions, 2 in 5 of them right

Tokens are the bytes of the text, and the byte 0 ends an answer, as in the data of train.py.
"""

import argparse
import json
import random
import zlib
from pathlib import Path
from string import ascii_lowercase

LETTERS = 5
END = 0
LONGEST = LETTERS + 1
"""Tokens of an answer, with the one that ends it."""


def words(count, seed, *, held_out=False):
    """Random words. One of 50 words is held out: no training reads it."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        word = "".join(rng.choices(ascii_lowercase, k=LETTERS))
        if (zlib.crc32(word.encode()) % 50 == 0) == held_out:
            found.append(word)
    return found


def prompt(word):
    """The tokens that ask for the letters of a word in order."""
    return [*f"{word}>".encode()]


def reward(word, answer):
    """1 if the tokens of an answer are the letters in order and its end, or else 0."""
    return float([*answer] == [*sorted(word.encode()), END])


def examples(count, right):
    """Prompts with completions. Only a share is right; the others are in random order."""
    rng = random.Random(0)
    for word in words(count, seed=0):
        letters = sorted(word) if rng.random() < right else rng.sample(word, len(word))
        yield {"prompt": f"{word}>", "completion": "".join(letters)}


def write_lines(path, lines):
    """Writes a JSONL file, which appears when it is whole: a trainer may wait for it."""
    hidden = path.with_name(f".{path.name}")
    hidden.write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")
    hidden.rename(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=40_000)
    parser.add_argument("--right", type=float, default=0.4)
    options = parser.parse_args()
    write_lines(options.out, examples(options.count, options.right))


if __name__ == "__main__":
    main()
