"""The README's figures: the newest results of a folder as tables and a plot, between two markers.

It takes complete results only, with the machine's ceilings, the newest of each case, and invents nothing: what was not
measured is a dash.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import MIB
from ..errors import ConfigError
from .report import engine_panels, machine_line, names_of, percent, save_plot

BEGIN = "<!-- figures: made by `tokenmill bench report` from bench/results -->"
END = "<!-- end of figures -->"
PLOT = "figures.png"
WHOLE = 4  # a model with so many cases has a table of its own


def newest_results(
    folder: Path, kind: str, skip: Callable[[Path, str], None] = lambda path, why: None
) -> list[dict[str, Any]]:
    """The complete results of a folder, what was measured again replaced: of engine results one for each model, machine
    and set of engines, with the newest row of each case; of serving results the newest. The first measured first.

    `skip` is told of each file of that kind that is left out, and why. Raises ConfigError for one that is not JSON.
    """
    found = []
    for path in sorted(folder.glob(f"{kind}-*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise ConfigError(f"{path} is not JSON") from None
        if why := _unusable(result, kind):
            skip(path, why)
        else:
            found.append((path, result))
    found.sort(key=lambda pair: pair[1]["machine"]["started"])
    newest: dict[Any, dict[str, Any]] = {}
    cases: dict[tuple[Any, Any], Path] = {}  # which file's row of a case stands
    for path, result in found:
        key: Any = kind
        if kind == "engine":
            machine = result["machine"]
            key = (result["model"], machine.get("cpu"), machine.get("cores"), *names_of(result["medians"][0]))
        newest[key] = _with_older(result, newest.get(key)) if kind == "engine" else result
        cases |= {(key, row.get("case")): path for row in result["medians"]}
    for path, _ in found:
        if path not in cases.values():
            skip(path, "a newer one is there")
    return list(newest.values())


def _with_older(result: dict[str, Any], older: dict[str, Any] | None) -> dict[str, Any]:
    """`result` and, of an older one, the cases that were not measured again."""
    if older is None:
        return result
    mine = {row["case"]: row for row in result["medians"]}
    order = [row["case"] for row in older["medians"]]
    kept = {row["case"]: row for row in older["medians"]} | mine
    merged = {**result, "medians": [kept[case] for case in (*order, *(case for case in mine if case not in order))]}
    for key in ("rounds", "ceilings"):
        merged[key] = [row for row in older[key] if row.get("case") not in mine] + result[key]
    return merged


def _unusable(result: Any, kind: str) -> str | None:
    """Why a file cannot stand in the README."""
    if not isinstance(result, dict) or result.get("kind") != kind:
        return f"it is no {kind} result"
    missing = [key for key in ("machine", "medians", "rounds") if not result.get(key)]
    if missing or not isinstance(result["machine"], dict) or "started" not in result["machine"]:
        return f"it has no {missing[0] if missing else 'time'}"
    if not result.get("ceilings"):
        return "it has no ceilings of the machine to hold figures against"
    if "complete" not in result:
        return "it is of an older format"
    return None if result["complete"] else "its run was cut short: go on with --resume"


def engine_section(results: list[dict[str, Any]]) -> str:
    """A caption and a Markdown table: one model's cases, or of several the few that each has."""
    peers = list(dict.fromkeys(name for result in results for name in names_of(result["medians"][0])[1:]))
    head = ["tokens/s", "limit", "tokenmill", *(part for name in peers for part in (name, "ratio")), "share of limit"]
    lines = [_caption(results, peers), "", _line(head), _line(["---"] + ["---:"] * (len(head) - 1))]
    for result in results:
        prefix = f"{result['model']}: " if len(results) > 1 else ""
        lines += [_row(prefix, row, peers) for row in result["medians"]]
    return "\n".join(lines)


def _caption(results: list[dict[str, Any]], peers: list[str]) -> str:
    counts: dict[tuple[int, str], int] = {}
    for number, result in enumerate(results):
        for row in result["rounds"]:
            counts[number, row["case"]] = max(counts.get((number, row["case"]), 0), row["round"] + 1)
    low, high = min(counts.values()), max(counts.values())
    rounds = f"{low} to {high}" if low < high else high
    day = results[-1]["machine"]["started"][:10]
    everything = {**results[-1], "ceilings": [row for result in results for row in result["ceilings"]]}
    what = f"{results[0]['model']} on" if len(results) == 1 else "Other models and formats, on"
    same = "the same file" if len(results) > 1 else None
    beside = "".join(f"; {_peer(name, results, same)}" for name in peers)
    return f"{what} {machine_line(everything)}. Medians of {rounds} interleaved rounds, {day}{beside}."


def _peer(name: str, results: list[dict[str, Any]], same: str | None) -> str:
    with_it = [result for result in results if name in result["peers"]]
    peers = [result["peers"][name] for result in with_it]
    if any(peer["format"] != result["format"] for peer, result in zip(peers, with_it)):
        same = None
    how = (
        ""
        if all(peer.get("repack", True) for peer in peers)
        else ", without repacking (its repacked kernels die on this machine)"
    )
    versions = ", ".join(dict.fromkeys(peer["version"] for peer in peers))
    return f"{name} is llama-cpp-python {versions} on {same or peers[0]['format']}{how}"


def _row(prefix: str, row: dict[str, Any], peers: list[str]) -> str:
    cells = [prefix + row["case"], _number(row.get("limit")), _number(row.get("tokenmill"))]
    for name in peers:
        ratio = row.get(f"ratio to {name}")
        cells += [_number(row.get(name)), f"{ratio:.1f}" if ratio else "-"]
    cells.append(percent(row.get("share")) or "-")
    losses = [(name, row.get(f"loss {name}")) for name in ("tokenmill", *peers)]
    if any(loss is not None for _, loss in losses):
        cells[0] += "; loss: " + ", ".join(f"{name} {percent(loss) or '-'}" for name, loss in losses)
    return _line(cells)


SERVED = {
    "output_tokens_per_s": "output tokens/s",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "TTFT p99",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "ITL p99",
    "errors": "errors",
}


def serving_section(result: dict[str, Any]) -> str:
    """A row for each workload and target; after a peer's figure stands how many times better ours is."""
    ratios = {(row["workload"], row["against"]): row for row in result.get("ratios", ())}
    lines = [_serving_caption(result), "", _line(["workload", "server", *SERVED.values()])]
    lines.append(_line(["---", "---"] + ["---:"] * len(SERVED)))
    for row in result["medians"]:
        better = ratios.get((row["workload"], row["target"]), {})
        cells = [
            _number(row.get(key)) + (f" ({better[key]:.1f}x)" if better.get(key) is not None else "") for key in SERVED
        ]
        lines.append(_line([row["workload"], row["target"], *cells]))
    return "\n".join(lines)


def _serving_caption(result: dict[str, Any]) -> str:
    servers = result.get("servers", {})
    models = ", ".join(dict.fromkeys(about["model"] for about in servers.values())) or "A server"
    rounds = max((row["round"] for row in result["rounds"]), default=0) + 1
    beside = "".join(
        f"; {name} is version {about['version']} with {about['flags']}"
        for name, about in servers.items()
        if "version" in about
    )
    memory = ", ".join(
        f"{name} {size / MIB:,.0f} MiB" for name, size in result.get("peak_memory_bytes", {}).items() if size
    )
    return (
        f"{models} served on {machine_line(result)}. Medians of {rounds} interleaved rounds, "
        f"{result['machine']['started'][:10]}{beside}; times in ms, in brackets how many times better tokenmill is."
        + (f" Resident at most: {memory}." if memory else "")
    )


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def figures(folder: Path, link: str) -> str:
    """What stands between the markers: tables, and the plot where there is one. `link`: the folder, from the README."""
    engines, served = newest_results(folder, "engine"), newest_results(folder, "serving")
    if not engines and not served:
        return "No figures yet: `make bench` measures them."
    whole = [result for result in engines if len(result["medians"]) >= WHOLE]
    few = [result for result in engines if result not in whole]
    parts = [engine_section([result]) for result in whole] + ([engine_section(few)] if few else [])
    parts += [serving_section(result) for result in served]
    if (folder / PLOT).exists():
        parts.insert(min(1, len(engines)), f"![tokens a second, beside the machine's limits]({link}/{PLOT})")
    return "\n\n".join(parts)


def with_figures(text: str, new: str) -> str:
    """`text` with `new` between its markers. Raises ConfigError where they are not there once."""
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.S)
    if len(pattern.findall(text)) != 1:
        raise ConfigError(f"the file must have the lines {BEGIN} and {END}, once")
    return pattern.sub(lambda match: f"{BEGIN}\n{new}\n{END}", text)


def update_readme(
    readme: Path, folder: Path, skip: Callable[[Path, str], None] = lambda path, why: None
) -> tuple[bool, Path | None]:
    """(whether it changed, the plot). Raises ConfigError, the file untouched, where `folder` has no usable result."""
    text = readme.read_text(encoding="utf-8")
    try:
        with_figures(text, "")
    except ConfigError as error:
        raise ConfigError(f"{readme}: {error}") from None
    engines, served = (newest_results(folder, kind, skip) for kind in ("engine", "serving"))
    if not engines and not served:
        raise ConfigError(f"no results in {folder} that can be shown: {readme} stays as it is")
    plotted = max(engines, key=lambda result: len(result["medians"]), default=None)
    plot = save_plot(folder / PLOT, engine_panels(plotted)) if plotted else None
    try:
        link = folder.resolve().relative_to(readme.resolve().parent).as_posix()
    except ValueError:
        link = folder.resolve().as_posix()
    new = with_figures(text, figures(folder, link))
    if new != text:
        readme.write_text(new, encoding="utf-8")
    return new != text, plot
