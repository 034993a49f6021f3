"""Runs of tiny pretrained models: greedy text beside the library transformers, and training on
eight devices beside one.

pip install -e '.[parity]'
python tests/parity/check_runs.py                # some minutes
python tests/parity/check_runs.py glm4 glm4_moe  # those that are named
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
import torch
import transformers

import pretrained
import startrail_jax as st
from programs import learnable_tokens, make_program, train_steps
from trainer.config import OptimizerConfig
from trainer.data.batches import place
from trainer.gpt.batches import next_token_batch
from trainer.gpt.config import attention_of
from trainer.gpt.generation import Generator
from trainer.gpt.pretrained.families.table import MULTIMODAL
from trainer.gpt.pretrained.initial import open_pretrained
from trainer.gpt.token_choice import Sampling

NEW, STEPS, END = 40, 30, 7
LARGEST_ERROR = 1e-5
"""Of losses, relative to those of one device."""
DEGREES = {
    "one device": st.Degrees(),
    "StarTrail, C = 2": st.Degrees.startrail(8, c=2),
    "2D-Attention, ZeRO 3": st.Degrees(head=2, ring=4),
    "tensor parallelism": st.Degrees(data=2, ring=2, tensor=2),
}


def greedy(folder: Path) -> int:
    """Compares greedy text of three prompts; returns the number of tokens that were compared."""
    config = pretrained.make_config(folder, seq_len=64)
    mesh = st.make_mesh(st.Degrees.startrail(4, c=1), "auto", jax.devices()[:4])
    attention = st.Attention(mesh, causal=True, **attention_of(config.model))
    generator = Generator(config, attention, Sampling(temperature=0.0), zero=0)
    with open_pretrained(config, generator.weight_shapes) as initial:
        weights = initial.read(generator.weight_shapes)
    auto = transformers.AutoModelForCausalLM
    if transformers.AutoConfig.from_pretrained(folder).model_type in MULTIMODAL:
        auto = transformers.AutoModelForImageTextToText
    model = auto.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(config.model.vocab_size, size=n).astype(np.int32) for n in (1, 5, 19)]
    found = np.array([*generator(weights, prompts, num_tokens=NEW)]).T
    for prompt, new in zip(prompts, found, strict=True):
        tokens = torch.tensor(prompt[None].astype(np.int64))
        expected = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),  # By default, tokens for padding are masked.
            max_new_tokens=NEW,
            do_sample=False,
            use_cache=False,  # With caches, Nemotron-H has other tokens after short prompts.
            eos_token_id=None,
            pad_token_id=0,
        )
        np.testing.assert_array_equal(new, expected[0, len(prompt) :].numpy())
    return found.size


def training(folder: Path) -> dict[str, float]:
    """Largest differences of the losses of all steps, on each mesh, from those of one device."""
    losses: dict[str, np.ndarray] = {}
    for name, degrees in DEGREES.items():
        config = dataclasses.replace(
            pretrained.make_config(folder, batch_size=4, seq_len=64),
            zero=3 if "ZeRO" in name else 0,
            optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=3),
            steps=STEPS,
        )
        program = make_program(config, degrees)
        shapes = program.state_shapes.weights
        with open_pretrained(program.config, shapes) as initial:
            weights = jax.device_get(initial.read(shapes))
        state = jax.device_get(program.initialise())
        state = state._replace(weights=weights)
        layout = program.attention.layout
        batches = [
            place(
                next_token_batch(learnable_tokens(config, step, END), layout=layout),
                program.batch_sharding,
            )
            for step in range(STEPS)
        ]
        losses[name] = train_steps(program, state, batches)[0][:, 0]
    first = losses.pop("one device")
    assert first[-5:].mean() < first[:5].mean()
    return {name: float(np.abs(x / first - 1).max()) for name, x in losses.items()}


def main() -> None:
    """Checks the references that are named, or all."""
    jax.config.update("jax_num_cpu_devices", 8)
    for name in sys.argv[1:] or pretrained.CASES:
        folder = pretrained.REFERENCES / name
        text = f"{greedy(folder)} greedy tokens equal"
        errors = training(folder)
        told = ", ".join(f"{key} {error:.1e}" for key, error in errors.items())
        print(f"{name}: {text}; losses of {STEPS} steps: {told}", flush=True)
        assert max(errors.values()) <= LARGEST_ERROR, errors


if __name__ == "__main__":
    main()
