"""What a benchmark leaves behind: a JSON file, a table and a plot."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from ..errors import ConfigError


def result_path(directory: Path, kind: str) -> Path:
    """<directory>/<kind>-<time>.json, never an older file's. Makes the directory.

    Raises ConfigError where nothing can be written: before anything is measured in vain.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise ConfigError(f"--output-dir {directory} cannot be written: {error.strerror}") from None
    stem = f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = directory / f"{stem}.json", 1
    while path.exists():
        path, number = directory / f"{stem}-{number}.json", number + 1
    return path


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Whole or not at all, so that a run that is killed leaves the last state it saved."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def format_value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def print_table(title: str, rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """Rows as a table; `columns` maps a row's key to its heading. Columns that no row has are left out."""
    from rich.console import Console
    from rich.table import Table

    shown = {key: heading for key, heading in columns.items() if any(row.get(key) is not None for row in rows)}
    table = Table()
    for key, heading in shown.items():
        is_text = any(isinstance(row.get(key), str) for row in rows)
        table.add_column(heading, justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*(format_value(row.get(key)) for key in shown))
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(120, len(title) + 4, sum(len(h) + 8 for h in shown.values())))
    console.print(title, highlight=False, markup=False)
    console.print(table)


def percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.0f}%"


def names_of(row: dict[str, Any]) -> list[str]:
    """The engines of a row of medians: ours, then the peers."""
    return ["tokenmill", *(key.removeprefix("ratio to ") for key in row if key.startswith("ratio to "))]


def print_engine(result: dict[str, Any]) -> None:
    rows = [
        {key: percent(value) if key.startswith(("share", "loss")) else value for key, value in row.items()}
        for row in result["medians"]
    ]
    columns = {key: key for row in rows for key in row if key != "panel"}
    print_table(f"{result['model']} on {machine_line(result)}; tokens/s", rows, columns | {"share": "share of limit"})


def machine_line(result: dict[str, Any]) -> str:
    """The machine with its ceilings: the middle of what was measured during the run."""
    from .machine import Ceilings, middle

    machine, measured = result["machine"], result["ceilings"]
    keys = ("read_bytes", "float_ops", "int8_ops", "isa", "recipe")
    ceilings = [
        Ceilings(*(row[key] for key in keys)) for row in ([measured] if isinstance(measured, dict) else measured)
    ]
    isa = f" ({ceilings[0].isa})" if ceilings[0].isa else ""
    return f"{machine['cores']} cores of {machine['cpu']}{isa}: {middle(ceilings)}"


def engine_panels(result: dict[str, Any]) -> dict[str, dict[str, dict[str, float | None]]]:
    """For save_plot: a panel for each kind of case, a group of bars for each case: the limit and each engine."""
    panels: dict[str, dict[str, dict[str, float | None]]] = {}
    for row in result["medians"]:
        label = (
            row["case"]
            .removeprefix("decode")
            .removeprefix("prefill")
            .lstrip(", ")
            .replace(" tokens", "\ntokens")
            .replace(": ", ":\n")
        )
        for name in ("limit", *names_of(row)):
            if row.get(name) is not None:
                panel = panels.setdefault(f"{row.get('panel', row['case'])}, tokens/s", {})
                panel.setdefault(name, {})[label] = row[name]
    return panels


def print_kernels(result: dict[str, Any]) -> None:
    columns = {"op": "op", "what": "", "count": "n", "us": "µs each", "of_step": "of step"}
    columns |= {"gbs": "GB/s", "gops": "Gop/s", "share": "of ceiling"}
    for step in result["steps"]:
        rows = [{**row, "of_step": percent(row["of_step"]), "share": percent(row.get("share"))} for row in step["ops"]]
        beside = {key: key.replace(" us", ", µs") for key in rows[0] if key.endswith(" us") or key.startswith("times ")}
        print_table(f"{result['model']}, {step['name']}, on {machine_line(result)}", rows, columns | beside)


def save_plot(path: Path, panels: dict[str, dict[str, dict[str, float | None]]]) -> Path | None:
    """Grouped bars, a panel each: {panel: {series: {group: value}}}. None where matplotlib is not installed.

    A series has one colour in all panels; one called "limit" is drawn as an outline.
    """
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    colours = {name: f"C{i}" for i, name in enumerate(name for name in names if name != "limit")}
    groups_of = {
        title: list(dict.fromkeys(group for values in series.values() for group in values))
        for title, series in panels.items()
    }
    widths = [max(3, len(groups_of[title]) * len(series) * 0.36) for title, series in panels.items()]
    figure, axes = plt.subplots(1, len(panels), figsize=(sum(widths), 3.6), squeeze=False, width_ratios=widths)
    for axis, (title, series) in zip(axes[0], panels.items()):
        groups = groups_of[title]
        width = 0.85 / len(series)
        for i, (name, values) in enumerate(series.items()):
            places = [g + (i - (len(series) - 1) / 2) * width for g in range(len(groups))]
            look = {"color": "none", "edgecolor": "grey"} if name == "limit" else {"color": colours[name]}
            bars = axis.bar(places, [values.get(group) or 0 for group in groups], width, label=name, **look)
            labels = [f"{v:,.0f}" if v >= 100 else f"{v:.3g}" for v in (values.get(group) or 0 for group in groups)]
            axis.bar_label(bars, labels, fontsize=6)
        axis.set_xticks(range(len(groups)), groups, fontsize=8)
        axis.tick_params(axis="y", labelsize=8)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
