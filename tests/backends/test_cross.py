"""Kernels without Python: those of this machine natively, NEON's cross-compiled and run under an emulator.

The slow one needs Debian's g++-aarch64-linux-gnu and qemu-user-static; without them it fails and says so.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from tokenmill.backends.cpu import _native

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "src" / "tokenmill" / "backends" / "cpu" / "csrc"
KERNEL_FLAGS = ["-std=c++20", "-O2", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", f"-I{CSRC}"]
ISA_FLAGS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"],
    "neon": ["-march=armv8.2-a+dotprod+fp16"],
    "plain": [],
}


def build(folder: Path, compiler: str, isas: list[str], *link: str) -> Path:
    objects = []
    for isa in isas:
        objects.append(folder / f"{isa}.o")
        command = [compiler, *KERNEL_FLAGS, *ISA_FLAGS[isa], f"-DTM_ISA={isa}", "-c", CSRC / "kernels.cpp"]
        subprocess.run([*command, "-o", objects[-1]], check=True)
    program = folder / "check"
    have = [f"-DTM_HAVE_{isa.upper()}" for isa in isas]
    sources = [HERE / "check_kernels.cpp", CSRC / "pack.cpp", CSRC / "dispatch.cpp"]
    subprocess.run([compiler, *KERNEL_FLAGS, *have, *sources, *objects, *link, "-o", program], check=True)
    return program


def run(*command) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_this_machines_kernels_agree_with_plain_ones(tmp_path):
    isas = _native.instruction_sets()
    program = build(tmp_path, "g++", isas)
    for isa in isas:
        run(program, isa)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_neon_kernels_agree_with_plain_ones_under_an_emulator(tmp_path):
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
    assert compiler and emulator, "install g++-aarch64-linux-gnu and qemu-user-static (Debian)"
    program = build(tmp_path, compiler, ["plain", "neon"], "-static")
    run(emulator, program, "neon")
