"""What this computer is and can do at most: memory reads and arithmetic, measured natively in about a second.

The loops are csrc/ceilings.inl.h, in the instruction set that the kernels would use. It knows no model; what a model
could do at these ceilings is limits.py.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ..config import MIB, Machine

SECONDS = 0.1  # spent on each of the three


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of all threads together, a second: bytes read from memory, float32 operations, 8-bit integer operations.

    A multiplication and an addition are two operations. `recipe` is the instruction the integer kernels live on.
    """

    read_bytes: float
    float_ops: float
    int8_ops: float
    isa: str = ""
    recipe: str = ""

    def rounded(self) -> dict[str, Any]:
        """For a result file."""
        return {key: round(value) if isinstance(value, float) else value for key, value in asdict(self).items()}

    def __str__(self) -> str:
        recipe = f" ({self.recipe})" if self.recipe else ""
        return (
            f"{self.read_bytes / 1e9:.1f} GB/s read, {self.float_ops / 1e9:,.0f} Gop/s float32, "
            f"{self.int8_ops / 1e9:,.0f} Gop/s int8{recipe}"
        )


def measure_ceilings(threads: int | None = None, isa: str | None = None, *, seconds: float = SECONDS) -> Ceilings:
    """The best that `threads` reach in passes of some milliseconds, for `seconds` each. Raises ValueError for an isa
    this machine has not."""
    from ..backends.cpu import _native

    threads = threads or Machine.detect().cores
    read, float_ops, int8_ops, name, recipe = _native.measure_ceilings(isa or "", threads, _buffer_bytes(), seconds)
    return Ceilings(read, float_ops, int8_ops, name, recipe)


def middle(several: Iterable[Ceilings]) -> Ceilings:
    """Means of measurements before and after something, on a machine that drifts."""
    several = list(several)
    read, float_ops, int8_ops = (
        statistics.fmean(getattr(c, name) for c in several) for name in ("read_bytes", "float_ops", "int8_ops")
    )
    return Ceilings(read, float_ops, int8_ops, several[0].isa, several[0].recipe)


def _buffer_bytes() -> int:
    """Four times the last cache, between 256 MiB and 1 GiB, and never more than a quarter of what is free."""
    try:
        cache = max(os.sysconf("SC_LEVEL3_CACHE_SIZE"), 0)
    except (ValueError, OSError):  # a system that does not say
        cache = 0
    return min(max(4 * cache, 256 * MIB), 1024 * MIB, max(Machine.detect().memory_bytes // 4, MIB))


def describe() -> dict:
    """The machine, for the head of a result file."""
    from .. import __version__

    machine = Machine.detect()
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as f:
            cpu = next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "tokenmill": __version__,
        "cpu": cpu,
        "cores": machine.cores,
        "memory_bytes": machine.memory_bytes,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
