"""What a benchmark leaves behind: a JSON file, a table and a plot. It knows rows and columns, not what they mean."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


def write_json(directory: Path, kind: str, result: dict[str, Any]) -> Path:
    """result as <directory>/<kind>-<time>.json, never over an older one."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = directory / f"{stem}.json", 1
    while path.exists():
        path, number = directory / f"{stem}-{number}.json", number + 1
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


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


def save_plot(path: Path, panels: dict[str, dict[str, dict[str, float | None]]]) -> Path | None:
    """Grouped bars, a panel each: {panel: {series: {group: value}}}. None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 3.6), squeeze=False)
    for axis, (title, series) in zip(axes[0], panels.items()):
        groups = list(dict.fromkeys(group for values in series.values() for group in values))
        width = 0.8 / len(series)
        for i, (name, values) in enumerate(series.items()):
            places = [g + (i - (len(series) - 1) / 2) * width for g in range(len(groups))]
            bars = axis.bar(places, [values.get(group) or 0 for group in groups], width, label=name)
            axis.bar_label(bars, fmt="%.4g", fontsize=7)
        axis.set_xticks(range(len(groups)), groups, fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
