"""Functions that the planner's page calls. They run in the browser, without jax."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from startrail_jax.devices.degrees import SEQUENCE_ROLES, Axis, Cycle
from startrail_jax.errors import UserError
from startrail_jax.options import Options
from startrail_jax.planner.command import remarks
from startrail_jax.planner.grid import ORDERS, Placement, Settings
from startrail_jax.planner.hardware import GPUS
from startrail_jax.planner.models import MODELS
from startrail_jax.planner.planning import Plan, describe, plan
from startrail_jax.planner.quantities import show_bytes
from startrail_jax.planner.search import Prediction, Search
from startrail_jax.planner.timing import steps_of
from startrail_jax.rings.transfers import Transfer

# Step of the schedule, and roles of the axes over which it goes -> text, and what is sent.
_TEXTS = {
    ("head exchange", ("head",)): (
        "Sets of {head} GPUs exchange tokens for heads (Ulysses): each GPU then has {head} times "
        "the tokens, of fewer heads.",
        "tokens",
    ),
    ("query gather", ("team",)): (
        "Teams of {team} gather queries: every member gets the queries of the whole team.",
        "queries",
    ),
    ("key placement", ("group",)): ("Groups of {group} gather keys and values.", "keys"),
    ("key placement", ("team",)): ("Teams of {team} gather keys and values too.", "keys"),
    ("key placement", ("group", "team")): (
        "The gathered keys and values move to where the rings of the paper begin.",
        "keys",
    ),
    ("combine", ("team",)): (
        "Teams merge the partial outputs of their members: a GPU gets the outputs of its own "
        "queries.",
        "outputs",
    ),
    ("output exchange", ("head",)): (
        "Sets of {head} GPUs exchange heads for tokens again.",
        "outputs",
    ),
}
FOLDER = Path("FOLDER")
"""Stands for the folder of the user's config.json in commands."""
_plans: list[Plan] = []
"""The plan that the page shows."""


def names() -> str:
    """The GPUs and the models that the planner knows."""
    return json.dumps({"gpus": list(GPUS), "models": list(MODELS)})


def answer(asked: str) -> str:
    """The plan of a cluster and a model: what `--json` prints, and what the page shows beside it.

    Args:
        asked: JSON of the arguments of `startrail_jax.plan`, and `config`, the text of the
            config.json, if there is one.

    Returns:
        JSON of the plan, or of the error.
    """
    arguments = json.loads(asked)
    if config := arguments.pop("config", None):
        # The page sees config.json alone. What else train.py reads is taken to lie beside it.
        FOLDER.mkdir(exist_ok=True)
        for name in ("model.safetensors", "tokenizer.json"):
            (FOLDER / name).touch()
        (FOLDER / "config.json").write_text(config)
        arguments["model"] = str(FOLDER / "config.json")
    try:
        found = plan(**arguments)
    except UserError as error:
        return json.dumps({"error": str(error)})
    _plans[:] = [found]
    shown = [*found.ranked, *found.baselines.values()]
    return json.dumps(
        {
            "plan": found.as_dict(),
            "labels": [f"{choice.label}; {describe(choice)}" for choice in shown],
            "remarks": remarks(found.call, found.cluster),
        }
    )


def fastest(asked: str) -> str:
    """The fastest setting alone, for a cell of the map: arguments as those of `answer`."""
    arguments = json.loads(asked)
    if arguments.pop("config", None):
        arguments["model"] = str(FOLDER / "config.json")
    try:
        found = plan(**arguments, top=1, options=Search(baselines=False))
    except UserError as error:
        return json.dumps({"error": str(error)})
    winner = found.winner
    cell = {x: getattr(winner, x) for x in ("scheme", "mfu", "fits")}
    return json.dumps(cell | {"degrees": vars(winner.degrees)})


def rings(number: str) -> str:
    """How the forward pass of an attention runs on the GPUs: see `forward_pass`.

    Args:
        number: of the setting, of those ranked and then the known schemes of the last plan.
    """
    (found,) = _plans
    return json.dumps(forward_pass(found, [*found.ranked, *found.baselines.values()][int(number)]))


def forward_pass(found: Plan, choice: Prediction) -> dict[str, Any]:
    """The GPUs of one sequence, and who sends to whom in each stage of a forward pass.

    Returns:
        `devices`: number, ring, group, team and head index of each GPU; GPUs are numbered node by
        node. `moves`: pairs of (sender, receiver), one after another in a flat list. `hops`:
        the numbers of the moves round the rings. `stages`: text, what is sent, and number of the
        move, or None where nothing is sent.
    """
    number = _numbers(found, choice)
    moves: list[list[int]] = []
    stages: list[dict[str, Any]] = []

    def add(text: str, kind: str, move: int | None = None, size: float = 0) -> None:
        received = f" A GPU receives {show_bytes(size)}." if size else ""
        stages.append({"text": text + received, "kind": kind, "move": move})

    def move_of(transfer: Transfer) -> int:
        moves.append(_pairs(number, transfer))
        return len(moves) - 1

    ring = choice.degrees.ring
    options = Options(inner=choice.inner, published=choice.published)
    steps = steps_of(found.call, choice.degrees, options)
    turns, others = {}, []
    for x in replace(steps, offsets=range(ring)).in_rings()[0]:
        if x.step.endswith("ring"):
            turns[x.step] = (move_of(x), x.received_bytes / len(x.hops))
        elif x.tensor_bytes:
            text, kind = _TEXTS[x.step, x.roles]
            others.append((text.format(**vars(choice.degrees)), kind, move_of(x), x.received_bytes))
    for other in others:
        if other[1] != "outputs":
            add(*other)
    for turn in range(1, ring + 1):
        text = f"Round {turn} of {ring}: each" if ring > 1 else "Each"
        text += " GPU computes the attention of its queries to the keys that it holds"
        if turn == ring:
            add(f"{text}.", "keys")
        elif choice.inner > 1 and turn % choice.inner == 0:
            add(f"{text}, while keys travel to the next inner cycle.", "keys", *turns["outer ring"])
        else:
            add(f"{text}, while keys travel one place round the ring.", "keys", *turns["ring"])
    for other in others:
        if other[1] == "outputs":
            add(*other)
    places = np.indices(number.shape).reshape(4, -1).T.tolist()
    devices = [[n, *place] for n, place in zip(number.ravel().tolist(), places, strict=True)]
    hops = [move for move, _ in turns.values()]
    return {"devices": devices, "moves": moves, "hops": hops, "stages": stages}


def _numbers(found: Plan, choice: Prediction) -> np.ndarray:
    """The number of the GPU at each [ring, group, team, head], of the first replica."""
    columns: dict[str, Any] = {x: np.array([n]) for x, n in vars(choice.degrees).items()}
    columns |= {"order": np.array([ORDERS.index(choice.order)])}
    columns |= {"inner": np.array([choice.inner]), "published": np.array([choice.published])}
    strides = Placement(Settings(**columns), found.cluster).strides
    shape = [getattr(choice.degrees, role) for role in SEQUENCE_ROLES]
    return np.tensordot([int(strides[role][0]) for role in SEQUENCE_ROLES], np.indices(shape), 1)


def _pairs(number: np.ndarray, transfer: Transfer) -> list[int]:
    """Senders and receivers of a transfer, of its first hop if it has several."""
    if transfer.collective == "collective_permute" and transfer.hops[0] is not None:
        (outer, inner), size = transfer.hops[0], transfer.inner
        axis, p = Axis(("ring",), len(number)), np.arange(len(number))
        ahead = Cycle(axis, len(p) // size, stride=size).place(p, outer)
        received = number[Cycle(axis, size).place(ahead, inner)]
    elif transfer.collective == "collective_permute":
        received = number.swapaxes(1, 2)
    else:
        (role,) = transfer.roles
        along = np.moveaxis(number, SEQUENCE_ROLES.index(role), -1)[..., None]
        others = np.broadcast_to(along.swapaxes(-1, -2), (*along.shape[:-1], along.shape[-2]))
        return _flat(np.broadcast_to(along, others.shape), others)
    return _flat(number, received)


def _flat(senders: np.ndarray, receivers: np.ndarray) -> list[int]:
    pairs = np.stack([senders.ravel(), receivers.ravel()], axis=1)
    return pairs[pairs[:, 0] != pairs[:, 1]].ravel().tolist()
