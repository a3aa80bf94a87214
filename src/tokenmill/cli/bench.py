"""`tokenmill bench`: the engine in this process, and serving over HTTP, alone or against others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..errors import ConfigError
from . import bench_engine
from .bench_common import progress_lines, reporting, say_where


@click.group()
def bench() -> None:
    """Measure: each figure is the median of --repeat rounds, interleaved A B B A with whatever it is compared to.

    engine, throughput, latency and kernels run the model in this process (token ids in, token ids out); serving drives
    any OpenAI-compatible server. Each writes a JSON file and prints a table; report makes the README's table and plot
    of the files. Plots need the extra `bench`: pip install 'tokenmill[bench]'.
    """


for command in bench_engine.COMMANDS:
    bench.add_command(command)


@bench.command()
@click.argument("target", default="http://127.0.0.1:8000/v1", metavar="[NAME=]URL")
@click.option("--against", multiple=True, metavar="NAME=URL", help="Another server, measured in the same run.")
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    default=("chat",),
    show_default=True,
    help="chat, shared_prefix, multiturn, agent, all, or a .jsonl file of your own prompts; may be repeated.",
)
@click.option(
    "--requests", "count", type=click.IntRange(1), help="Requests, or conversations. Default: the workload's."
)
@click.option("--concurrency", type=click.IntRange(1), help="Requests at once. Default: the workload's.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Poisson arrivals a second, not --concurrency.")
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True, help="Of .jsonl prompts.")
@click.option("--slo-ttft", type=float, metavar="MS", help="Goodput counts requests whose first token came by then.")
@click.option("--slo-itl", type=float, metavar="MS", help="... and 99% of whose other tokens came within this.")
@click.option("--price-per-hour", type=float, help="Of the machine; gives the cost of a million output tokens.")
@click.option("--model", "model_name", help="Model name to send. Default: the first the server lists.")
@click.option("--api-key", envvar="TOKENMILL_API_KEY", help="Sent to every target.")
@click.option("--stop-at-eos", is_flag=True, help="Let answers end early; by default each has its full length.")
@click.option("--extra-body", metavar="JSON", default="{}", help="Merged into every request.")
@click.option("--timeout", type=float, default=600, show_default=True, help="Seconds, of one request.")
@reporting
def serving(**values: Any) -> None:
    """Tokens/s, TTFT, ITL, TPOT, goodput and cost of an OpenAI-compatible server (default: the local one)."""
    from dataclasses import replace

    from ..bench import report
    from ..bench.client import Target
    from ..bench.machine import describe
    from ..bench.serving import ServingOptions, run_serving
    from ..bench.workloads import WORKLOADS

    try:
        extra = json.loads(values["extra_body"])
        if not isinstance(extra, dict):
            raise ValueError
    except ValueError:
        raise ConfigError(f"--extra-body is {values['extra_body']!r}; expected a JSON object") from None
    targets = [
        replace(Target.parse(text), model=values["model_name"], api_key=values["api_key"])
        for text in (values["target"], *values["against"])
    ]
    if len({target.name for target in targets}) < len(targets):
        raise ConfigError("two targets have the same name; write NAME=URL for each")
    names = [name for given in values["workloads"] for name in (WORKLOADS if given == "all" else [given])]
    options = ServingOptions(
        targets=targets,
        workloads=names,
        repeat=values["repeat"],
        seed=values["bench_seed"],
        count=values["count"],
        concurrency=values["concurrency"],
        rate=values["rate"],
        max_tokens=values["max_tokens"],
        slo_ttft=None if values["slo_ttft"] is None else values["slo_ttft"] / 1000,
        slo_itl=None if values["slo_itl"] is None else values["slo_itl"] / 1000,
        price_per_hour=values["price_per_hour"],
        timeout=values["timeout"],
        ignore_eos=not values["stop_at_eos"],
        extra=extra,
    )
    result = run_serving(options, progress_lines(values["quiet"]))
    settings = {
        key: value for key, value in values.items() if key not in ("api_key", "quiet") and not isinstance(value, Path)
    }
    rows = result["medians"]
    path = report.result_path(values["output_dir"], "serving")
    report.write_json(path, {"kind": "serving", "machine": describe(), "settings": settings, **result})
    report.print_table(f"serving, medians of {values['repeat']} round(s); times in ms", rows, SERVING_COLUMNS)
    for row in rows:
        for error in row.get("error_samples") or ():
            click.echo(f"{row['workload']}, {row['target']}: {error}", err=True)
    panels = {
        SERVING_COLUMNS[key] + (", ms" if key.endswith("_ms") else ""): {
            target.name: {row["workload"]: row[key] for row in rows if row["target"] == target.name}
            for target in targets
        }
        for key in ("output_tokens_per_s", "ttft_p50_ms", "itl_p99_ms")
    }
    say_where(path, report.save_plot(path.with_suffix(".png"), panels))


SERVING_COLUMNS = {
    "workload": "workload",
    "target": "target",
    "errors": "errors",
    "output_tokens_per_s": "out tok/s",
    "total_tokens_per_s": "all tok/s",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "TTFT p99",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "ITL p99",
    "tpot_p50_ms": "TPOT p50",
    "tpot_p99_ms": "TPOT p99",
    "cached_tokens": "cached",
    "goodput_requests_per_s": "goodput req/s",
    "goodput_share": "in SLO",
    "cost_per_million_output_tokens": "cost/M out",
}
