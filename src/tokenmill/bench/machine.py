"""What this computer can do: memory bandwidth and matrix arithmetic, measured quickly, so that figures have a ceiling.

Both are measured through numpy and so are lower bounds of the hardware's own; good to some ten per cent.
"""

from __future__ import annotations

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor

from ..config import Machine


def measure_bandwidth(threads: int | None = None, *, mebibytes: int = 256, repeat: int = 3) -> float:
    """Bytes a second that `threads` cores read together from a buffer well past the caches; best of `repeat`."""
    import numpy as np

    threads = threads or Machine.detect().cores
    parts = [np.ones((mebibytes << 20) // threads, dtype=np.uint8) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeat):
            started = time.perf_counter()
            list(pool.map(np.maximum.reduce, parts))
            best = max(best, sum(part.nbytes for part in parts) / (time.perf_counter() - started))
    return best


def measure_flops(*, size: int = 768, repeat: int = 5) -> float:
    """float32 operations a second of numpy's matrix product; best of `repeat`."""
    import numpy as np

    a = np.ones((size, size), dtype=np.float32)
    a @ a
    best = 0.0
    for _ in range(repeat):
        started = time.perf_counter()
        a @ a
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best


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
