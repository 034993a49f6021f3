"""What a verification says: lines of tables, and JSON."""

from __future__ import annotations

import collections
import ctypes
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from startrail_jax.devices.nodes import nodes_of
from startrail_jax.verify.cases import Case
from startrail_jax.verify.exactness import Cell
from startrail_jax.verify.schemes import Scheme
from startrail_jax.verify.speed import Measurement

_NAME, _CELL = 24, 18


def versions(on_cuda: bool) -> dict[str, str | None]:
    """Versions of Python and of packages; None for those that are not found."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("startrail-jax", "jax", "jaxlib"):
        try:
            found[name.replace("-", "_")] = metadata.version(name)
        except metadata.PackageNotFoundError:  # A checkout that is only on the path.
            found[name.replace("-", "_")] = None
    found["cudnn"] = cudnn_version() if on_cuda else None
    return found


def cudnn_version() -> str | None:
    """That of the library that a program loads; None if there is none."""
    try:
        number = ctypes.CDLL("libcudnn.so.9").cudnnGetVersion()
    except (OSError, AttributeError):
        for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return None
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


@dataclass(kw_only=True)
class Report:
    """All results. Process 0 prints each as soon as it is there."""

    case: Case
    flags: Mapping[str, Any]
    exactness: list[tuple[Scheme, dict[str, Cell] | str]] = field(default_factory=list)
    """The errors of each scheme, or why it could not run."""
    speed: list[tuple[Scheme, dict[str, Measurement] | str]] = field(default_factory=list)
    """Bytes and times of each scheme, or why it could not run."""

    @property
    def ok(self) -> bool:
        """Whether all schemes ran, and nothing is wrong."""
        return not self.wrong

    @property
    def wrong(self) -> int:
        """Number of wrong cells, and of schemes that could not run."""
        results = [found for _, found in (*self.exactness, *self.speed)]
        return sum(1 if isinstance(x, str) else sum(not y.ok for y in x.values()) for x in results)

    def begin(self) -> None:
        """Prints what is verified, and where."""
        said = self._environment
        names = {"startrail_jax": "startrail_jax", "jax": "jax", "jaxlib": "jaxlib"}
        names |= {"python": "Python", "cudnn": "cuDNN"}
        known = said["versions"]
        say(", ".join(f"{names[x]} {known[x]}" for x in names if known[x]))
        kinds = ", ".join(f"{count} x {kind}" for kind, count in said["devices"]["kinds"].items())
        say(f"{kinds}; nodes: {said['devices']['nodes']}, processes: {jax.process_count()}")
        say(self.case.call)
        for name, reason in self.case.schemes[1].items():
            say(f"left out: {name}: {reason}")

    def begin_exactness(self) -> None:
        """Prints the head of the first table."""
        case = self.case
        say("")
        say(
            "exactness: error/bound, relative to the largest value of the float64 reference; "
            f"{case.check_rows} rows of {case.check_len:,} tokens"
        )
        if case.cuts:
            say(f"cut, as the reference is slow: {case.cuts}")
        say("scheme".ljust(_NAME) + "".join(x.ljust(_CELL) for x in case.trial.expected).rstrip())

    def add_exactness(self, scheme: Scheme, found: dict[str, Cell] | str) -> None:
        """Adds and prints the errors of a scheme, or why it could not run."""
        self.exactness.append((scheme, found))
        cells = (
            f"FAILED {found}"
            if isinstance(found, str)
            else "".join(str(x).ljust(_CELL) for x in found.values())
        )
        say(scheme.name.ljust(_NAME) + cells.rstrip())

    def begin_speed(self) -> None:
        """Prints the head of the second table."""
        case = self.case
        said = "" if case.byte_dtype == case.dtype else f"; bytes are those of {case.byte_dtype}"
        say("")
        say(f"speed: rows of {case.seq_len:,} tokens; bytes and rates are of one device{said}")
        say(
            f"{'scheme':<{_NAME}}{'degrees':<34}{'pass':<9}{'bytes':>13}{'closed form':>14}"
            f"{'':8}{'ms':>10}{'GB/s':>9}{'TFLOP/s':>10}"
        )

    def add_speed(self, scheme: Scheme, found: dict[str, Measurement] | str) -> None:
        """Adds and prints the bytes and times of a scheme, or why it could not run."""
        self.speed.append((scheme, found))
        start = f"{scheme.name:<{_NAME}}{scheme.setting:<34}"
        if isinstance(found, str):
            say(f"{start}FAILED {found}")
            return
        for name, x in found.items():
            rate = x.teraflops_per_second
            received = "uncounted" if x.received_bytes is None else f"{x.received_bytes:,}"
            say(
                f"{start}{name:<9}{received:>13}{x.closed_form_bytes:>14,}"
                f"{'  ok' if x.ok else '  WRONG':<8}{1e3 * x.seconds:>10.3f}"
                f"{x.gigabytes_per_second:>9.3g}{'-' if rate is None else f'{rate:.3g}':>10}"
            )

    def end(self) -> None:
        """Prints the summary."""
        say("\nall ok" if self.ok else f"\n{self.wrong} WRONG or FAILED")

    def write(self, path: Path) -> None:
        """Writes all of it as JSON, in process 0."""
        if jax.process_index() == 0:
            path.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    def as_json(self) -> dict[str, Any]:
        """Everything: versions, devices, flags, results."""
        case = self.case

        def listed(results: list[tuple[Scheme, Any]], key: str) -> list[dict[str, Any]]:
            return [
                {
                    "scheme": list(scheme.names),
                    "degrees": dict(vars(scheme.degrees)),
                    "inner": scheme.inner,
                    "layout": scheme.layout or case.layout or "contiguous",
                    **(
                        {"failed": found}
                        if isinstance(found, str)
                        else {key: {name: x.as_json() for name, x in found.items()}}
                    ),
                }
                for scheme, found in results
            ]

        return {
            **self._environment,
            "flags": dict(self.flags),
            "exactness": {
                "rows": case.check_rows,
                "seq_len": case.check_len,
                "cuts": case.cuts,
                "schemes": listed(self.exactness, "results"),
            },
            "speed": {
                "rows": case.rows,
                "seq_len": case.seq_len,
                "byte_dtype": case.byte_dtype,
                "schemes": listed(self.speed, "passes"),
            },
            "left_out": case.schemes[1],
            "ok": self.ok,
        }

    @property
    def _environment(self) -> dict[str, Any]:
        devices = self.case.devices
        return {
            "versions": versions(devices[0].platform in ("gpu", "cuda")),
            "devices": {
                "platform": devices[0].platform,
                "kinds": dict(collections.Counter(x.device_kind for x in devices)),
                "count": len(devices),
                "processes": jax.process_count(),
                "nodes": len(set(nodes_of(devices))),
            },
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
        }


def say(line: str) -> None:
    """Prints a line in process 0."""
    if jax.process_index() == 0:
        print(line, flush=True)
