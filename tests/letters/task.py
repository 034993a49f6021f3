"""The task. It imports no jax before it runs, as `--help` must be fast."""

from dataclasses import replace

import numpy as np

from letters.config import LettersConfig, LettersOptions
from trainer.data.dataset import Dataset
from trainer.task import Task


class LettersTask(Task[LettersConfig, LettersOptions]):
    config_class = LettersConfig
    options_class = LettersOptions

    def make_objective(self, config):
        from letters.objective import MissingLetter

        return MissingLetter(config)

    def open_data(self, config, layout):
        from letters.objective import LetterBatch

        def collate(rows, numbers):
            targets = layout.permute(np.repeat(np.stack(rows)[:, None], config.length, axis=1))
            # Rows that only fill up a batch have a number below 0.
            seeds = np.maximum(numbers, 0)
            missing = np.random.default_rng(seeds).random(targets.shape) < 0.3
            letters = np.where(missing, config.alphabet.index("_"), targets).astype(np.int32)
            return LetterBatch(letters, targets, missing.astype(np.float32))

        rows = np.arange(config.data.rows, dtype=np.int32) % len(config.data.letters)
        return Dataset(
            train=rows, held_out=rows[:3], collate=collate, description="letters", loss_unit="nats"
        )

    def sample(self, run_dir, config, options, mesh, session):
        from letters.objective import LetterBatch
        from trainer.checkpoints.reading import restore_weights
        from trainer.parallel.checks import make_attention
        from trainer.parallel.step import Program

        config = replace(config, batch_size=1)
        objective = self.make_objective(config)
        program = Program(config, make_attention(mesh, config, objective), objective)
        weights, _ = restore_weights(run_dir / "checkpoints", program.state_shapes.weights)
        row = [config.alphabet.index(x) for x in (options.text * config.length)[: config.length]]
        letters = program.attention.layout.permute(np.array([row], np.int32))
        batch = LetterBatch(letters, letters, np.ones(letters.shape, np.float32))
        outputs = program.attention.layout.unpermute(np.asarray(program.outputs(weights, batch)))
        found = zip(options.text, np.argmax(outputs[0], axis=-1), strict=False)
        session.print("".join(config.alphabet[i] if x == "_" else x for x, i in found))

    def sampler(self, program, data):
        return lambda weights, step, interrupted: [
            f"first embedding: {float(weights['embedding'][0, 0]):.2f}"
        ]
