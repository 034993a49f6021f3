"""Log-probabilities of 50 lines of 3 to 900 tokens, as transformers computes them in float64 with
the tiny Qwen3 of `references`.

pip install -e '.[parity]'
python tests/parity/make_scores.py            # writes tests/parity/scores.npz
"""

from pathlib import Path

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).parent


def main():
    model = transformers.Qwen3ForCausalLM.from_pretrained(
        FOLDER / "references" / "qwen3", dtype=torch.float64, attn_implementation="eager"
    )
    rng = np.random.default_rng(0)
    lengths = np.round(np.geomspace(3, 900, 50)).astype(int)
    rng.shuffle(lengths)
    lines, logprobs = [], []
    for length in lengths:
        tokens = rng.integers(model.config.vocab_size, size=length)
        with torch.no_grad():
            logits = model(torch.tensor(tokens)[None]).logits[0]
        every = torch.log_softmax(logits, -1)[:-1]
        lines.append(tokens)
        logprobs.append(every[torch.arange(length - 1), torch.tensor(tokens[1:])].numpy())
    np.savez_compressed(
        FOLDER / "scores.npz",
        lengths=lengths.astype(np.int32),
        tokens=np.concatenate(lines).astype(np.uint8),
        logprobs=np.concatenate(logprobs).astype(np.float32),
        transformers=transformers.__version__,
    )


if __name__ == "__main__":
    main()
