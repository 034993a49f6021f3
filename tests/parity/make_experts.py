"""Log-probabilities of lines whose experts are given, as transformers computes them in float64 with
the tiny Qwen3-MoE and Qwen3.5-MoE of `references`.

pip install -e '.[parity]'
python tests/parity/make_experts.py            # writes tests/parity/experts.npz
"""

from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).parent
FAMILIES = {"qwen3_moe": "Qwen3Moe", "qwen3_5_moe": "Qwen3_5Moe"}
LENGTHS = (2, 9, 30, 17, 32, 24)


@contextmanager
def routed(given=None):
    """Has the router of each layer, in order, choose `given` [tokens, layers, k]; None for its own
    choice. Yields the list of the choices of layers [tokens, k]."""
    plain, chosen = torch.topk, []

    def topk(probabilities, k, dim):
        values, own = plain(probabilities, k, dim=dim)
        if given is not None:
            own = torch.tensor(given[:, len(chosen)])
            values = probabilities.gather(dim, own)
        chosen.append(own)
        return values, own

    with mock.patch.object(torch, "topk", topk):
        yield chosen


def logprobs_of(model, tokens, given=None):
    """Log-probabilities [tokens - 1] of targets, and the experts [tokens, layers, k] that were
    chosen."""
    with torch.no_grad(), routed(given) as chosen:
        logits = model(torch.tensor(tokens)[None]).logits[0]
    every = torch.log_softmax(logits, -1)[:-1]
    logprobs = every[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
    return logprobs.numpy(), torch.stack(chosen, 1).numpy()


def of_family(name):
    kind = getattr(transformers, f"{FAMILIES[name]}ForCausalLM")
    eager = dict(attn_implementation="eager", experts_implementation="eager")
    folder = FOLDER / "references" / name
    model = kind.from_pretrained(folder, dtype=torch.float64, **eager).eval()
    rng, config = np.random.default_rng(1), model.config
    found = {x: [] for x in ("tokens", "own_experts", "own_logprobs", "experts", "logprobs")}
    for length in LENGTHS:
        tokens = rng.integers(config.vocab_size, size=length)
        own_logprobs, own = logprobs_of(model, tokens)
        shuffled = rng.permuted(
            np.broadcast_to(np.arange(config.num_experts), (*own.shape[:2], config.num_experts)),
            axis=-1,
        )
        experts = shuffled[..., : own.shape[-1]]
        logprobs, used = logprobs_of(model, tokens, experts)
        assert (used == experts).all()
        for key, x in zip(found, (tokens, own, own_logprobs, experts, logprobs), strict=True):
            found[key].append(x)
    joined = {key: np.concatenate(x) for key, x in found.items()}
    kinds = {key: np.float32 if "logprobs" in key else np.uint8 for key in joined}
    return {f"{name} {key}": x.astype(kinds[key]) for key, x in joined.items()}


if __name__ == "__main__":
    arrays = {key: x for name in FAMILIES for key, x in of_family(name).items()}
    np.savez_compressed(
        FOLDER / "experts.npz",
        lengths=np.array(LENGTHS, np.int32),
        transformers=transformers.__version__,
        **arrays,
    )
