"""Rollouts in JSONL files and tables: tokens, and lists with a number for each of them.

The keys are those of Tinker's `Datum` (https://tinker-docs.thinkingmachines.ai). Entry i of every
list belongs to the target of token i: `targets[i]`, or without that key the token after token i.
Entry i of `experts` alone belongs to token i, which the model reads.

A record of a group has a prompt and several answers, whose lists have a number for each token of
the answer: it stands for a rollout of each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32, Num, UInt

from startrail_jax.errors import InputError
from startrail_jax.values import is_real, real
from trainer.data.documents import Record
from trainer.gpt.chat.examples import check_keys
from trainer.gpt.objectives.distill import TEACHER
from trainer.gpt.objectives.replay import EXPERTS, Replay
from trainer.printable import shortened

TOKENS = "tokens"
LISTS = ("logprobs", "old_logprobs", "ref_logprobs")
"""Keys of lists that have a number for each token."""
OTHERS = ("entropy", "teacher")
"""What score.py writes beside."""
IDS = (TOKENS, "targets")
KEYS = (*IDS, "weights", "advantages", "reward", "group", *LISTS, *OTHERS, EXPERTS)
"""What a record may hold."""
ANSWERS = "completions"
GROUP_KEYS = ("prompt", ANSWERS, "rewards", "advantages", "group", *LISTS)
"""What a record of a group may hold."""
LEAST_REST = 1e-9
"""What the tokens beside a teacher's likeliest have at least: rounded numbers may add up to 1."""
MOST_LOGPROB = 1e-3
"""Engines round a probability of 1 to a little more."""
NO_TARGET = -1
SHIFT = (
    "Entry i of a list belongs to the target of token i, which is the token after it: shift lists "
    "that begin with the number of the first token, or give targets."
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """A record: n tokens that the model reads, with what is known of their targets."""

    place: str
    """Where the record is, for errors."""
    tokens: Int32[np.ndarray, " n"]
    targets: Int32[np.ndarray, " n"]
    """The token after each; `NO_TARGET` for none."""
    weights: Float32[np.ndarray, " n"]
    """How much each target counts; 0 without a target."""
    lists: dict[str, Num[np.ndarray, "n *dims"]]
    """The `LISTS` and `advantages` of the record, 0 for targets that do not count; if asked for,
    `TEACHER`, ids, from the likeliest on, and log-probabilities; and `EXPERTS`."""
    reward: float | None
    group: str | None
    """Rollouts with this name in one file are compared with each other."""
    documents: Int32[np.ndarray, " n"] | None = None
    """Number of the document of each token, from 0; None for a single one."""


def read_rollout(
    record: Record,
    vocab_size: int,
    needed: Collection[str] = (),
    *,
    teacher: int | None = None,
    replay: Replay | None = None,
) -> Rollout:
    """The rollout of a record, which must have the keys of `needed`, a teacher with at least so
    many tokens in each place that counts, and experts as `replay` says.

    Raises:
        InputError: if it holds something else; the message names the line.
    """
    names = (TOKENS, *needed, *(() if teacher is None else ("teacher",)))
    names += () if replay is None else (EXPERTS,)
    fields = checked_fields(record, KEYS, {name: _way_to(name) for name in names}, noun="rollout")
    ids = {name: _ids(fields[name], name, record, vocab_size) for name in IDS if name in fields}
    tokens = ids[TOKENS]
    targets = ids.get("targets")
    if targets is None:
        targets = np.append(tokens[1:], np.int32(NO_TARGET))
    weights, lists = np.ones(len(tokens)), {}
    if "weights" in fields:
        weights = _numbers(fields["weights"], record, "weights")
    for name in (*LISTS, "advantages"):
        if name in fields:
            x = fields[name]
            is_one = name == "advantages" and _is_number(x)
            lists[name] = np.full(len(tokens), float(x)) if is_one else _numbers(x, record, name)
    for name, x in {"targets": targets, "weights": weights, **lists}.items():
        if len(x) != len(tokens):
            raise InputError(
                "Every list of a rollout must have an entry for each of tokens; got "
                f"{len(x)} in {name} and {len(tokens)} tokens in {record.place!r}. Mend or remove "
                "the line."
            )
    if "weights" not in fields:
        weights[targets == NO_TARGET] = 0
    found = _checked(record, tokens, targets, weights, lists)
    if teacher is not None:
        found.lists.update(_teacher(record, found.weights > 0, vocab_size, teacher))
    if replay is not None:
        found.lists[EXPERTS] = _experts(record, targets, replay)
    return found


def group_of(record: Record) -> Any:
    """What a record names its group; the line of a record that names none."""
    line = record.key if ANSWERS in record.fields else record.key.rpartition(":")[2]
    return record.fields.get("group", line)


def of_each_answer(record: Record) -> Iterator[Record]:
    """A record of a group as those of its rollouts; any other as it is."""
    if record.fields.get(ANSWERS) is None:
        yield record
        return
    needed = {"prompt": "Add it to the line: the token ids that all answers continue."}
    fields = checked_fields(record, GROUP_KEYS, needed, noun="group of rollouts")
    prompt, answers = fields["prompt"], fields[ANSWERS]
    are_lists = isinstance(answers, list) and all(isinstance(x, list) and x for x in answers)
    if not (isinstance(prompt, list) and prompt and are_lists and answers):
        raise InputError(
            "A group of rollouts must have a prompt and completions: token ids, and a list of them "
            f"for each answer, none of which is empty; got {shortened(prompt)} and "
            f"{shortened(answers)} in {record.place!r}. Mend or remove the line."
        )
    for name in (*LISTS, "rewards", "advantages"):
        x = fields.get(name, answers)
        if not isinstance(x, list) or len(x) != len(answers):
            raise InputError(
                f"{name} of a group must have an entry for each of completions; got {shortened(x)} "
                f"for {len(answers)} answers in {record.place!r}. Mend or remove the line."
            )
    before = len(prompt) - 1
    for number, answer in enumerate(answers):
        weights = [0] * before + [1] * len(answer) + [0]
        found = {TOKENS: prompt + answer, "weights": weights, "group": group_of(record)}
        for name in LISTS:
            if name in fields:
                found[name] = _placed(fields[name][number], name, before, answer, record)
        if "advantages" in fields:
            x = fields["advantages"][number]
            is_one = _is_number(x)
            found["advantages"] = x if is_one else _placed(x, "advantages", before, answer, record)
        if "rewards" in fields:
            found["reward"] = fields["rewards"][number]
        yield replace(record, fields=found)


def _placed(values: Any, name: str, before: int, answer: list[Any], record: Record) -> list[Any]:
    """The numbers of the tokens of an answer, at the tokens that have them as targets."""
    if not isinstance(values, list) or len(values) != len(answer):
        found = f"{len(values)} numbers" if isinstance(values, list) else shortened(values)
        raise InputError(
            f"{name} of a group must have a number for each token of an answer; got {found} for "
            f"{len(answer)} tokens in {record.place!r}. Mend or remove the line."
        )
    return [0.0] * before + values + [0.0]


def length_of(counted: Bool[np.ndarray, " n"]) -> int:
    """Number of entries up to the last that counts."""
    return int(np.flatnonzero(counted)[-1]) + 1 if counted.any() else 0


def checked_fields(
    record: Record, known: Collection[str], needed: Mapping[str, str], *, noun: str
) -> dict[str, Any]:
    """What a record holds, without nulls: keys that are known, and all that are `needed`, each with
    what to do if it is missing."""
    fields = {key: x for key, x in record.fields.items() if x is not None}
    check_keys(replace(record, fields=fields), known)
    for name, way_out in needed.items():
        if name not in fields:
            raise InputError(
                f"A {noun} must have what its objective needs; got no {name} in {record.place!r}, "
                f"which has {', '.join(fields) or 'nothing'}. {way_out}"
            )
    return fields


def _way_to(name: str) -> str:
    """What to do about a missing key."""
    ways = {
        TOKENS: "Mend or remove the line.",
        "ref_logprobs": "score.py writes it, with the model that is the reference.",
        "old_logprobs": "score.py writes it, with the model that made the rollouts.",
        "advantages": "Give it, or reward and group in every line.",
        EXPERTS: "Add it to the line, or leave --replay-experts out.",
    }
    return ways.get(name, "Add it to the line.")


def _checked(
    record: Record, tokens: Any, targets: Any, weights: Any, lists: dict[str, Any]
) -> Rollout:
    fields, counted = record.fields, weights > 0
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise InputError(
            f"weights must be at least 0 and finite; got {weights.tolist()} in {record.place!r}. "
            "Mend or remove the line."
        )
    if (counted & (targets == NO_TARGET)).any():
        place = int((counted & (targets == NO_TARGET)).argmax())
        raise InputError(
            f"A token that counts must have a target; got weight {weights[place]:g} for token "
            f"{place} of {len(tokens)} in {record.place!r}, which has none. {SHIFT}"
        )
    for name, x in lists.items():
        if not np.isfinite(x[counted]).all():
            place = int((counted & ~np.isfinite(x)).argmax())
            raise InputError(
                f"{name} must be a finite number for every target that counts; got {x[place]} for "
                f"token {place} of {len(tokens)} in {record.place!r}. {SHIFT}"
            )
        if name in LISTS and (x[counted] > MOST_LOGPROB).any():
            place = int((counted & (x > MOST_LOGPROB)).argmax())
            raise InputError(
                f"{name} must be logarithms of probabilities, which are at most 0; got "
                f"{x[place]:g} for token {place} in {record.place!r}. Mend or remove the line."
            )
    reward, group = fields.get("reward"), fields.get("group")
    if reward is not None and not is_real(real(reward)):
        raise InputError(
            f"reward must be a finite number; got {shortened(reward)} in {record.place!r}. Mend or "
            "remove the line."
        )
    if group is not None and not isinstance(group, str | int):
        raise InputError(
            f"group must be a text or an integer; got {shortened(group)} in {record.place!r}. Mend "
            "or remove the line."
        )
    return Rollout(
        place=record.place,
        tokens=tokens,
        targets=targets,
        weights=weights.astype(np.float32),
        lists={name: np.where(counted, x, 0).astype(np.float32) for name, x in lists.items()},
        reward=None if reward is None else float(reward),
        group=None if group is None else str(group),
    )


def _teacher(
    record: Record, counted: Bool[np.ndarray, " n"], vocab_size: int, k: int
) -> dict[str, Num[np.ndarray, "n *dims"]]:
    """The k likeliest tokens of a teacher in each place."""
    given: Any = record.fields["teacher"]
    n = len(counted)
    ids, logprobs = np.zeros((n, k), np.int32), np.full((n, k), math.log(1 / k), np.float64)
    parts: list[Any] = []
    if isinstance(given, dict):
        parts = [given.get(name) for name in ("ids", "logprobs")]
    if not parts or not all(isinstance(x, list) and len(x) == n for x in parts):
        raise InputError(
            "teacher must be an object with ids and logprobs, lists with an entry for each of "
            f"tokens; got {shortened(given)} for {n} tokens in {record.place!r}. score.py --top-k "
            "writes it."
        )
    for place in np.flatnonzero(counted).tolist():
        of_ids, of_logprobs = (x[place] for x in parts)
        is_list = isinstance(of_ids, list) and isinstance(of_logprobs, list)
        if not is_list or not len(of_ids) == len(of_logprobs) >= k:
            raise InputError(
                f"teacher must have at least distill.top_k tokens in each place that counts; got "
                f"{shortened(of_ids)} with {shortened(of_logprobs)} for token {place} in "
                f"{record.place!r}, with top_k={k}. Use a smaller --distill.top-k, or score.py "
                "with a larger --top-k."
            )
        values = np.array(of_logprobs, np.float64)
        order = np.argsort(-values, kind="stable")[:k]
        chosen = [of_ids[i] for i in order.tolist()]
        are_ids = all(type(x) is int and 0 <= x < vocab_size for x in chosen)
        if not are_ids or len(set(chosen)) < k or not np.isfinite(values).all():
            raise InputError(
                "teacher must have token ids of the model, each once, and finite "
                f"log-probabilities; got {shortened(of_ids)} with {shortened(of_logprobs)} for "
                f"token {place} in {record.place!r}. Use a teacher with the same tokenizer."
            )
        ids[place], logprobs[place] = chosen, values[order]
    rest = np.log(np.maximum(1 - np.exp(logprobs).sum(-1), LEAST_REST))
    kinds = np.int32, np.float32, np.float32
    arrays = ids, logprobs, rest
    return {name: x.astype(t) for name, x, t in zip(TEACHER, arrays, kinds, strict=True)}


def _experts(
    record: Record, targets: Int32[np.ndarray, " n"], replay: Replay
) -> UInt[np.ndarray, "n layers k"]:
    """The experts of each token, each once; the first ones after the last token with a target, as
    the model reads no other."""
    given: Any = record.fields[EXPERTS]
    if not isinstance(given, list) or len(given) != len(targets):
        found = f"{len(given)} entries" if isinstance(given, list) else shortened(given)
        raise InputError(
            "experts must have an entry for each of tokens, with the experts of that token; got "
            f"{found} for {len(targets)} tokens in {record.place!r}. Append null for a last token "
            "that the engine has not read."
        )
    ((kind, shape),) = replay.arrays.values()
    experts = np.tile(np.arange(replay.top_k, dtype=kind), (len(given), replay.layers, 1))
    read = given[: length_of(targets != NO_TARGET)]
    if not read:
        return experts
    values = _integers(read)
    if values.shape[1:] != shape:
        token = next(t for t, x in enumerate(read) if _integers(x).shape != shape)
        raise InputError(
            "experts must have model.experts.top_k integers for each layer of experts; got "
            f"{shortened(read[token])} for token {token} in {record.place!r}, with {shape[0]} "
            f"such layers and top_k={shape[1]}. Use rollouts of this model."
        )
    is_id = (values >= 0) & (values < replay.count)
    ordered = np.sort(values, axis=-1)
    are_ids = is_id.all(-1) & (ordered[..., 1:] != ordered[..., :-1]).all(-1)
    if not are_ids.all():
        token, layer = np.argwhere(~are_ids)[0].tolist()
        raise InputError(
            "The experts of a token in a layer must be at least 0, below model.experts.count and "
            f"different; got {values[token, layer].tolist()} for token {token}, entry {layer}, in "
            f"{record.place!r}, with count={replay.count}. Use rollouts of this model."
        )
    experts[: len(read)] = values
    return experts


def _integers(values: Any) -> np.ndarray:
    """An array of nested lists of integers; an empty one for anything else."""
    try:
        found = np.array(values)
    except ValueError:  # Lists of several lengths.
        return np.zeros(0)
    return found if found.dtype.kind == "i" else np.zeros(0)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(values: Any, record: Record, name: str) -> np.ndarray:
    """A list of numbers, with NaN for null."""
    if not isinstance(values, list) or not all(x is None or _is_number(x) for x in values):
        one = " or one number" if name == "advantages" else ""
        raise InputError(
            f"{name} must be a list of numbers{one}; got {shortened(values)} in {record.place!r}. "
            "Mend or remove the line."
        )
    return np.array([math.nan if x is None else x for x in values], np.float64)


def _ids(values: Any, name: str, record: Record, vocab_size: int) -> Int32[np.ndarray, " n"]:
    is_list = isinstance(values, list) and values
    if not is_list or not all(type(x) is int for x in values):
        raise InputError(
            f"{name} must be a list of token ids, which are integers; got {shortened(values)} in "
            f"{record.place!r}. Mend or remove the line."
        )
    least = NO_TARGET if name == "targets" else 0
    if not least <= min(values) <= max(values) < vocab_size:
        wrong = next(x for x in values if not least <= x < vocab_size)
        raise InputError(
            "Token ids must be at least 0 and below model.vocab_size; got "
            f"{wrong} in {name} of {record.place!r} with vocab_size={vocab_size}. Use the model "
            "whose tokenizer made them, or mend the line."
        )
    return np.array(values, np.int32)


def advantages_of(
    rewards: np.ndarray, groups: np.ndarray, *, deviation: bool
) -> Float32[np.ndarray, " rollouts"]:
    """GRPO's advantages: the reward minus the mean of its group, divided by the group's standard
    deviation (that of a sample) plus 1e-4 if `deviation`. Of a group of one, 0.

    Args:
        rewards: float64 [rollouts].
        groups: number of the group of each rollout, from 0: integers [rollouts].

    References:
        DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.2; Dr. GRPO,
        https://arxiv.org/abs/2503.20783, which leaves out the deviation.
    """
    count = np.bincount(groups)
    apart = rewards - (np.bincount(groups, rewards) / np.maximum(count, 1))[groups]
    if deviation:
        variance = np.bincount(groups, apart**2) / np.maximum(count - 1, 1)
        apart /= np.sqrt(variance)[groups] + 1e-4
    return apart.astype(np.float32)
