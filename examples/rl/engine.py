"""An inference engine beside train.py --data.follow: folders of weights come in, rollouts go out.

    python examples/rl/engine.py weights rollouts --steps 60

When train.py has exported weights/step_000007, this draws a group of answers to each of some
prompts, rewards them, and writes rollouts/step_000008.jsonl, on which train.py makes step 8. With
vLLM in place of `Engine`, the rest stays as it is.

If engine and trainer should differ, this says by how much, once rollouts have the engine's
`logprobs`:  python score.py weights/step_000007 rollouts/step_000008.jsonl scored.jsonl
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import sorting

import startrail_jax as st
from trainer.gpt.config import attention_of
from trainer.gpt.generation import Generator
from trainer.gpt.pretrained.defaults import pretrained
from trainer.gpt.pretrained.initial import open_pretrained
from trainer.gpt.token_choice import Sampling


class Engine:
    """Draws answers at temperature 1, on one device."""

    def __init__(self, folder):
        self.config = pretrained(folder)
        call = attention_of(self.config.model)
        mesh = st.make_mesh(st.Degrees(), devices=jax.devices()[:1])
        attention = st.Attention(mesh, causal=True, **call)
        self.generator = Generator(self.config, attention, Sampling(), zero=0)

    def load(self, folder):
        """Reads the weights of a folder; what is compiled stays."""
        shapes = self.generator.weight_shapes
        with open_pretrained(replace(self.config, init_from=folder), shapes) as files:
            self.weights = files.read(shapes)

    def answers(self, words, seed):
        """The tokens of an answer to each word, with the one that ends it."""
        prompts = [np.array(sorting.prompt(word)) for word in words]
        options = dict(num_tokens=sorting.LONGEST, end_of_document=sorting.END, seed=seed)
        steps = list(self.generator(self.weights, prompts, **options))
        for row in zip(*steps, strict=True):
            tokens = [x for x in row if x is not None]
            yield tokens if len(tokens) == len(row) else [*tokens, sorting.END]


def rollouts(engine, prompts, group, seed):
    """A group of answers to each of some prompts, as train.py reads them."""
    words = [word for word in sorting.words(prompts, seed) for _ in range(group)]
    for word, answer in zip(words, engine.answers(words, seed), strict=True):
        prompt = sorting.prompt(word)
        # The weight of a token is that of its target, the next token.
        weights = [0] * (len(prompt) - 1) + [1] * len(answer) + [0]
        reward = sorting.reward(word, answer)
        yield dict(tokens=prompt + answer, weights=weights, reward=reward, group=word)


def exports(folder):
    """The folders that train.py has exported so far, with their steps in order."""
    return [(int(path.name.removeprefix("step_")), path) for path in sorted(folder.glob("step_*"))]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path)
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=16)
    options = parser.parse_args()
    engine = None
    while not (options.rollouts / f"step_{options.steps:06d}.jsonl").exists():
        step, folder = max(exports(options.weights), default=(-1, None))
        out = options.rollouts / f"step_{step + 1:06d}.jsonl"
        if folder is None or out.exists():  # The trainer is not there yet.
            time.sleep(0.1)
            continue
        engine = engine or Engine(folder)
        engine.load(folder)
        lines = list(rollouts(engine, options.prompts, options.group, seed=step + 1))
        sorting.write_lines(out, lines)
        share = np.mean([line["reward"] for line in lines])
        print(f"{out.name}: {share:.3f} of {len(lines)} answers are right", flush=True)


if __name__ == "__main__":
    main()
