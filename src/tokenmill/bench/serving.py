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
from .overhead import overhead
from .stats import medians, summarise
from .workloads import Prose, Workload, make_workload

HIGHER_IS_BETTER = ("output_tokens_per_s",)
LOWER_IS_BETTER = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")


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


async def _run(options: ServingOptions, progress: Callable[[str], None], done: Callable[[dict], None]) -> None:
    clients = [
        Client(target, timeout=options.timeout, ignore_eos=options.ignore_eos, extra=options.extra)
        for target in options.targets
    ]
    opened: list[Client] = []
    try:
        for client in clients:
            opened.append(await client.__aenter__())
            await _warm_up(client)
        for number in range(options.repeat):
            for name in options.workloads:
                workload = make_workload(
                    name,
                    options.seed * 1000 + number,
                    count=options.count,
                    concurrency=options.concurrency,
                    rate=options.rate,
                    max_tokens=options.max_tokens,
                )
                for client in clients if number % 2 == 0 else clients[::-1]:
                    progress(f"round {number + 1} of {options.repeat}, {workload.name}: {client.target.name}")
                    figures = await _round(client, workload, options)
                    done({"workload": workload.name, "target": client.target.name, "round": number, **figures})
    finally:
        for client in opened:
            await client.__aexit__(None, None, None)


async def _round(client: Client, workload: Workload, options: ServingOptions) -> dict:
    before = await client.counters()
    samples, wall = await run_workload(client, workload)
    after = await client.counters()
    figures = summarise(
        samples, wall, slo_ttft=options.slo_ttft, slo_itl=options.slo_itl, price_per_hour=options.price_per_hour
    )
    return figures | (overhead(before, after, wall) if before and after else {})


def run_serving(
    options: ServingOptions,
    progress: Callable[[str], None] = lambda text: None,
    save: Callable[[dict], None] = lambda result: None,
) -> dict:
    """{"complete", "rounds": every round's figures, "medians": one row a workload and target, "ratios"}.

    `save` gets it after each round of each target, so that a run that is cut short loses nothing.
    Raises SetupError, ConfigError.
    """
    for name in options.workloads:  # a name not understood is refused before anything runs
        make_workload(name, options.seed, count=options.count, max_tokens=options.max_tokens)
    rounds: list[dict] = []
    total = options.repeat * len(options.workloads) * len(options.targets)

    def result() -> dict:
        rows = _medians(rounds)
        return {"complete": len(rounds) == total, "medians": rows, "ratios": _ratios(rows), "rounds": rounds}

    def done(figures: dict) -> None:
        rounds.append(figures)
        save(result())

    asyncio.run(_run(options, progress, done))
    return result()


def _medians(rounds: list[dict]) -> list[dict]:
    keys = dict.fromkeys((row["workload"], row["target"]) for row in rounds)
    rows = []
    for workload, target in keys:
        own = [row for row in rounds if (row["workload"], row["target"]) == (workload, target)]
        rows.append({**medians(own), "workload": workload, "target": target, "rounds": len(own)})
    return rows


def _ratios(rows: list[dict]) -> list[dict]:
    """How many times better the first target is than each other, by workload: above 1 is better in every column."""
    ratios = []
    for row in rows:
        first = next(other for other in rows if other["workload"] == row["workload"])
        if row is not first:
            ratios.append(
                {"workload": row["workload"], "against": row["target"]}
                | {key: _ratio(first.get(key), row.get(key)) for key in HIGHER_IS_BETTER}
                | {key: _ratio(row.get(key), first.get(key)) for key in LOWER_IS_BETTER}
            )
    return ratios


def _ratio(above: float | None, below: float | None) -> float | None:
    return round(above / below, 3) if above is not None and below else None
