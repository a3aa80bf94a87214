"""What the benchmark commands share: options, progress lines, and where the results went."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..config import EngineConfig

RESULTS = Path("bench/results")


def output_dir(function: Callable) -> Callable:
    return click.option(
        "--output-dir",
        type=click.Path(file_okay=False, path_type=Path),
        default=RESULTS,
        show_default=True,
        help="Where the JSON file and the plot go.",
    )(function)


def quiet(function: Callable) -> Callable:
    return click.option("--quiet", is_flag=True, help="No progress lines.")(function)


def reporting(function: Callable) -> Callable:
    function = output_dir(quiet(function))
    function = click.option("--seed", "bench_seed", type=int, default=1, show_default=True, help="Of the prompts.")(
        function
    )
    return click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Rounds.")(function)


def progress_lines(quiet: bool) -> Callable[[str], None]:
    return (lambda text: None) if quiet else (lambda text: click.echo(f"· {text}", err=True))


def fetched(config: EngineConfig) -> EngineConfig:
    """The config, its model on this machine: a download shows its own progress and is no part of what is measured."""
    from ..weights.sources import resolve
    from .progress import download_progress

    with download_progress() as progress:
        resolve(config.model, revision=config.revision, progress=progress)
    return config


def warn_if_busy(machine: dict[str, Any]) -> None:
    """Of the load before the run: figures of a busy machine say little."""
    load = (machine["load_average"] or [0.0])[0]
    if load > 0.5 * machine["cores"]:
        click.echo(f"warning: load average {load:.1f} on {machine['cores']} cores: trust ratios, if anything", err=True)


def say_where(path: Path, plot: Path | None) -> None:
    click.echo(f"written: {path}" + (f", {plot}" if plot else " (no plot: pip install matplotlib)"))
