"""`tokenmill bench`: throughput and latency of the engine in this process, and serving over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..config import EngineConfig
from ..errors import ConfigError
from .options import config_from, options_of


@click.group()
def bench() -> None:
    """Measure: each figure is the median of --repeat rounds, interleaved A B B A with whatever it is compared to.

    throughput, latency and engine run the model in this process (token ids in, token ids out); serving drives any
    OpenAI-compatible server. Each writes a JSON file, prints a table and saves a plot (the plot needs the extra
    `bench`: pip install 'tokenmill[bench]').
    """


def _reporting(function: Callable) -> Callable:
    for option in (
        click.option("--quiet", is_flag=True, help="No progress lines."),
        click.option(
            "--output-dir",
            type=click.Path(file_okay=False, path_type=Path),
            default=Path("bench/results"),
            show_default=True,
            help="Where the JSON file and the plot go.",
        ),
        click.option("--seed", "bench_seed", type=int, default=1, show_default=True, help="Of the prompts."),
        click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Rounds."),
    ):
        function = option(function)
    return function


def _in_process(function: Callable) -> Callable:
    """Options of the commands that load the model themselves."""
    function = options_of(EngineConfig, skip=("model", "seed", "enable_prefix_caching"))(function)
    function = click.option("--peer-python", metavar="PATH", help="Interpreter that has the peer. Default: this one.")(
        function
    )
    function = click.option(
        "--against", multiple=True, metavar="PEER", help="Measure beside a peer on the same file: llama-cpp."
    )(function)
    return _reporting(click.argument("model", required=False)(function))


def _progress(quiet: bool) -> Callable[[str], None]:
    return (lambda text: None) if quiet else (lambda text: click.echo(f"· {text}", err=True))


def _run_in_process(kind: str, cases: list, values: dict[str, Any]) -> None:
    import sys

    from ..bench import engine, report

    result = engine.run_engine_bench(
        config_from(EngineConfig, values),
        cases,
        against=list(values["against"]),
        peer_python=values["peer_python"] or sys.executable,
        repeat=values["repeat"],
        seed=values["bench_seed"],
        progress=_progress(values["quiet"]),
    )
    rows = result["medians"]
    path = report.write_json(values["output_dir"], kind, {"kind": kind, **result})
    machine = result["machine"]
    _warn_if_busy(machine)
    bandwidth = result["bandwidth_bytes_per_s"] / 1e9
    report.print_table(
        f"{result['model']} on {machine['cores']} cores of {machine['cpu']}, {bandwidth:.1f} GB/s read; tokens/s",
        rows,
        {key: key for row in rows for key in row},
    )
    names = [key for key in rows[0] if key != "case" and not key.startswith("ratio")]
    panels = {row["case"]: {name: {"tokens/s": row[name]} for name in names} for row in rows}
    _say_where(path, report.save_plot(path.with_suffix(".png"), panels))


def _warn_if_busy(machine: dict[str, Any]) -> None:
    """Of the load before the run: figures of a busy machine say little."""
    load = (machine["load_average"] or [0.0])[0]
    if load > 0.5 * machine["cores"]:
        click.echo(f"warning: load average {load:.1f} on {machine['cores']} cores: trust ratios, if anything", err=True)


def _say_where(path: Path, plot: Path | None) -> None:
    click.echo(f"written: {path}" + (f", {plot}" if plot else " (no plot: pip install 'tokenmill[bench]')"))


@bench.command()
@click.option("--streams", type=click.IntRange(1), default=16, show_default=True, help="Requests sent at once.")
@click.option("--input-tokens", type=click.IntRange(1), default=128, show_default=True, help="Of each prompt.")
@click.option("--output-tokens", type=click.IntRange(2), default=128, show_default=True, help="Of each answer.")
@_in_process
def throughput(**values: Any) -> None:
    """Total tokens/s (prompt and output) of many streams at once."""
    from ..bench.engine import streams_case

    case = streams_case(values["streams"], values["input_tokens"], values["output_tokens"])
    _run_in_process("throughput", [case], values)


@bench.command()
@_in_process
def latency(**values: Any) -> None:
    """One stream: decode tokens/s, and prefill tokens/s of 512 and 2,048 tokens."""
    from ..bench.engine import DECODE, PREFILL_512, PREFILL_2048

    _run_in_process("latency", [DECODE, PREFILL_512, PREFILL_2048], values)


@bench.command("engine")
@click.option("--streams", type=click.IntRange(1), default=16, show_default=True, help="Of the many-streams case.")
@_in_process
def engine_command(**values: Any) -> None:
    """Decode, prefill 512 and 2,048, and many streams of 128+128: the whole engine in one table."""
    from ..bench.engine import DECODE, PREFILL_512, PREFILL_2048, streams_case

    cases = [DECODE, PREFILL_512, PREFILL_2048, streams_case(values["streams"], 128, 128)]
    _run_in_process("engine", cases, values)


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
@_reporting
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
    result = run_serving(options, _progress(values["quiet"]))
    settings = {
        key: value for key, value in values.items() if key not in ("api_key", "quiet") and not isinstance(value, Path)
    }
    rows = result["medians"]
    path = report.write_json(
        values["output_dir"], "serving", {"kind": "serving", "machine": describe(), "settings": settings, **result}
    )
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
    _say_where(path, report.save_plot(path.with_suffix(".png"), panels))


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
