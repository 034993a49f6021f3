"""Compares a model that others wrote, with its own attention, to the same model with startrail_jax.

Each program beside this file puts the op into one package. `.ci/clients NAME` runs one of them.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import startrail_jax as st

FLOAT32 = 5e-6
"""Largest difference in float32, relative to the largest value of an array."""
BFLOAT16 = 1.25
"""How much larger errors in bfloat16 may be than those of the unmodified model in bfloat16."""

SCHEMES = {
    "Ring": st.Degrees(ring=8),
    "StarTrail C=2": st.Degrees.startrail(8, c=2),
    "team 4 x ring 2": st.Degrees(team=4, ring=2),
    "Ulysses 2 x ring 4": st.Degrees(head=2, ring=4),
}
SEQ_LEN = 64


class Result(NamedTuple):
    """What a model and its gradient give."""

    loss: Any
    logits: Any
    """[batch, seq, channels]"""
    gradients: Any


def simulated_mesh() -> jax.sharding.Mesh:
    """Eight devices on the CPU, and products in full float32. Call it before arrays are made."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_default_matmul_precision", "highest")
    return jax.make_mesh((8,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))


def packed_rows(vocabulary: int) -> tuple[np.ndarray, ...]:
    """Tokens, targets, positions and segment ids of two rows, int32 [2, seq] each. A row has two
    documents, with the ids 1 and 2, and the second row has padding of id 0."""
    tokens = np.random.default_rng(0).integers(1, vocabulary, (2, SEQ_LEN + 1), np.int32)
    lengths = np.array([[40, 24, 0], [25, 30, 9]])
    positions = np.stack([np.concatenate([*map(np.arange, row)]) for row in lengths])
    ids = np.stack([np.repeat([1, 2, 0], row) for row in lengths])
    # The shift comes before the sharding: neighbours in memory need not be neighbours in the text.
    return tokens[:, :-1], tokens[:, 1:], positions.astype(np.int32), ids.astype(np.int32)


def packed_features() -> tuple[np.ndarray, ...]:
    """Inputs and targets of one layer, float32 [2, seq, 64], and segment ids [2, seq]."""
    ids = packed_rows(2)[3]
    return *np.random.default_rng(0).standard_normal((2, *ids.shape, 64), np.float32), ids


def visible(ids: Any) -> Any:
    """The mask of the unmodified model: which keys each query sees, bool [batch, seq, seq]."""
    same = (ids[:, :, None] == ids[:, None, :]) & (ids > 0)[:, :, None]
    return same & jnp.tri(ids.shape[1], dtype=bool)


def squared_error(out: Any, targets: Any, ids: Any) -> Any:
    """The mean of squares, where padding counts as right."""
    return (((out - targets) * (ids > 0)[..., None]) ** 2).mean()


def cross_entropy(logits: Any, targets: Any, valid: Any) -> Any:
    """The mean of -log p(target) over valid tokens."""
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    log_p = jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    return -jnp.where(valid, log_p, 0).sum() / valid.sum()


def compare(
    run: Callable[..., Result],
    batch: tuple[Any, ...],
    *,
    mesh: jax.sharding.Mesh,
    valid: Any,
) -> None:
    """Prints a line per scheme, layout and dtype; exits with 1 if a difference is too large.

    `run` maps (attention, dtype, *batch) to a `Result`; None in place of an attention stands for
    the model as its authors wrote it, on one device. Arrays of `batch` are [batch, seq, ...] in
    natural order; `run` gets them in the order of the attention, their sequence sharded over axis
    `context` of the mesh. Logits count where `valid`, bool [batch, seq], is true.
    """

    def result(attention: st.Attention | None, dtype: str) -> list[list[np.ndarray]]:
        """Loss, valid logits and gradients."""
        inputs = batch if attention is None else [attention.shard(x) for x in batch]
        found = run(attention, dtype, *inputs)
        logits = found.logits if attention is None else attention.unshard(found.logits)
        parts = found.loss, np.asarray(logits)[valid], found.gradients
        return [[np.asarray(x, np.float64) for x in jax.tree.leaves(part)] for part in parts]

    unmodified = {dtype: result(None, dtype) for dtype in ("float32", "bfloat16")}
    exact, missed = unmodified["float32"], False
    for scheme, degrees in SCHEMES.items():
        for layout in ("contiguous", "zigzag"):
            attention = st.Attention(
                mesh, axis="context", degrees=degrees, layout=layout, causal=True
            )
            for dtype, without in unmodified.items():
                found = result(attention, dtype)
                if dtype == "float32":
                    worst = [largest(x, y) for x, y in zip(found, exact, strict=True)]
                    text, bar = "loss {:.1e}, logits {:.1e}, gradients {:.1e}", FLOAT32
                else:  # Of all numbers but the loss: a single one may happen to have no error.
                    parts = zip(found[1:], without[1:], exact[1:], strict=True)
                    worst = [mean(x, z) / mean(y, z) for x, y, z in parts]
                    text, bar = "of its own error: logits {:.2f}, gradients {:.2f}", BFLOAT16
                missed |= not max(worst) <= bar
                print(f"{scheme:18} {layout:10} {dtype:8}", text.format(*worst), flush=True)
    if missed:
        sys.exit(f"a difference is above {FLOAT32} in float32 or {BFLOAT16} in bfloat16")


def differences(xs: list[np.ndarray], ys: list[np.ndarray]) -> list[np.ndarray]:
    """The differences of arrays, each relative to its largest value. Gradients that are 0 but for
    rounding, as that of the bias of keys, are relative to the largest value of all arrays."""
    sizes = np.array([np.abs(y).max() for y in ys])
    sizes = np.where(sizes > 1e-5 * sizes.max(), sizes, sizes.max())
    return [(x - y) / size for x, y, size in zip(xs, ys, sizes, strict=True)]


def largest(xs: list[np.ndarray], ys: list[np.ndarray]) -> float:
    """The largest difference."""
    return max(float(np.abs(x).max()) for x in differences(xs, ys))


def mean(xs: list[np.ndarray], ys: list[np.ndarray]) -> float:
    """The root mean square of the differences, with equal weights of all arrays."""
    return float(np.sqrt(np.mean([np.mean(x**2) for x in differences(xs, ys)])))
