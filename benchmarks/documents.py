"""What batches of whole documents save: bytes, padding and waiting, for a profile of lengths.

    python benchmarks/documents.py                          # an 8B model of 32 heads, 8 key heads
    python benchmarks/documents.py --heads 16 --kv-heads 16 --port-bytes 6e9

It compares rows of 131,072 tokens that hold many documents with parts (`st.parts`). Rows and parts
have the schemes of the fewest bytes. Rows are filled as well as parts are. Everything is counted
from lengths and by `st.communication`; nothing runs. A minute on one core. The columns:

    sequence     devices of a row, where more devices than that have rows beside each other
    bytes        received by a device in the attention of one layer, forward and backward, for each
                 token of a document that it holds
    nowhere      tokens of documents that are sent nowhere, as they lie on one device
    padding      places without a token
    work         of the busiest device of each part over that of equal shares without padding, by
                 visible pairs and matrices: 1 is best
    time         work and bytes at --flops and --port-bytes, one after another, over that of rows

Lengths are drawn from an exponential distribution of mean 18,372, cut at 131,072 tokens. It has the
quantiles that were published of 10,000 rows of fine-tuning data, within 3 %: median 12,432, p90
43,089, p99 84,679 (https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/3316).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

import numpy as np

import startrail_jax as st
from startrail_jax.analysis.settings import legal_degrees
from startrail_jax.documents import BatchPart, DocumentCost, PartStream, summary

MEAN, LONGEST, COUNT, STEPS = 18_372, 131_072, 20_000, 200
# Llama 3 8B: parameters in matrix products, layers and width.
PARAMETERS, LAYERS, WIDTH = 7.5e9, 32, 4096


@functools.cache
def fewest_bytes(c: int, tokens: int, heads: int, kv_heads: int) -> int:
    """What a device receives for a row on c devices, under the scheme that receives least."""
    call = {"batch": 1, "seq_len": tokens, "heads": heads, "kv_heads": kv_heads, "causal": True}
    call |= {"layout": "zigzag"}
    settings = legal_degrees(c, **call)
    call |= {"head_dim": 128, "dtype": "bfloat16", "packed": True}
    return min(st.communication(degrees, **call).total.received_bytes for degrees in settings)


def line(
    lengths: np.ndarray,
    steps: Sequence[Sequence[BatchPart]],
    devices: int,
    share: int,
    arguments: argparse.Namespace,
) -> tuple[str, float]:
    """The columns of some steps, and the seconds of a token."""
    flops = 6.0 * PARAMETERS, 14.0 * WIDTH * LAYERS  # Of a token, and of a visible pair.
    cost = DocumentCost(token=1.0, pair=flops[1] / flops[0], hop=0.0)
    held = summary(steps, lengths, devices, share=share, cost=cost)
    of_device = held.tokens / devices
    received = sum(
        number * fewest_bytes(c, c * share, arguments.heads, arguments.kv_heads)
        for c, number in held.parts.items()
    )
    busiest = held.seconds * flops[0]  # Matrices and pairs of the device that all wait for.
    numbers = [x for step in steps for part in step for row in part.rows for x in row]
    least = (held.tokens + cost.pair * cost.visible_pairs(lengths[numbers]).sum()) * flops[0]
    seconds = busiest / arguments.flops + LAYERS * received / arguments.port_bytes
    columns = (
        f"{received / of_device:,.0f} | {held.alone / held.tokens:.0%} | {held.padding:.1%} | "
        f"{busiest * devices / least:.2f}"
    )
    return columns, seconds / held.tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=32, help="query heads of 128 channels")
    parser.add_argument("--kv-heads", type=int, default=8, help="key heads")
    parser.add_argument("--flops", type=float, default=4e14, help="FLOP/s of a device")
    parser.add_argument("--port-bytes", type=float, default=50e9, help="bytes/s of its port")
    arguments = parser.parse_args()
    drawn = np.random.default_rng(0).exponential(MEAN, 2 * COUNT)
    lengths = np.ceil(drawn[drawn <= LONGEST])[:COUNT].astype(int)
    print("| devices | sequence | batches | bytes | nowhere | padding | work | time |")
    print("|---|---|---|---|---|---|---|---|")
    for devices, sequence in ((8, 8), (16, 16), (64, 8), (64, 16), (64, 64)):
        share = LONGEST // sequence
        of_rows = 0.0
        degrees = [c for c in range(1, sequence + 1) if devices % c == 0 and sequence % c == 0]
        for name, allowed in (("rows", [sequence]), ("documents", degrees)):
            stream = PartStream(
                lengths, devices, share=share, parts_per_step=8, degrees=allowed, window=4096
            )
            steps = [next(stream) for _ in range(STEPS)]
            columns, seconds = line(lengths, steps, devices, share, arguments)
            of_rows = of_rows or seconds
            ratio = seconds / of_rows
            print(f"| {devices} | {sequence} | {name} | {columns} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
