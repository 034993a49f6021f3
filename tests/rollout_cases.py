"""Rollouts for tests, and their losses in NumPy float64, which import nothing of the package."""

import json

import numpy as np

VOCAB = 48


def make_rollouts(count=14, longest=30, groups=4, seed=0):
    """Records of rollouts: lengths from 2 on, prompts that do not count, some fractional weights,
    some with targets of their own, and one of which nothing counts."""
    rng = np.random.default_rng(seed)
    records = []
    for number in range(count):
        n = 2 + (number * 7) % (longest - 1)
        tokens = rng.integers(8, VOCAB, size=n)
        weights = (np.arange(n) >= rng.integers(0, max(n // 2, 1))).astype(float)
        if number % 3 == 1:
            weights *= rng.choice([0, 0.5, 1.0, 2.0], size=n)
        if number == 5:
            weights[:] = 0
        weights[-1] = 0
        record = {"tokens": tokens.tolist()}
        if number % 4 == 2:
            record["targets"] = rng.integers(VOCAB, size=n).tolist()
            weights[-1] = 1
        lists = {
            name: -np.abs(rng.normal(3.9, 0.5, size=n))
            for name in ("logprobs", "old_logprobs", "ref_logprobs")
        }
        record |= {name: x.tolist() for name, x in lists.items()}
        record |= {"weights": weights.tolist(), "reward": rng.normal(), "group": number % groups}
        records.append(record)
    return records


def write_rollouts(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def targets_of(record):
    return np.array(record.get("targets", [*record["tokens"][1:], 0]))


def grpo_advantages(records, deviation):
    found = []
    for record in records:
        group = [x["reward"] for x in records if x["group"] == record["group"]]
        advantage = record["reward"] - np.mean(group)
        found.append(advantage / (np.std(group, ddof=1) + 1e-4) if deviation else advantage)
    return found


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def policy_loss(
    records,
    logits,
    held=None,
    *,
    surrogate="ppo",
    ratio="token",
    clip=(0.2, 0.2),
    mean="batch",
    length=None,
    old="logprobs",
    truncate=None,
    kl="k3",
    kl_weight=0.0,
    entropy_weight=0.0,
    temperature=1.0,
    deviation=True,
):
    """The loss of all rollouts, from float64 logits [n, vocab] of each. `held` are logits of what
    has no gradient; by default the same."""
    total, normaliser = 0.0, 0.0
    advantages = grpo_advantages(records, deviation)
    for number, record in enumerate(records):
        weights = np.array(record["weights"])
        counted = np.flatnonzero(weights)
        if not len(counted):
            continue
        every = log_softmax(logits[number] / temperature)
        at = np.arange(len(weights)), targets_of(record)
        lp = every[at]
        fixed = log_softmax((logits if held is None else held)[number] / temperature)[at]
        before = fixed if old == "current" else np.array(record[old])
        apart = lp - before, fixed - before
        if ratio == "sequence":
            apart = tuple(np.full(len(x), x[counted].mean()) for x in apart)
        r, r_fixed = map(np.exp, apart)
        a = advantages[number]
        if surrogate == "cispo":
            gained = np.clip(r_fixed, 1 - clip[0], 1 + clip[1]) * a * lp
        elif clip is None:
            gained = r * a
        else:
            gained = np.minimum(r * a, np.clip(r, 1 - clip[0], 1 + clip[1]) * a)
        if truncate is not None:
            gained = gained * np.minimum(np.exp(before - np.array(record["logprobs"])), truncate)
        above = lp - np.array(record["ref_logprobs"])
        losses = -gained + kl_weight * (above if kl == "k1" else np.exp(-above) + above - 1)
        losses -= entropy_weight * -(np.exp(every) * every).sum(-1)
        summed = (losses * weights)[counted].sum()
        if mean == "batch":
            total, normaliser = total + summed, normaliser + weights.sum()
        else:
            divisor = weights.sum() if mean == "sequence" else length
            total, normaliser = total + summed / divisor, normaliser + 1
    return total / normaliser


POLICIES = {
    "reinforce": dict(clip=None),
    "ppo": {},
    "grpo": dict(mean="sequence", kl_weight=0.04),
    "dapo": dict(clip=(0.2, 0.28), entropy_weight=0.01),
    "dr_grpo": dict(mean="constant", length=16.0, deviation=False),
    "gspo": dict(ratio="sequence", mean="sequence", clip=(0.3, 0.4)),
    "cispo": dict(surrogate="cispo", clip=(0.5, 2.0)),
    "current": dict(old="current", truncate=2.0, kl="k1", kl_weight=0.1),
    "old": dict(old="old_logprobs", truncate=0.5, temperature=0.7),
}
"""Settings of `policy` by name."""


def make_pairs(count=7, references=True, seed=0):
    """Records of pairs of texts, whose tokens are bytes."""
    rng = np.random.default_rng(seed)
    words = ["ring", "team", "a", "go", "star", "of", "to be"]
    records = []
    for number in range(count):
        prompt, chosen, rejected = (
            " ".join(rng.choice(words, size=rng.integers(1, 4))) for _ in range(3)
        )
        record = {"prompt": f"{prompt}: ", "chosen": chosen, "rejected": f"{rejected}{number}"}
        if references:
            for side, text in (("chosen", chosen), ("rejected", record["rejected"])):
                record[f"ref_{side}_logps"] = -5.5 * len(text) + rng.normal()
        records.append(record)
    return records


def bytes_of_pair(record):
    """Tokens [n + 1] of both answers, and the number of their targets that count, at their end."""
    return [
        (np.frombuffer(f"{record['prompt']}{record[x]}\0".encode(), np.uint8), len(record[x]) + 1)
        for x in ("chosen", "rejected")
    ]


def preference_loss(
    records,
    logits,
    *,
    loss="sigmoid",
    beta=0.1,
    normalised=False,
    smoothing=0.0,
    gamma=0.0,
    sft_weight=0.0,
):
    """The mean loss of pairs, and their mean margin, from float64 logits [n, vocab] of both
    answers."""
    total, margins = 0.0, []
    for record, both in zip(records, logits, strict=True):
        rewards = []
        for (tokens, counted), of_answer, side in zip(
            bytes_of_pair(record), both, ("chosen", "rejected"), strict=True
        ):
            lp = log_softmax(of_answer)[np.arange(len(tokens) - 1), tokens[1:]][-counted:]
            if side == "chosen":
                total -= sft_weight * lp.mean()
            above = lp.sum() - (0 if loss == "simpo" else record[f"ref_{side}_logps"])
            rewards.append(above / counted if normalised or loss == "simpo" else above)
        h = rewards[0] - rewards[1]
        margins.append(beta * h)
        total += {
            "sigmoid": (1 - smoothing) * np.log1p(np.exp(-beta * h))
            + smoothing * np.log1p(np.exp(beta * h)),
            "ipo": (h - 1 / (2 * beta)) ** 2,
            "hinge": max(0, 1 - beta * h),
            "simpo": np.log1p(np.exp(gamma - beta * h)),
        }[loss]
    return total / len(records), np.mean(margins)


PREFERENCES = {
    "dpo": {},
    "smooth": dict(smoothing=0.1, beta=0.3, sft_weight=0.2),
    "normalised": dict(normalised=True, beta=2.0),
    "ipo": dict(loss="ipo", normalised=True, beta=0.5),
    "hinge": dict(loss="hinge"),
    "simpo": dict(loss="simpo", beta=2.5, gamma=0.5),
}
"""Settings of `preference` by name."""


def with_teacher(records, k=6, seed=3):
    """The records with k tokens of a teacher in each place, in any order."""
    rng = np.random.default_rng(seed)
    found = []
    for record in records:
        n = len(record["tokens"])
        ids = np.stack([rng.permutation(VOCAB)[:k] for _ in range(n)])
        logprobs = log_softmax(rng.normal(size=(n, k + 1)))[:, :k]
        teacher = {"ids": ids.tolist(), "logprobs": logprobs.tolist()}
        found.append(record | {"teacher": teacher})
    return found


def distill_loss(records, logits, *, kl="forward", top_k=6, temperature=1.0, nll_weight=0.0):
    """The mean loss of the tokens that count, from float64 logits [n, vocab] of each record."""
    total, normaliser = 0.0, 0.0
    for record, of_record in zip(records, logits, strict=True):
        targets, weights = targets_of(record), np.array(record["weights"])
        for t in np.flatnonzero(weights):
            order = np.argsort(-np.array(record["teacher"]["logprobs"][t]), kind="stable")[:top_k]
            ids = np.array(record["teacher"]["ids"][t])[order]
            log_p = np.array(record["teacher"]["logprobs"][t])[order]
            every = log_softmax(of_record[t] / temperature)
            others = np.delete(every, ids)
            log_q = np.append(every[ids], np.log(np.exp(others).sum()))
            log_p = np.append(log_p, np.log(1 - np.exp(log_p).sum()))
            first, second = (log_p, log_q) if kl == "forward" else (log_q, log_p)
            loss = np.sum(np.exp(first) * (first - second))
            loss -= nll_weight * log_softmax(of_record[t])[targets[t]]
            total, normaliser = total + weights[t] * loss, normaliser + weights[t]
    return total / normaliser


DISTILLATIONS = {
    "forward": {},
    "reverse": dict(kl="reverse"),
    "few": dict(top_k=3, temperature=0.7, nll_weight=0.3),
}
"""Settings of `distill` by name; top_k is 6 by default."""


def reward_loss(rewards, *, centre=0.0):
    """The mean loss of pairs, from float64 rewards [pairs, 2] of chosen and rejected answers."""
    chosen, rejected = np.transpose(rewards)
    return np.mean(np.log1p(np.exp(rejected - chosen)) + centre * (chosen + rejected) ** 2)


def with_experts(records, layers, top_k, count, seed=4):
    """The records with random experts of each token in each layer."""
    rng = np.random.default_rng(seed)
    found = []
    for record in records:
        shape = len(record["tokens"]), layers, count
        every = rng.permuted(np.broadcast_to(np.arange(count), shape), axis=-1)
        found.append(record | {"experts": every[..., :top_k].tolist()})
    return found
