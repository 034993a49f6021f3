"""Objectives beside the library TRL: losses and gradients that its own trainers give a model.

`tests/parity/make_trl.py` has the settings of TRL under the same names, and says its version.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import startrail_jax as st
from pretrained import REFERENCES, make_config, tensors_of, write_reward_model
from programs import REPOSITORY, gradients_of, make_program, whole_batch
from rollout_cases import log_softmax, write_rollouts
from trainer.gpt.config import DataConfig
from trainer.gpt.objectives.distill import Distill
from trainer.gpt.objectives.logprobs import logprobs_and_entropy
from trainer.gpt.objectives.policy import Policy
from trainer.gpt.objectives.preference import Preference
from trainer.gpt.objectives.reward import Reward
from trainer.gpt.pretrained.initial import open_pretrained
from trainer.gpt.rollouts.records import advantages_of

# As `make_trl.py` has drawn them: two prompts, each with three completions.
LENGTHS, PROMPTS = (3, 11, 5, 8, 4, 7), (4, 2)

GSPO = dict(old="old_logprobs", ratio="sequence")
# With a KL divergence, TRL's use_bias_correction_kl is False: it multiplies that by the ratio.
POLICIES = {
    "ppo": dict(old="old_logprobs"),
    "unclipped": dict(old="old_logprobs", clip=None),
    "grpo": dict(old="old_logprobs", mean="sequence", kl_weight=0.04),
    "dapo": dict(old="old_logprobs", clip=(0.2, 0.28)),
    # The means over the tokens of all micro-batches, as here; TRL's `bnpo` has one for each.
    "dapo_in_parts": dict(old="old_logprobs", clip=(0.2, 0.28)),
    "dr_grpo": dict(old="old_logprobs", mean="constant", length=16.0, deviation=False),
    "gspo": GSPO | dict(mean="sequence", clip=(0.02, 0.03), kl_weight=0.1),
    "gspo_batch": GSPO | dict(clip=(0.02, 0.02)),
    # TRL's epsilon_high is the largest ratio itself, and ours how far it is above 1.
    "cispo": dict(old="old_logprobs", surrogate="cispo", clip=(1.0, 0.1), kl_weight=0.1),
    # TRL's bonus is the mean over tokens for every loss, and ours as `mean` says.
    "cold": dict(old="old_logprobs", temperature=0.7, entropy_weight=0.05),
    "current": dict(old="current"),
    "truncated": dict(old="old_logprobs", mean="sequence", kl_weight=0.1, truncate=1.1),
    "current_truncated": dict(old="current", truncate=1.1),
}
PREFERENCES = {
    "dpo": {},
    "hinge": dict(loss="hinge", beta=0.3),
    # TRL's IPO divides by the lengths of answers.
    "ipo": dict(loss="ipo", beta=0.5, normalised=True),
    "normalised": dict(beta=2.0, normalised=True),
    # TRL's `sigmoid` has no smoothing, and its `robust` is another loss: this is its `aot`, for
    # which pairs are sorted, of one pair at a time.
    "smooth": dict(beta=0.3, smoothing=0.1),
    # With several pairs at a time, TRL's `sft` is the mean over the tokens of all.
    "sft": dict(sft_weight=0.2),
    "simpo": dict(loss="simpo", beta=2.5, gamma=0.5),
}
DISTILLATIONS = {
    # The rest is one token, so that these are the divergences over the whole vocabulary.
    "forward": dict(top_k=47),
    "reverse": dict(top_k=47, kl="reverse"),
    "forward_cold": dict(top_k=47, temperature=0.7),
    "reverse_cold": dict(top_k=47, kl="reverse", temperature=0.7),
    "top_6": dict(top_k=6),
    # The target alone, and all others as one.
    "sampled": dict(top_k=1, kl="reverse"),
}


@functools.cache
def of_trl():
    with np.load(REPOSITORY / "tests" / "parity" / "trl.npz") as file:
        return dict(file)


def stored_of(name):
    """The arrays of a case."""
    return {k.removeprefix(f"{name}/"): x for k, x in of_trl().items() if k.startswith(f"{name}/")}


def split(x, lengths):
    assert len(x) == sum(lengths)
    return np.split(x, np.cumsum(lengths)[:-1])


def rollouts():
    """The prompt and the completion of each record, and its tokens and weights."""
    prompts = [x.tolist() for x in split(of_trl()["prompts"], PROMPTS)]
    for number, completion in enumerate(split(of_trl()["completions"], LENGTHS)):
        prompt = prompts[number // 3]
        tokens = [*prompt, *completion.tolist()]
        # The last token has no target.
        weights = [0] * (len(prompt) - 1) + [1] * len(completion) + [0]
        yield prompt, completion.tolist(), {"tokens": tokens, "weights": weights}


def compute(folder, records, name, loss):
    """The loss of records, and its gradients by the names of PyTorch, from the pretrained model."""
    model = REFERENCES / "qwen3"
    if name == "reward":
        model = write_reward_model(folder / "model", of_trl()["reward/head"])
    path, data = write_rollouts(folder / "records.jsonl", records), {}
    if name != "policy":
        data |= dict(validation_path=write_rollouts(folder / "held.jsonl", records[:1]))
    if name in ("preference", "reward"):
        (folder / "tokenizer.json").write_text(str(of_trl()["tokenizer"]))
        data |= dict(tokenizer=folder / "tokenizer.json")
    config = make_config(
        model, objective=name, data=DataConfig(path=(path,), **data), run_dir=folder / "run",
        seq_len=40, batch_size=4, **{name: loss},
    )  # fmt: skip
    program = make_program(config, st.Degrees())
    shapes = program.state_shapes.weights
    with open_pretrained(config, shapes) as initial:
        weights, places = initial.read(shapes), initial.places
    value, _, gradients = gradients_of(program, weights, whole_batch(program))
    return value, tensors_of(gradients, places)


def check(name, loss, gradients):
    stored = stored_of(name)
    np.testing.assert_allclose(loss, stored["loss"], rtol=1e-6, atol=1e-7)
    tensors = {k: x for k, x in stored.items() if k.startswith("model.")}
    assert len(tensors) == 3
    tensors |= {k: x for k, x in stored.items() if k == "score.weight"}
    for key, want in tensors.items():
        assert np.abs(want).max() > 1e-3
        np.testing.assert_allclose(
            gradients[key], want, atol=1e-5 * np.abs(want).max(), rtol=0, err_msg=key
        )


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_those_of_trl(tmp_path, name):
    stored, records = stored_of(name.removesuffix("_in_parts")), []
    for number, (prompt, _, record) in enumerate(rollouts()):
        known = {}
        for key in {"old_logprobs", "ref_logprobs", "logprobs"} & stored.keys():
            # Those of a completion are at the tokens before it.
            own = split(stored[key], LENGTHS)[number].tolist()
            known[key] = [*[0] * (len(prompt) - 1), *own, 0]
        reward = float(of_trl()["rewards"][number])
        records.append(record | known | {"reward": reward, "group": number // 3})
    check(name, *compute(tmp_path, records, "policy", Policy(**POLICIES[name])))


@pytest.mark.parametrize("deviation", [True, False])
def test_advantages_are_those_of_trl(deviation):
    rewards, groups = of_trl()["rewards"], np.repeat([0, 1], 3)
    found = advantages_of(rewards, groups, deviation=deviation)
    want = of_trl()[f"{'grpo' if deviation else 'dr_grpo'}/advantages"]
    np.testing.assert_allclose(found, want, rtol=1e-6)


def pairs():
    """Texts, which both sides turn into tokens, each with the end of the text."""
    sides = list(rollouts())
    for number in range(3):
        (prompt, chosen, _), (_, rejected, _) = sides[2 * number : 2 * number + 2]
        texts = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        yield {key: "".join(f" w{x}" for x in tokens) for key, tokens in texts.items()}


@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences_are_those_of_trl(tmp_path, name):
    loss = Preference(**PREFERENCES[name])
    records = [
        record | {key: float(of_trl()[key][number]) for key in loss.reads}
        for number, record in enumerate(pairs())
    ]
    check(name, *compute(tmp_path, records, "preference", loss))


@pytest.mark.parametrize("centre", [0, 0.01])
def test_rewards_are_those_of_trl(tmp_path, centre):
    loss = Reward(centre=centre)
    check(f"reward/centre_{centre}", *compute(tmp_path, list(pairs()), "reward", loss))


@pytest.mark.parametrize("name", DISTILLATIONS)
def test_divergences_are_those_of_trl(tmp_path, name):
    settings, records = DISTILLATIONS[name], []
    logits = of_trl()["teacher"].astype(np.float64) / settings.get("temperature", 1.0)
    every = split(log_softmax(logits), LENGTHS)
    for (prompt, completion, record), logprobs in zip(rollouts(), every, strict=True):
        ids = np.argsort(-logprobs)[:, : settings["top_k"]]
        if name == "sampled":
            ids = np.array(completion)[:, None]
        known = np.take_along_axis(logprobs, ids, 1)
        # Places that do not count may have any tokens.
        first = np.tile(np.arange(settings["top_k"]), (len(prompt) - 1, 1))
        teacher = {
            "ids": [*first.tolist(), *ids.tolist(), ids[-1].tolist()],
            "logprobs": [*(first - 60.0).tolist(), *known.tolist(), known[-1].tolist()],
        }
        records.append(record | {"teacher": teacher})
    check(name, *compute(tmp_path, records, "distill", Distill(**settings)))


def test_log_probabilities_and_entropies_are_those_of_trl():
    stored = stored_of("logprobs")
    logits = jnp.asarray(of_trl()["teacher"][None])
    targets = jnp.asarray(of_trl()["completions"][None], jnp.int32)

    def numbers(x):
        return logprobs_and_entropy(x / 0.7, targets)

    got, pull = jax.vjp(numbers, logits)
    want = np.stack([stored["values"], stored["entropy"]], -1)
    np.testing.assert_allclose(got[0], want, rtol=1e-6)
    douts = np.stack([stored["of_logprobs"], stored["of_entropy"]], -1)[None]
    (gradient,) = pull(jnp.asarray(douts))
    np.testing.assert_allclose(
        gradient[0], stored["gradient"], rtol=0, atol=1e-6 * np.abs(stored["gradient"]).max()
    )
