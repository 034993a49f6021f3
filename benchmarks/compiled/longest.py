"""The longest sequence that a model trains on, by compiled peaks: StarTrail's table 2, on paper.

    pip install --no-deps jax-cuda13-pjrt==<version of jax>
    python benchmarks/compiled/longest.py                # 3B, 7B and 13B on 1, 8 and 32 A100 80 GB
    python benchmarks/compiled/longest.py --models 7b --devices 8

One sequence is trained on, with ZeRO 3, `--remat attention_saved`, `--tile 2048` and bfloat16
activations over float32 weights. A length fits if the peak of its compiled step is within 92 % of
80 GiB (XLA_PYTHON_CLIENT_MEM_FRACTION=.92). Lengths are multiples of a power of two, the
granularity, which is between 2.5 % and 5 % of the length that the formula of memory expects. From
there the search goes on until a length fits whose next multiple does not, both compiled.

The models are gpt_3b and gpt_7b of configs/, and the 13B of GPT-3 (arXiv 2005.14165, table 2.1),
whose 40 layers have 40 heads of 128 channels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import jax

import startrail_jax as st
from benchmarks.compiled.step import formula_of, peak_bytes
from configs import RECIPES
from startrail_jax.devices.degrees import Degrees
from startrail_jax.planner.quantities import GIB
from trainer.config import TrainConfig
from trainer.run.exit import exit_on_user_errors

LIMIT = int(0.92 * 80 * GIB)
MULTIPLES = 20
"""The least number of steps that a length has."""


def models() -> dict[str, TrainConfig]:
    """The models by name, with all that saves memory but offloading."""
    gpt_3b, gpt_7b = RECIPES["gpt_3b"](), RECIPES["gpt_7b"]()
    sizes = dict(width=5120, layers=40, heads=40, kv_heads=40, mlp_width=20_480, tied_head=True)
    gpt_13b = replace(gpt_3b, model=replace(gpt_3b.model, **sizes))
    return {"3b": gpt_3b, "7b": gpt_7b, "13b": gpt_13b}


def schemes(num_devices: int) -> dict[str, Degrees]:
    """The schemes of the paper on so many devices."""
    if num_devices == 1:
        return {"one device": Degrees()}
    found = {"Ring Attention": st.Degrees.ring_attention(num_devices)}
    for c in (2, 4):
        if num_devices % c**2 == 0 and num_devices > c**2:
            found[f"StarTrail, C = {c}"] = st.Degrees.startrail(num_devices, c=c)
    return found


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    print(f"jax {jax.__version__}; longest sequence within {LIMIT / GIB:.1f} GiB of an A100 80 GB")
    print(f"{'model':<7}{'GPUs':>5}  {'scheme':<18}{'tokens':>10}{'GiB':>8}{'formula':>9}", end="")
    print(f"{'next':>10}{'GiB':>8}{'by formula':>12}")
    for name in args.models:
        config = models()[name]
        for num_devices in args.devices:
            for scheme, degrees in schemes(num_devices).items():
                text = search_row(config, degrees)
                print(f"{name:<7}{num_devices:>5}  {scheme:<18}{text}", flush=True)


def search_row(config: TrainConfig, degrees: Degrees) -> str:
    """The longest sequence and the next one, with their peaks, as columns."""

    def estimate(tokens: int) -> int:
        return formula_of(replace(config, seq_len=tokens), degrees).device_bytes

    measured: dict[int, int] = {}

    def peak(multiple: int) -> int:
        if multiple not in measured:
            longer = replace(config, seq_len=multiple * unit)
            measured[multiple] = peak_bytes(longer, degrees, "a100")
        return measured[multiple]

    # Every length is cut into two runs of tokens for each device.
    least = 2 * degrees.sequence * 64
    if estimate(least) > LIMIT:
        return f"{'none':>10}{'':>8}{estimate(least) / GIB:>9.1f}  for {least} tokens"
    expected = last_that_fits(lambda n: estimate(n * least), 1) * least
    unit = least
    while expected // (2 * unit) >= MULTIPLES:
        unit *= 2
    best = last_that_fits(peak, expected // unit)
    tokens = best * unit
    here = f"{tokens:>10}{measured[best] / GIB:>8.1f}{estimate(tokens) / GIB:>9.1f}"
    return f"{here}{tokens + unit:>10}{measured[best + 1] / GIB:>8.1f}{expected:>12}"


def last_that_fits(size: Callable[[int], int], guess: int) -> int:
    """The largest multiple whose size is within the limit, where the next one's is not; 0 if none.

    It goes up or down from the guess, ever faster, until the border lies behind it, and then halves
    the range that is left. So a good guess needs two sizes.

    Args:
        size: bytes for a multiple; they grow with it.
        guess: where to begin, at least 1.
    """
    if size(guess) <= LIMIT:
        low, way = guess, 1
        while size(low + way) <= LIMIT:
            low, way = low + way, 2 * way
        high = low + way
    else:
        high, way = guess, 1
        while high - way > 0 and size(high - way) > LIMIT:
            high, way = high - way, 2 * way
        low = max(high - way, 0)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= LIMIT else (low, middle)
    return low


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of the benchmark; see --help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=models(), default=list(models()))
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 8, 32], help="GPUs")
    return parser.parse_args(argv)


if __name__ == "__main__":
    with exit_on_user_errors():
        main()
