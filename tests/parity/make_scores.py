"""Log-probabilities and rewards of 50 lines of 3 to 900 tokens, as transformers computes them in
float64 with the tiny Qwen3 of `references`, which gets a head for rewards.

pip install -e '.[parity]'
python tests/parity/make_scores.py            # writes tests/parity/scores.npz
"""

from pathlib import Path

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).parent


def opened(kind, **others):
    folder, options = FOLDER / "references" / "qwen3", {"attn_implementation": "eager"}
    return kind.from_pretrained(folder, dtype=torch.float64, **options, **others)


def main():
    model = opened(transformers.Qwen3ForCausalLM)
    rewards = opened(transformers.Qwen3ForSequenceClassification, num_labels=1)
    head = np.random.default_rng(1).normal(size=(1, model.config.hidden_size))
    rewards.score.weight.data = torch.tensor(head)
    rng = np.random.default_rng(0)
    lengths = np.round(np.geomspace(3, 900, 50)).astype(int)
    rng.shuffle(lengths)
    lines, logprobs, scores = [], [], []
    for length in lengths:
        tokens = rng.integers(model.config.vocab_size, size=length)
        with torch.no_grad():
            logits = model(torch.tensor(tokens)[None]).logits[0]
            scores.append(rewards(torch.tensor(tokens)[None]).logits.item())
        every = torch.log_softmax(logits, -1)[:-1]
        lines.append(tokens)
        logprobs.append(every[torch.arange(length - 1), torch.tensor(tokens[1:])].numpy())
    np.savez_compressed(
        FOLDER / "scores.npz",
        lengths=lengths.astype(np.int32),
        tokens=np.concatenate(lines).astype(np.uint8),
        logprobs=np.concatenate(logprobs).astype(np.float32),
        head=head,
        rewards=np.array(scores),
        transformers=transformers.__version__,
    )


if __name__ == "__main__":
    main()
