"""`tokenmill bench engine, throughput, latency, kernels, model, report`: the commands that need no server."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..bench.cases import Case
from ..config import EngineConfig
from ..errors import ConfigError
from .bench_common import RESULTS, fetched, output_dir, progress_lines, quiet, reporting, say_where, warn_if_busy
from .options import config_from, options_of
from .progress import download_progress

NOT_ASKED = ("model", "seed", "enable_prefix_caching")  # settings that a benchmark decides itself


def _in_process(function: Callable) -> Callable:
    """Options of the commands that run an engine beside others."""
    function = options_of(EngineConfig, skip=NOT_ASKED)(function)
    for option in (
        click.option("--peer-python", metavar="PATH", help="Interpreter that has the peer. Default: this one."),
        click.option(
            "--peer-model",
            "peer_models",
            multiple=True,
            metavar="FILE",
            help="GGUF file for the peer, for instance in its best format; `same` is ours. Each one is a column.",
        ),
        click.option("--against", multiple=True, metavar="PEER", help="Measure beside a peer: llama-cpp."),
        click.option(
            "--resume",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="Go on with the result file of a run that was cut short: model, cases, rounds and settings are in it.",
        ),
    ):
        function = option(function)
    return reporting(click.argument("model", required=False)(function))


def _run(kind: str, cases: list[Case], values: dict[str, Any]) -> None:
    from ..bench import engine, report

    config = config_from(EngineConfig, values)
    run = {
        "model": config.model,
        "cases": [asdict(case) for case in cases],
        **{key: values[key] for key in ("against", "peer_models", "peer_python", "repeat", "bench_seed")},
        "settings": {key: value for key, value in asdict(config).items() if key not in NOT_ASKED},
    }
    earlier = None
    path = values["resume"] or report.result_path(values["output_dir"], kind)
    if values["resume"]:
        earlier = _earlier(path, kind)
        run = _as_begun(path, earlier["run"], run)
        config, cases = EngineConfig(model=run["model"], **run["settings"]), [Case(**case) for case in run["cases"]]
        if earlier["complete"]:
            click.echo(f"{path} is complete, nothing to do")
            return

    def save(result: dict) -> None:
        report.write_json(path, {"kind": kind, "run": run, **result})

    try:
        result = engine.run_engine_bench(
            fetched(config),
            cases,
            against=run["against"],
            peer_models=run["peer_models"],
            peer_python=run["peer_python"] or sys.executable,
            repeat=run["repeat"],
            seed=run["bench_seed"],
            earlier=earlier,
            progress=progress_lines(values["quiet"]),
            save=save,
        )
    except KeyboardInterrupt:
        kept = (
            f"what was measured is in {path}; go on with --resume {path}" if path.exists() else "nothing measured yet"
        )
        click.echo(f"interrupted: {kept}", err=True)
        raise SystemExit(130) from None
    save(result)
    warn_if_busy(result["machine"])
    report.print_engine(result)
    say_where(path, report.save_plot(path.with_suffix(".png"), report.engine_panels(result)))


def _earlier(path: Path, kind: str) -> dict[str, Any]:
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if {"run", "rounds", "ceilings", "model_digest", "peers", "complete"} - earlier.keys():
            raise ValueError
    except (ValueError, AttributeError):
        raise ConfigError(f"--resume {path}: not the result of an engine benchmark") from None
    if earlier["kind"] != kind:
        raise ConfigError(f"--resume {path}: it is the result of bench {earlier['kind']}, not of bench {kind}")
    return earlier


def _as_begun(path: Path, begun: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """The run as its file has it; the model and the peer's interpreter may be elsewhere now. Raises ConfigError."""
    context = click.get_current_context()

    def is_given(name: str) -> bool:
        return context.get_parameter_source(name) is ParameterSource.COMMANDLINE

    options = {"repeat": "repeat", "bench_seed": "seed", "against": "against", "peer_models": "peer-model"}
    for key, option in options.items():
        before, now = (list(v) if isinstance(v, tuple) else v for v in (begun[key], asked[key]))
        if is_given(key) and now != before:
            raise ConfigError(f"--{option}: {path} was begun with {before}; a run goes on as it was begun")
    for key, value in begun["settings"].items():
        if is_given(key) and asked["settings"][key] != value:
            option = key.replace("_", "-")
            raise ConfigError(f"--{option}: {path} was begun with {value}; a run goes on as it was begun")
    of_cases = [name for name in ("only", "full", "streams", "input_tokens", "output_tokens") if is_given(name)]
    if of_cases and asked["cases"] != begun["cases"]:
        names = "; ".join(case["name"] for case in begun["cases"])
        raise ConfigError(f"--{of_cases[0].replace('_', '-')}: {path} was begun with the cases {names}")
    return begun | {key: asked[key] for key in ("model", "peer_python") if is_given(key)}


@click.command()
@click.option("--streams", type=click.IntRange(1), default=16, show_default=True, help="Requests sent at once.")
@click.option("--input-tokens", type=click.IntRange(1), default=128, show_default=True, help="Of each prompt.")
@click.option("--output-tokens", type=click.IntRange(2), default=128, show_default=True, help="Of each answer.")
@_in_process
def throughput(**values: Any) -> None:
    """Total tokens/s (prompt and output) of many streams at once."""
    from ..bench.cases import streams_case

    _run("throughput", [streams_case(values["streams"], values["input_tokens"], values["output_tokens"])], values)


@click.command()
@_in_process
def latency(**values: Any) -> None:
    """One stream: decode tokens/s, and prefill tokens/s of 512 and 2,048 tokens."""
    from ..bench.cases import LATENCY

    _run("latency", LATENCY, values)


@click.command("engine")
@click.option("--full", is_flag=True, help="Also contexts and prompts of 8,000 tokens, and 4, 8, 32 and 64 streams.")
@click.option("--only", multiple=True, metavar="TEXT", help="Only cases whose name has TEXT in it; may be repeated.")
@_in_process
def engine_command(**values: Any) -> None:
    """Decode at short and long contexts, prefill, many streams, both in the same steps: the engine in one table.

    Each rate beside the limit that the machine's ceilings, measured in the same minute, set for this model's bytes and
    operations. A run that is cut short keeps what it measured: --resume FILE goes on.
    """
    from ..bench.cases import FULL, QUICK

    cases = FULL if values["full"] else QUICK
    if values["only"]:
        cases = [case for case in FULL if any(text in case.name for text in values["only"])]
        if not cases:
            raise ConfigError(f"--only {' '.join(values['only'])}: the cases are {'; '.join(c.name for c in FULL)}")
    _run("engine", cases, values)


@click.command()
@click.argument("model", required=False)
@click.option("--tokens", default="1,16,512", show_default=True, help="Sizes of a step; up to 64 are so many streams.")
@click.option("--context", type=click.IntRange(1), default=512, show_default=True, help="Tokens each stream has.")
@click.option("--repeat", type=click.IntRange(1), default=15, show_default=True, help="Steps of each size, at most.")
@click.option("--against", multiple=True, metavar="ISA", help="Beside another instruction set: plain, avx2 ...")
@quiet
@output_dir
@options_of(EngineConfig, skip=NOT_ASKED)
def kernels(**values: Any) -> None:
    """Where a step's time goes: each distinct op, µs, GB/s, Gop/s, share of its ceiling. The profile of an engine."""
    from ..bench import report
    from ..bench.kernels import run_kernel_bench

    try:
        tokens = [int(text) for text in values["tokens"].split(",")]
    except ValueError:
        raise ConfigError(f"--tokens is {values['tokens']!r}; expected numbers, as 1,16,512") from None
    path = report.result_path(values["output_dir"], "kernels")
    result = run_kernel_bench(
        replace(fetched(config_from(EngineConfig, values)), enable_prefix_caching=False),
        tokens=tokens,
        context=values["context"],
        repeat=values["repeat"],
        against=values["against"],
        progress=progress_lines(values["quiet"]),
    )
    report.write_json(path, {"kind": "kernels", **result})
    warn_if_busy(result["machine"])
    report.print_kernels(result)
    click.echo(f"written: {path}")


@click.command("model")
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--like", default="llama-1.1b", show_default=True, help="Whose shape: smollm2-135m or llama-1.1b.")
@click.option("--format", "format_", default="Q4_0", show_default=True, help="Q4_0, Q4_1, Q4_K, Q8_0 or F16.")
@click.option("--seed", "bench_seed", type=click.IntRange(0), default=0, show_default=True, help="Of the weights.")
@click.option("--force", is_flag=True, help="Write over a file that is there.")
def model_command(output: Path, like: str, format_: str, bench_seed: int, force: bool) -> None:
    """Write OUTPUT, a GGUF file of random weights: as fast and as large as a real model, and saying nothing."""
    from ..bench.random_model import write_random_model

    if output.exists() and not force:
        raise ConfigError(f"{output} is there already; --force writes over it")
    with download_progress() as progress:
        size = write_random_model(output, like, format_, seed=bench_seed, progress=progress)
    click.echo(f"written: {output}, {size / 1e6:,.0f} MB")


@click.command("report")
@click.argument("results", type=click.Path(exists=True, file_okay=False, path_type=Path), default=RESULTS)
@click.option(
    "--readme",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=Path("README.md"),
    show_default=True,
    help="The file that has the markers.",
)
def report_command(results: Path, readme: Path) -> None:
    """Put the newest figures of RESULTS (bench/results) into the README, between its two markers, and plot them."""
    from ..bench.readme import update_readme

    def skipped(path: Path, why: str) -> None:
        click.echo(f"left out: {path}: {why}", err=True)

    changed, plot = update_readme(readme, results, skipped)
    click.echo(f"{readme}: {'written anew' if changed else 'already says so'}" + (f"; {plot}" if plot else ""))


COMMANDS = (engine_command, throughput, latency, kernels, model_command, report_command)
