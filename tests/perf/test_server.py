"""What a server takes: memory under load, processor time with nothing to do, and its start beside what it imports."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.api.server import Server, serving

from .race import race, timed

MIB = 1 << 20
KV_BYTES = 64 * MIB
IDLE_SECONDS = 3.0


def peak_bytes(pid: int) -> int:
    """The most memory the process ever had, shared libraries and mapped files included."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) * 1024


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def server(smollm2_path):
    with serving(smollm2_path, "--kv-cache-bytes", str(KV_BYTES)) as server:
        yield server


def test_peak_memory_is_the_weights_the_cache_and_150_megabytes(server):
    """Both processes together, after steps of 512 tokens and of 16 sequences.

    A plain install is also within 1.25 x weights + cache + 150 MB; an editable one takes 6 MB more in each process.
    """
    found = re.search(r"weights (\d+) MiB, kv (\d+) MiB", server.log)
    assert found, server.log
    weights, kv = (int(size) * MIB for size in found.groups())
    assert kv == KV_BYTES

    async def load() -> None:
        async with server.async_openai() as client:

            async def ask(number: int, words: int) -> None:
                prompt = f"{number}" + " word" * words
                await client.completions.create(model=server.model, prompt=prompt, max_tokens=5, temperature=1)

            await asyncio.gather(ask(0, 1000), *[ask(number, 20) for number in range(1, 16)])

    asyncio.run(load())
    peak, limit = peak_bytes(server.process.pid) + peak_bytes(server.engine_pid()), 1.25 * (weights + kv) + 150e6
    print(f"{peak / MIB:.0f} of {limit / MIB:.0f} MiB", end=" ")
    assert peak <= limit


def test_a_loaded_model_with_nothing_to_do_takes_no_processor_time(server):
    pids = (server.process.pid, server.engine_pid())
    time.sleep(0.5)  # what follows an answer is over
    before = sum(map(cpu_seconds, pids))
    time.sleep(IDLE_SECONDS)
    assert sum(map(cpu_seconds, pids)) - before <= 0.01 * IDLE_SECONDS


def test_a_start_to_the_first_token_against_importing_what_it_needs(smollm2_path):
    """Yardstick: a process that imports the libraries of a server, and one after it those of an engine."""

    def libraries() -> None:
        for names in ("asyncio, click, jinja2, msgspec, numpy, starlette.applications, tokenizers, uvicorn", "numpy"):
            subprocess.run([sys.executable, "-c", f"import {names}"], check=True)

    def start() -> float:
        began = time.perf_counter()
        server = Server(smollm2_path)
        server.chat("x", max_tokens=1)
        seconds = time.perf_counter() - began
        server.stop()
        return seconds

    assert race(timed(libraries), start, floor=0.25, rounds=3) >= 0.25
