"""The first minutes on one GPU: is the attention right, and how fast is it?

    python benchmarks/gpu/run.py                          # 6 minutes, one NVIDIA GPU
    python benchmarks/gpu/run.py --minutes 4

Part 1, errors, compares the block backends, forward and backward, with float32 attention at highest
precision. The number in brackets is the error divided by that of `jax.nn.dot_product_attention` in
the same dtype. A row fails, and the exit status is 1, if an error is NaN or more than 1.4 times
jax's (in float32: more than 1e-5). Rows "at once" do the work of all
devices of a mesh on this one, as a batch.

Part 2, speed, gives medians of samples that are taken in turn, in bfloat16, on random data:

    (a)         jax's cuDNN attention
    (b)         `Attention` on a mesh of this one GPU
    (c)         the same with backend "fa4", if fa4-jax is installed
    ms          one call; fwd+bwd is both passes
    TFLOP/s     useful work over time: 4 * pairs * heads * head_dim forward, 2.5 times that
                backward, of visible (query, key) pairs only; for values of another head_dim
                likewise
    x (a)       TFLOP/s over those of (a)
    GiB         arguments, results and temporaries, as compiled

Part 3, linear attention, gives errors beside float32 in plain XLA, and times likewise; backend
"jla" needs jax-linear-attention.

Rows come in the order of their importance until the time is up. `--only` leaves out other parts.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# For a checkout that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax

import startrail_jax as st
from benchmarks.gpu import errors, linear, speed
from benchmarks.gpu.report import Report

ERRORS_SHARE = 0.6
"""Share of the time that part 1 may take."""

PARTS = ("errors", "speed", "linear")

PACKAGES = ("jax", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13",
            "nvidia-cudnn-cu12", "fa4-jax", "jax-linear-attention")  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    start = time.monotonic()
    args = parse_args(argv)
    device = jax.devices()[0]
    if device.platform != "gpu" and not args.tiny:
        raise SystemExit(
            f"This benchmark needs an NVIDIA GPU; jax found {device.platform} devices. Install "
            "jax[cuda13], or use --tiny for a trial of the program on a CPU."
        )
    report = Report(st.make_mesh(st.Degrees(), devices=[device]), args.tiny)
    header(report, device)
    right = True
    report.deadline = start + ERRORS_SHARE * 60 * args.minutes
    if "errors" in args.only:
        right = errors.measure(report)
    report.deadline = start + 60 * args.minutes
    if "speed" in args.only:
        speed.measure(report)
    if "linear" in args.only:
        linear.measure(report)
    print(f"{time.monotonic() - start:.0f} s in all")
    return int(not right)


def header(report: Report, device: Any) -> None:
    """Prints the device, the versions and the options of the measurement."""
    query = "name,driver_version,memory.total,power.limit,clocks.max.sm"
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        card = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        card = "no nvidia-smi"
    installed = {x.metadata["Name"]: x.version for x in importlib.metadata.distributions()}
    versions = [f"{name} {installed[name]}" for name in PACKAGES if name in installed]
    print(f"{device.device_kind}; {card}\n{', '.join(versions)}\n"
          f"compiler options: {report.options}, XLA_FLAGS: {os.environ.get('XLA_FLAGS', '')}"
          )  # fmt: skip
    if report.tiny:
        print("a trial: every backend is xla, jax's too, and times mean nothing")
    print()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=6.0, help="for everything")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--tiny", action="store_true", help="sizes and backends for a CPU")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
