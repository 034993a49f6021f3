"""The case study of StarTrail's paper: what its equations give, and what the schedules send.

    python benchmarks/paper.py

The case study of 30 B gives 1.625 GB for Ring Attention, and 0.406 GB of point-to-point messages
and 0.152 GB of collectives for StarTrail with C = 4, 0.558 GB in all. Here these are the bytes of
one GPU in the forward pass of one attention, with 64K tokens, 6656 channels (the width of LLaMA
30B) in 16 bits, 64 GPUs, and GB of 2^30 bytes: then all of them follow exactly. They count P hops
for a ring of P, where the last one sends nothing, and leave out the permute of keys; for StarTrail,
the two are equal. The column "sent" has what the schedules send.

The paper reports ratios from 1.199 to 2.114 on its clusters. The planner compares the published
schedule with Ring Attention and with ours on them, for instance

    python plan.py gpt_3b --nodes 16 --gpus-per-node 2 --gpu a100_40 --port 100Gb/s --ports 1 \\
        --seq-len 128K --zero 3 --remat full --mesh.tensor 1 --mesh.data 1

Reference: StarTrail, https://arxiv.org/abs/2407.00611, sections 4.2 to 4.4.
"""

from __future__ import annotations

import startrail_jax as st

GPUS, SEQ_LEN, HEADS, HEAD_DIM = 64, 2**16, 52, 128
GIB = 2**30


def equations(c: int) -> tuple[int, int]:
    """Point-to-point messages and collectives of the case study, in shares of the query of one GPU.
    A ring of R hops sends C shares of key and of value in each; a team gathers C shares of query,
    key and value, and sums as many of the output. C = 1 is Ring Attention."""
    hops = GPUS // c**2
    return 2 * c * hops, 4 * (c - 1)


def main() -> None:
    share = SEQ_LEN // GPUS * HEADS * HEAD_DIM * 2 / GIB
    print(f"{'':<28}{'messages':>10}{'collectives':>13}{'in all':>9}{'sent':>9}   GiB a GPU")
    for name, c, degrees, published in (
        ("Ring Attention", 1, st.Degrees.ring_attention(GPUS), False),
        ("StarTrail, published, C = 4", 4, st.Degrees.startrail(GPUS, c=4), True),
        ("StarTrail here, C = 4", None, st.Degrees.startrail(GPUS, c=4), False),
        ("StarTrail here, C = 8", None, st.Degrees.startrail(GPUS, c=8), False),
        ("team 8, ring 8", None, st.Degrees(team=8, ring=8), False),
    ):
        sent = st.communication(
            degrees, batch=1, seq_len=SEQ_LEN, heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM,
            dtype="bfloat16", causal=True, layout="zigzag", published=published,
        ).forward.received_bytes / GIB  # fmt: skip
        parts = [share * count for count in equations(c)] if c else []
        columns = [f"{x:.3f}" for x in (*parts, sum(parts))] if parts else ["-"] * 3
        print(f"{name:<28}{columns[0]:>10}{columns[1]:>13}{columns[2]:>9}{sent:>9.3f}")


if __name__ == "__main__":
    main()
