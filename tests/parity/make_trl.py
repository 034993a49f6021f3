"""Losses and gradients that trainers of the library TRL give the tiny Qwen3 of `references`.

pip install -e '.[parity]'
python tests/parity/make_trl.py            # writes tests/parity/trl.npz
python tests/parity/make_trl.py --check    # compares with numbers that it makes anew

TRL computes all of it. Its trainers get texts and settings, as users give them; replaced are only
the answers that they would draw, and the models and servers that they would ask. What a setting is
called here, `tests/trainer/test_trl.py` says under the same name.
"""

import argparse
import copy
import os
import sys
import tempfile
from pathlib import Path

# TRL would report its use to Hugging Face.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}

import datasets
import numpy as np
import tokenizers
import torch
import transformers
import trl
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.server_distillation.server_distillation_trainer import (
    ServerDistillationTrainer,
)
from trl.trainer.distillation_trainer import _chunked_divergence_loss
from trl.trainer.utils import add_fused_lm_head, pad, selective_log_softmax_and_entropy

FOLDER = Path(__file__).parent
FILE = FOLDER / "trl.npz"
PAD, END = 46, 47
LENGTHS = (3, 11, 5, 8, 4, 7)
"""Numbers of tokens of the completions: two groups of three, and three pairs."""
PROMPTS = (4, 2)
OF_GRADIENTS = (
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "score.weight",
)
"""The weights whose gradients are kept. The first is the head too, but for scores."""

# By default, TRL multiplies the KL divergence by the ratio (arXiv 2512.02556).
SHARED = dict(num_generations=3, max_completion_length=16, use_bias_correction_kl=False)
# Log-probabilities of the policy before its steps are those of another model, but in `current`.
STEPS = dict(num_iterations=2)
SAMPLER = dict(
    vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=1.1
)
POLICIES = {
    "ppo": dict(loss_type="bnpo", **STEPS),
    "unclipped": dict(loss_type="bnpo", epsilon=1e6, **STEPS),
    "grpo": dict(loss_type="grpo", beta=0.04, **STEPS),
    "dapo": dict(loss_type="dapo", epsilon_high=0.28, **STEPS),
    "dr_grpo": dict(loss_type="dr_grpo", scale_rewards="none", **STEPS),
    "gspo": dict(
        loss_type="grpo", importance_sampling_level="sequence", epsilon=0.02, epsilon_high=0.03,
        beta=0.1, **STEPS,
    ),
    "gspo_batch": dict(
        loss_type="bnpo", importance_sampling_level="sequence", epsilon=0.02, **STEPS
    ),
    "cispo": dict(loss_type="cispo", epsilon_high=1.1, beta=0.1, **STEPS),
    "cold": dict(loss_type="bnpo", temperature=0.7, entropy_coef=0.05, **STEPS),
    "current": dict(loss_type="bnpo"),
    "truncated": dict(loss_type="grpo", beta=0.1, **SAMPLER, **STEPS),
    "current_truncated": dict(loss_type="dapo", **SAMPLER),
}  # fmt: skip
PAIRS = {
    "dpo": dict(loss_type=["sigmoid"], beta=0.1),
    "hinge": dict(loss_type=["hinge"], beta=0.3),
    "ipo": dict(loss_type=["ipo"], beta=0.5),
    "normalised": dict(loss_type=["sigmoid_norm"], beta=2.0),
}
# One pair at a time: `aot` then sorts nothing, and `sft` is the mean over one answer.
PAIRS_ALONE = {
    "smooth": dict(loss_type=["aot"], beta=0.3, label_smoothing=0.1),
    "sft": dict(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.2], beta=0.1),
}
SIMPO = dict(loss_type="simpo", beta=2.5, simpo_gamma=0.5, cpo_alpha=0.0)


def words(tokens):
    return "".join(f" w{x}" for x in tokens)


def make_tokenizer():
    """Every token is a word; the last two are padding and the end of a text."""
    names = {f"w{x}": x for x in range(PAD)} | {"<pad>": PAD, "<eos>": END}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="w0"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    built.add_special_tokens(["<pad>", "<eos>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="<pad>", eos_token="<eos>"
    )


def make_model(seed=None, scale=0.03):
    """The model of `references`, or with a seed one near it."""
    model = transformers.Qwen3ForCausalLM.from_pretrained(
        FOLDER / "references" / "qwen3", dtype=torch.float64, attn_implementation="sdpa"
    )
    if seed is not None:
        rng = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for x in model.parameters():
                x += scale * torch.randn(x.shape, generator=rng, dtype=x.dtype)
    return model


def draw():
    """Tokens of two prompts and of six completions, and rewards of these."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(PAD, size=n).tolist() for n in PROMPTS]
    return prompts, [rng.integers(PAD, size=n).tolist() for n in LENGTHS], rng.normal(size=6)


def with_head(model, temperature):
    """A model that TRL did not load, with the head that it gives those it did."""
    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    return model


def kept_gradients(name, loss, model):
    """Entries of the file for a loss, whose gradients the model is freed of."""
    loss.backward()
    found = {f"{name}/loss": loss}
    for path, weight in model.named_parameters():
        if path in OF_GRADIENTS:
            found[f"{name}/{path}"] = weight.grad.clone()
        weight.grad = None
    return found


class Made:
    """A folder for trainers, the tokenizer, and what the cases share."""

    def __init__(self, folder):
        self.folder = folder
        self.tokenizer = make_tokenizer()
        self.prompts, self.completions, self.rewards = draw()

    def options(self, **settings):
        shared = dict(output_dir=self.folder, use_cpu=True, report_to=[], bf16=False, seed=0)
        return dict(per_device_train_batch_size=6, gradient_checkpointing=False) | shared | settings

    # Policies.

    def policy(self, name, settings):
        """What TRL makes of the completions, and its loss of them, also in two parts for `dapo`."""
        of_group = [self.prompts[number // 3] for number in range(6)]
        rewards = iter([self.rewards.tolist()])
        model = make_model()
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=lambda **_: next(rewards),
            args=trl.GRPOConfig(
                **self.options(**SHARED | dict(beta=0.0, temperature=1.0) | settings)
            ),
            train_dataset=datasets.Dataset.from_dict({"prompt": [*map(words, self.prompts)]}),
            processing_class=self.tokenizer,
        )
        trainer.current_gradient_accumulation_steps = 1
        trainer.ref_model, before = (
            with_head(make_model(seed), trainer.temperature) for seed in (2, 1)
        )
        sampled = None
        if "vllm_importance_sampling_mode" in settings:
            trainer.use_vllm, rng = True, np.random.default_rng(5)
            sampled = [rng.normal(-3.8, 0.3, size=n).tolist() for n in LENGTHS]
        texts = [*map(words, self.completions)]
        drawn = (of_group, self.completions, None, texts, sampled, {}, None, None)
        trainer._generate = lambda prompts: drawn
        trainer.model = before if "num_iterations" in settings else model
        batch = trainer._generate_and_score_completions([{"prompt": words(x)} for x in of_group])
        trainer.model = model
        model.train()
        found = kept_gradients(name, trainer.compute_loss(model, batch), model)
        if name == "dapo":
            trainer.current_gradient_accumulation_steps = 2
            trainer.args.steps_per_generation = 2
            parts = [
                {k: x[half] if x.ndim else x for k, x in batch.items()}
                for half in (slice(2), slice(2, 6))
            ]
            summed = sum(trainer.compute_loss(model, part) for part in parts)
            found |= kept_gradients("dapo_in_parts", summed, model)
        found[f"{name}/advantages"] = batch["advantages"]
        counted = batch["completion_mask"].bool()
        for ours, theirs in {
            "old_logprobs": "old_per_token_logps",
            "ref_logprobs": "ref_per_token_logps",
            "logprobs": "sampling_per_token_logps",
        }.items():
            if theirs in batch:
                found[f"{name}/{ours}"] = batch[theirs][counted]
        return found

    # Pairs.

    def texts(self):
        found = {
            "prompt": [words(self.prompts[0])] * 2 + [words(self.prompts[1])],
            "chosen": [words(x) for x in self.completions[0::2]],
            "rejected": [words(x) for x in self.completions[1::2]],
        }
        return datasets.Dataset.from_dict(found)

    def in_order(self, trainer, size=6):
        """The data of a trainer as it collates them."""
        data = [trainer.train_dataset[n] for n in range(3)]
        return [trainer.data_collator(data[n : n + size]) for n in range(0, 3, size)]

    def preference(self, name, settings, size):
        model = make_model()
        trainer = trl.DPOTrainer(
            model=model,
            ref_model=make_model(2),
            args=trl.DPOConfig(**self.options(**settings)),
            train_dataset=self.texts(),
            processing_class=self.tokenizer,
        )
        model.eval()
        batches = self.in_order(trainer, size)
        loss = sum(trainer.compute_loss(model, x) for x in batches) / len(batches)
        found = kept_gradients(name, loss, model)
        if name == "dpo":
            (batch,) = batches
            logps = trainer.compute_ref_log_probs(trainer.ref_model, batch)
            found |= dict(zip(("ref_chosen_logps", "ref_rejected_logps"), logps, strict=True))
        return found

    def simpo(self):
        model = make_model()
        trainer = CPOTrainer(
            model=model,
            args=CPOConfig(**self.options(max_length=64, remove_unused_columns=False, **SIMPO)),
            train_dataset=self.texts(),
            processing_class=self.tokenizer,
        )
        (batch,) = self.in_order(trainer)
        model.eval()
        return kept_gradients("simpo", trainer.compute_loss(model, batch), model)

    def reward(self, centre):
        """Scores of both answers at their last token, the loss, and its gradients by the scores."""
        config = copy.deepcopy(make_model().config)
        config.num_labels, config.pad_token_id = 1, PAD
        model = transformers.Qwen3ForSequenceClassification(config).double()
        model.load_state_dict(make_model().state_dict(), strict=False)
        head = torch.tensor(np.random.default_rng(3).normal(scale=0.3, size=(1, 16)))
        with torch.no_grad():
            model.score.weight.copy_(head)
        trainer = trl.RewardTrainer(
            model=model,
            args=trl.RewardConfig(**self.options(center_rewards_coefficient=centre or None)),
            train_dataset=self.texts(),
            processing_class=self.tokenizer,
        )
        (batch,) = self.in_order(trainer)
        model.eval()
        loss, outputs = trainer.compute_loss(model, batch, return_outputs=True)
        outputs.logits.retain_grad()
        name = f"reward/centre_{centre:g}"
        found = kept_gradients(name, loss, model)
        chosen, rejected = outputs.logits.squeeze(-1).chunk(2)
        of_chosen, of_rejected = outputs.logits.grad.squeeze(-1).chunk(2)
        return found | {
            f"{name}/gradient_of_chosen": of_chosen,
            f"{name}/gradient_of_rejected": of_rejected,
            "reward/chosen": chosen,
            "reward/rejected": rejected,
            "reward/head": head,
        }

    # Distillation.

    def distill(self):
        """Divergences from a teacher over all tokens, and over some with the others as one."""
        student, teacher = make_model(), make_model(2)
        width = max(PROMPTS) + max(LENGTHS)
        inputs, labels = torch.full((6, width), PAD), torch.full((6, width), -100)
        for row, completion in enumerate(self.completions):
            prompt = self.prompts[row // 3]
            both = torch.tensor([*prompt, *completion])
            inputs[row, : len(both)] = both
            labels[row, len(prompt) : len(both)] = both[len(prompt) :]
        labels, found = labels[:, 1:], {}
        counted = labels != -100
        with torch.no_grad():
            of_teacher = teacher(inputs).logits[:, :-1]
        found["teacher"] = of_teacher[counted]
        for name, settings in {
            "forward": dict(beta=0),
            "reverse": dict(beta=1),
            "forward_cold": dict(beta=0, temperature=0.7),
        }.items():
            logits = student(inputs).logits[:, :-1]
            loss = GKDTrainer.generalized_jsd_loss(logits, of_teacher, labels, **settings)
            found |= kept_gradients(name, loss, student)
        loss, *_ = _chunked_divergence_loss(
            student.model(inputs).last_hidden_state[:, :-1],
            teacher.model(inputs).last_hidden_state[:, :-1].detach(),
            student.lm_head.weight,
            teacher.lm_head.weight.detach(),
            counted,
            beta=1.0,
            temperature=0.7,
        )
        return found | kept_gradients("reverse_cold", loss, student)

    def distill_from_server(self, name, settings):
        """With the likeliest tokens of a teacher on a server."""
        student, server = make_model(), Server(make_model(2))
        trainer = ServerDistillationTrainer.__new__(ServerDistillationTrainer)
        of_trainer = dict(
            model=student.eval(), args=trl.DPOConfig(**self.options()), teacher_client=server,
            temperature=1.0, loss_add_tail=True, reverse_kl_top_1_mode="sampled",
        )  # fmt: skip
        vars(trainer).update(of_trainer | settings)
        prompts = [torch.tensor(self.prompts[number // 3]) for number in range(6)]
        completions = [torch.tensor(x) for x in self.completions]
        batch = {}
        for side, tokens in ("prompt", prompts), ("completion", completions):
            options = dict(padding_side="left" if side == "prompt" else "right")
            batch[f"{side}_ids"] = pad(tokens, padding_value=PAD, **options)
            masks = [torch.ones_like(x) for x in tokens]
            batch[f"{side}_mask"] = pad(masks, padding_value=0, **options)
        return kept_gradients(name, trainer.compute_loss(student, batch), student)


class Server:
    """A teacher as `trl.generation.vllm_client.VLLMClient` is asked for it."""

    def __init__(self, model):
        self.model = model

    def get_sequence_logprobs(self, sequences, prompt_lengths, top_logprobs, temperature):
        found = {"logprobs": [], "logprob_token_ids": [], "actual_logprobs": []}
        for tokens, first in zip(sequences, prompt_lengths, strict=True):
            with torch.no_grad():
                logits = self.model(torch.tensor([tokens])).logits[0, first - 1 : -1]
            every = torch.log_softmax(logits / temperature, -1)
            likeliest = every.topk(top_logprobs, -1)
            found["logprobs"].append(likeliest.values.tolist())
            found["logprob_token_ids"].append(likeliest.indices.tolist())
            own = every.gather(-1, torch.tensor(tokens[first:])[:, None])
            found["actual_logprobs"].append(own.tolist())
        return found


def log_probabilities(logits, targets):
    """Log-probabilities and entropies, and the gradient of logits for random ones of theirs."""
    x = logits.clone().requires_grad_()
    given = np.random.default_rng(7).normal(size=(2, 1, len(targets)))
    pair = selective_log_softmax_and_entropy(x[None], targets[None], temperature=0.7)
    torch.autograd.backward(pair, [*torch.tensor(given)])
    return (
        {"logprobs/of_logprobs": given[0, 0], "logprobs/of_entropy": given[1, 0]}
        | dict(zip(("logprobs/values", "logprobs/entropy"), (y[0] for y in pair), strict=True))
        | {"logprobs/gradient": x.grad}
    )


def make(folder):
    """All arrays of the file, by name."""
    made = Made(folder)
    completions = np.concatenate(made.completions)
    found = {
        "prompts": np.concatenate(made.prompts),
        "completions": completions,
        "rewards": made.rewards,
    }
    for name, settings in POLICIES.items():
        found |= made.policy(name, settings)
    for name, settings in PAIRS.items():
        found |= made.preference(name, settings, 3)
    for name, settings in PAIRS_ALONE.items():
        found |= made.preference(name, settings, 1)
    found |= made.simpo() | made.reward(0.0) | made.reward(0.01) | made.distill()
    found |= made.distill_from_server("top_6", dict(beta=0, loss_top_k=6))
    found |= made.distill_from_server("sampled", dict(beta=1, loss_top_k=1))
    found |= log_probabilities(found["teacher"], torch.tensor(completions))
    arrays = {k: np.asarray(torch.as_tensor(x).detach()) for k, x in found.items()}
    return {k: x.astype(np.float32 if x.dtype.kind == "f" else np.uint8) for k, x in arrays.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        arrays = make(folder)
    if not check:
        texts = dict(trl=trl.__version__, tokenizer=make_tokenizer().backend_tokenizer.to_str())
        np.savez_compressed(FILE, **arrays, **texts)
        return 0
    with np.load(FILE) as kept:
        assert kept.keys() == arrays.keys() | {"trl", "tokenizer"}, kept.keys() ^ arrays.keys()
        for name, x in arrays.items():
            np.testing.assert_allclose(kept[name], x, rtol=1e-4, atol=1e-5, err_msg=name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
