"""Pairs of a right and a wrong answer, which a model itself has drawn, for DPO.

python examples/rl/pairs.py MODEL pairs.jsonl
"""

import argparse
from pathlib import Path

import sorting
from engine import Engine

WORDS_AT_A_TIME, DRAWS = 128, 8


def pairs(engine, words, seed):
    """A pair for each word to which both kinds of answers are drawn."""
    drawn = engine.answers([word for word in words for _ in range(DRAWS)], seed)
    for word in words:
        by_reward = {}
        for _ in range(DRAWS):
            answer = next(drawn)
            if answer[-1] == sorting.END and len(answer) > 1:
                text = bytes(answer[:-1]).decode(errors="replace")
                by_reward[sorting.reward(word, answer)] = text
        if len(by_reward) == 2:
            yield dict(prompt=f"{word}>", chosen=by_reward[1], rejected=by_reward[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--words", type=int, default=8192)
    options = parser.parse_args()
    engine, lines = Engine(options.model), []
    engine.load(options.model)
    words = sorting.words(options.words, seed=10_000)
    for start in range(0, len(words), WORDS_AT_A_TIME):
        lines += pairs(engine, words[start : start + WORDS_AT_A_TIME], seed=start)
    sorting.write_lines(options.out, lines)
    print(f"{options.out}: {len(lines)} pairs of {len(words)} words")


if __name__ == "__main__":
    main()
