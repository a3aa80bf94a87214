"""Small frozen configs, one a room, and resolve(): pure, printable, the only place where defaults are worked out.

Every setting has one name here, on the command line (--max-model-len) and in the environment (TOKENMILL_MAX_MODEL_LEN).
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from .errors import ConfigError

Decision = tuple[str, str]  # (what, which and why), printed once at start

MIB = 1 << 20
KV_CACHE_BYTES = {"float16": 2, "float32": 4}  # of one cached number
PAGE_SIZE = 16  # positions a KV page holds; the kernels' vector width


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: str = "smollm2-135m-instruct"
    revision: str | None = None  # for hf: references
    max_model_len: int | None = None  # tokens; None: what the model says, bounded by the KV memory
    kv_cache_bytes: int | None = None  # None: a quarter of free memory, at most what max_num_seqs can use
    max_num_seqs: int = 64  # sequences running at once
    max_num_batched_tokens: int = 512  # token budget of a step
    step_seconds: float = 0.05  # while answers are written, prompts are cut so that a step takes about so long
    max_waiting: int = 1024  # sequences queued; beyond it 429
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "float16"  # or float32: twice the memory, Transformers' logits to rounding
    num_threads: int | None = None  # None: the cores this process may use
    backend: str = "cpu"  # cpu; reference is the numpy specification, slow
    isa: str | None = None  # None: the best this machine has; plain, avx2, avx512, neon
    seed: int | None = None  # of requests without one; None: fresh

    def __post_init__(self) -> None:
        if not 0 < self.step_seconds < float("inf"):  # before it goes to the engine's process: JSON has no infinity
            raise ConfigError(f"step_seconds is {self.step_seconds}; it must be above 0 and finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    max_body_bytes: int = 8 * MIB
    max_n: int = 128  # choices of one request
    chat_template: str | None = None  # a file; replaces the model's own
    trust_request_chat_template: bool = False
    drain_seconds: float = 30.0  # how long SIGTERM waits for running requests
    max_connections: int = 4096  # open sockets; more are closed at once
    max_header_bytes: int = 65536  # of one request; beyond it 431
    header_seconds: float = 15.0  # from the connection (or the last answer) to the end of a request's headers
    body_seconds: float = 60.0  # from the headers to the end of the body; beyond it 408
    write_seconds: float = 30.0  # how long a client may leave its answer unread before it is cut off


@dataclass(frozen=True, slots=True)
class Machine:
    """What resolve() needs to know of this computer."""

    cores: int
    memory_bytes: int  # available now

    @staticmethod
    def detect() -> Machine:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        try:
            with open("/proc/meminfo") as f:
                for line in f:
                    if line.startswith("MemAvailable:"):
                        memory = int(line.split()[1]) * 1024
            for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
                if os.path.exists(path):
                    with open(path) as f:
                        text = f.read().strip()
                    if text.isdigit():
                        memory = min(memory, int(text))
        except OSError:
            pass
        return Machine(cores, memory)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What resolve() needs to know of the model."""

    context_length: int
    weight_bytes: int
    kv_bytes_per_token: int  # in an f16 cache


@dataclass(frozen=True, slots=True)
class ResolvedEngine:
    """EngineConfig with nothing left open."""

    config: EngineConfig
    max_model_len: int
    num_pages: int
    num_threads: int
    page_size: int = PAGE_SIZE

    def kv_bytes_per_token(self, in_f16: int) -> int:
        """Bytes of keys and values per token, given those of an f16 cache."""
        return in_f16 * KV_CACHE_BYTES[self.config.kv_cache_dtype] // 2


def resolve(config: EngineConfig, machine: Machine, model: ModelFacts) -> tuple[ResolvedEngine, list[Decision]]:
    """Fill every open setting. Raises ConfigError naming the setting, its value and the limit."""
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must be at least 1")
    for name in ("max_model_len", "kv_cache_bytes", "num_threads"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    if config.kv_cache_dtype not in KV_CACHE_BYTES:
        raise ConfigError(f"kv_cache_dtype is {config.kv_cache_dtype!r}; there are {', '.join(KV_CACHE_BYTES)}")
    decisions: list[Decision] = []
    threads = config.num_threads or machine.cores
    decisions.append(("threads", f"{threads} of {machine.cores} cores"))

    wanted_len = config.max_model_len or model.context_length
    if wanted_len > model.context_length:
        raise ConfigError(f"max_model_len is {wanted_len}; the model was made for {model.context_length} tokens")
    page_bytes = PAGE_SIZE * model.kv_bytes_per_token * KV_CACHE_BYTES[config.kv_cache_dtype] // 2
    useful = config.max_num_seqs * -(-wanted_len // PAGE_SIZE) * page_bytes
    budget = config.kv_cache_bytes or min(machine.memory_bytes // 4, useful)
    num_pages = budget // page_bytes
    if num_pages < 1:
        raise ConfigError(f"kv_cache_bytes is {budget}; one page of this model takes {page_bytes} bytes")
    max_model_len = wanted_len
    if num_pages * PAGE_SIZE < wanted_len:
        if config.max_model_len is not None:
            raise ConfigError(
                f"max_model_len is {wanted_len}, but kv_cache_bytes {budget} holds {num_pages * PAGE_SIZE} tokens; "
                f"give at least {-(-wanted_len // PAGE_SIZE) * page_bytes} bytes or a shorter length"
            )
        max_model_len = num_pages * PAGE_SIZE
    decisions.append(("context", f"{max_model_len} tokens (the model allows {model.context_length})"))
    decisions.append(
        (
            "KV cache",
            f"{num_pages} pages of {PAGE_SIZE} tokens, {num_pages * page_bytes / MIB:.0f} MiB {config.kv_cache_dtype} "
            f"({'given' if config.kv_cache_bytes else 'a quarter of free memory at most'})",
        )
    )
    decisions.append(("weights", f"{model.weight_bytes / MIB:.0f} MiB in the file's formats"))
    decisions.append(
        (
            "batching",
            f"{config.max_num_batched_tokens} tokens a step, about {config.step_seconds:g} s of them beside answers; "
            f"{config.max_num_seqs} sequences, {config.max_waiting} may wait; "
            f"prefix cache {'on' if config.enable_prefix_caching else 'off'}",
        )
    )
    return ResolvedEngine(config, max_model_len, num_pages, threads), decisions


C = TypeVar("C", EngineConfig, ServerConfig)


def from_environment(config: C, environ: dict[str, str] | None = None) -> C:
    """Apply TOKENMILL_<FIELD> variables to a config.

    A variable that is no setting's, or holds an unreadable value, is a ConfigError that names it.
    """
    environ = dict(os.environ) if environ is None else environ
    _refuse_strangers(environ)
    changes: dict[str, Any] = {}
    for f in fields(config):
        text = environ.get(f"TOKENMILL_{f.name.upper()}")
        if text is None:
            continue
        kind = str(f.type)
        try:
            if kind.startswith("tuple"):
                changes[f.name] = tuple(part for part in text.split(",") if part)
            elif kind.startswith("bool"):
                changes[f.name] = {"1": True, "true": True, "0": False, "false": False}[text.lower()]
            elif kind.startswith("int"):
                changes[f.name] = int(text)
            elif kind.startswith("float"):
                changes[f.name] = float(text)
            else:
                changes[f.name] = text
        except (ValueError, KeyError):
            raise ConfigError(f"TOKENMILL_{f.name.upper()} is {text!r}; expected {kind}") from None
    return replace(config, **changes)


def _refuse_strangers(environ: dict[str, str]) -> None:
    known = {
        "TOKENMILL_HOME",
        *(f"TOKENMILL_{f.name.upper()}" for c in (EngineConfig, ServerConfig) for f in fields(c)),
    }
    for name in environ:
        if name.startswith("TOKENMILL_") and name not in known:
            close = difflib.get_close_matches(name, sorted(known), 1)
            raise ConfigError(f"{name} is not understood" + (f"; did you mean {close[0]}?" if close else ""))
