"""Thousands of damaged files, opened in a process of 1 GB: a model or a ModelFileError, no signal, no long wait."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.support.checkpoints import gguf_file, hf_folder
from tests.support.gguf_writer import edit_gguf

CHILD = """
import json, random, resource, struct, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from tokenmill.errors import ModelFileError
from tokenmill.weights.loader import open_checkpoint

kind, source, target, header, rounds, seed = sys.argv[1:]
whole = Path(source).read_bytes()
target, header, rng = Path(target), int(header), random.Random(int(seed))
opened, slowest = 0, 0.0
for _ in range(int(rounds)):
    damaged = bytearray(whole)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(header)
        kind_of_damage = rng.randrange(4)
        if kind_of_damage == 0:
            damaged[at] ^= 1 << rng.randrange(8)
        elif kind_of_damage == 1:
            damaged[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind_of_damage == 2:
            big = rng.choice((1 << 63, (1 << 64) - 1, 1 << 32, 1 << 31, (1 << 31) - 1, len(whole)))
            damaged[at : at + 8] = struct.pack("<Q", big)
        else:
            del damaged[at : at + rng.randrange(1, 40)]
    target.write_bytes(damaged)
    started = time.perf_counter()
    try:
        checkpoint = open_checkpoint(target if kind == "gguf" else target.parent)
        for key in checkpoint.metadata:
            checkpoint.metadata[key]
        checkpoint.digest
        opened += 1
    except ModelFileError as e:
        assert str(e)
    slowest = max(slowest, time.perf_counter() - started)
peak = int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
print(json.dumps({"opened": opened, "slowest": slowest, "peak_mb": peak / 1024}))
"""


def fuzz(kind, source, target, header, rounds, seed=1):
    command = [sys.executable, "-c", CHILD, kind, source, target, header, rounds, seed]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("tokenizer", [True, False])
def test_damaged_gguf(tmp_path, tokenizer):
    """With its tokenizer most of the header is strings, without most of it is numbers."""
    from tokenmill.weights.gguf import GGUFFile

    source = gguf_file(tmp_path / "m.gguf", "llama", hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    if not tokenizer:
        keys = tuple(key for key in GGUFFile(source).metadata if key.startswith("tokenizer"))
        edit_gguf(source, source, remove=keys)
    header = GGUFFile(source).header_end
    result = fuzz("gguf", source, tmp_path / "damaged.gguf", header, 5000)
    assert result["slowest"] < 1 and result["peak_mb"] < 300
    assert 0 < result["opened"] < 4000


def test_damaged_safetensors(tmp_path):
    folder = hf_folder(tmp_path / "m", "llama", hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    source = tmp_path / "whole"
    (folder / "model.safetensors").rename(source)
    header = 8 + int(np.fromfile(source, "<u8", 1)[0])
    result = fuzz("hf", source, folder / "model.safetensors", header, 3000)
    assert result["slowest"] < 1 and result["peak_mb"] < 300
    assert 0 < result["opened"] < 2400
