"""What serving costs beside the model, from the counters that a tokenmill server shows under /metrics.

    server CPU      of the HTTP process: requests parsed, templates, tokens to text and to events, sockets
    engine CPU      of the engine's loop outside the native call: messages, schedule, arrays, commits

Knows names of counters and seconds, nothing of workloads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PREFIX = "vllm:"


@dataclass(frozen=True, slots=True)
class Counters:
    """Since the server's start, in seconds, steps and tokens."""

    server_cpu_seconds: float
    engine_host_cpu_seconds: float
    engine_busy_seconds: float
    engine_steps: float
    generation_tokens: float


def read_counters(text: str) -> Counters | None:
    """From /metrics; None where it is not a tokenmill server's."""
    found = {}
    for name in Counters.__slots__:
        value = re.search(rf"^{PREFIX}{name}_total(?:{{[^}}]*}})? ([0-9.e+-]+)$", text, re.M)
        if value is None:
            return None
        found[name] = float(value[1])
    return Counters(**found)


def overhead(before: Counters, after: Counters, wall: float) -> dict[str, float | None]:
    """Of the time between: microseconds of CPU for each token, and the share of wall time that they make."""
    tokens = after.generation_tokens - before.generation_tokens
    server = after.server_cpu_seconds - before.server_cpu_seconds
    engine = after.engine_host_cpu_seconds - before.engine_host_cpu_seconds
    if not tokens:
        return {}
    return {
        "server_cpu_us_per_token": round(server / tokens * 1e6, 2),
        "engine_cpu_us_per_token": round(engine / tokens * 1e6, 2),
        "overhead_share": round((server + engine) / wall, 4),
        "steps": after.engine_steps - before.engine_steps,
        "busy_share": round((after.engine_busy_seconds - before.engine_busy_seconds) / wall, 4),
    }
