"""`tokenmill bench`: the engine in this process, and serving over HTTP, alone or against others."""

from __future__ import annotations

import click

from . import bench_engine, bench_serving


@click.group()
def bench() -> None:
    """Measure: each figure is the median of --repeat rounds, interleaved A B B A with whatever it is compared to.

    engine, throughput, latency and kernels run the model in this process (token ids in, token ids out); serving drives
    any OpenAI-compatible server. Each writes a JSON file and prints a table; report makes the README's table and plot
    of the files. Plots need the extra `bench`: pip install 'tokenmill[bench]'.
    """


for command in (*bench_engine.COMMANDS, *bench_serving.COMMANDS):
    bench.add_command(command)
