"""The serving benchmark: the same workloads against one server or several, interleaved A B B A in one run.

All targets get the same requests in a round (but for their own answers, which go back to them in multiturn and agent),
so a machine that drifts during the run drifts for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .client import Client, Target, run_workload
from .stats import medians, summarise
from .workloads import Prose, make_workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    targets: list[Target]
    workloads: list[str]
    repeat: int = 1
    seed: int = 1
    count: int | None = None
    concurrency: int | None = None
    rate: float | None = None
    max_tokens: int = 128  # of JSONL prompts that name none
    slo_ttft: float | None = None  # seconds
    slo_itl: float | None = None
    price_per_hour: float | None = None
    timeout: float = 600
    ignore_eos: bool = True
    extra: dict[str, Any] = field(default_factory=dict)


async def _warm_up(client: Client) -> None:
    for _ in range(2):
        await client.ask([{"role": "user", "content": Prose(7).passage(20)}], 8)


async def _run(options: ServingOptions, progress: Callable[[str], None]) -> list[dict]:
    rounds = []
    clients = [
        Client(target, timeout=options.timeout, ignore_eos=options.ignore_eos, extra=options.extra)
        for target in options.targets
    ]
    opened: list[Client] = []
    try:
        for client in clients:
            opened.append(await client.__aenter__())
            await _warm_up(client)
        for name in options.workloads:
            for number in range(options.repeat):
                workload = make_workload(
                    name,
                    options.seed * 1000 + number,
                    count=options.count,
                    concurrency=options.concurrency,
                    rate=options.rate,
                    max_tokens=options.max_tokens,
                )
                for client in clients if number % 2 == 0 else clients[::-1]:
                    progress(f"{workload.name}, round {number + 1} of {options.repeat}: {client.target.name}")
                    samples, wall = await run_workload(client, workload)
                    figures = summarise(
                        samples,
                        wall,
                        slo_ttft=options.slo_ttft,
                        slo_itl=options.slo_itl,
                        price_per_hour=options.price_per_hour,
                    )
                    rounds.append({"workload": workload.name, "target": client.target.name, "round": number, **figures})
    finally:
        for client in opened:
            await client.__aexit__(None, None, None)
    return rounds


def run_serving(options: ServingOptions, progress: Callable[[str], None] = lambda text: None) -> dict:
    """{"rounds": every round's figures, "medians": one row a workload and target}. Raises SetupError, ConfigError."""
    for name in options.workloads:  # a name not understood is refused before anything runs
        make_workload(name, options.seed, count=options.count, max_tokens=options.max_tokens)
    rounds = asyncio.run(_run(options, progress))
    keys = dict.fromkeys((row["workload"], row["target"]) for row in rounds)
    summary = []
    for workload, target in keys:
        own = [row for row in rounds if (row["workload"], row["target"]) == (workload, target)]
        summary.append({**medians(own), "workload": workload, "target": target, "rounds": len(own)})
    return {"rounds": rounds, "medians": summary}
