"""Where a step's time goes: each distinct op of a model, timed inside whole steps by the executor's own profile.

A step of n tokens is one prompt of n, or n streams that decode one token each where n <= MAX_STREAMS. Ops that do the
same on every layer are one row. With the profile on each op ends at a barrier of its own, so the sum is a little more
than an undisturbed step. Rates count what limits.py counts: weights, keys and values; and the op table's operations.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..config import KV_CACHE_BYTES, EngineConfig
from ..errors import ConfigError
from ..program import Op, Program, StepInputs, StepShape
from ..program.ops import OPS
from .limits import Step, Work, op_work
from .machine import Ceilings, describe, measure_ceilings, middle

MAX_STREAMS = 64  # above it, a number of tokens means one prompt
SECONDS = 5.0  # a size of step is measured for about so long at most
LEAST_STEPS = 3


def step_of(tokens: int, context: int) -> Step:
    return Step(tokens, 1, context) if tokens <= MAX_STREAMS else Step(1, tokens, tokens)


def step_inputs(step: Step, page_size: int, vocab_size: int) -> StepInputs:
    """Random tokens; request r has the pages after those of request r - 1."""
    pages = -(-step.context // page_size)
    tokens = step.streams * step.tokens
    positions = np.tile(np.arange(step.context - step.tokens, step.context), step.streams)
    request = np.repeat(np.arange(step.streams), step.tokens)
    return StepInputs(
        token_ids=np.random.default_rng(0).integers(0, vocab_size, tokens).astype(np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=(request * pages * page_size + positions).astype(np.int32),
        q_start=(np.arange(step.streams + 1) * step.tokens).astype(np.int32),
        kv_len=np.full(step.streams, step.context, np.int32),
        page_table=np.arange(step.streams * pages, dtype=np.int32).reshape(step.streams, pages),
        logit_rows=((np.arange(step.streams) + 1) * step.tokens - 1).astype(np.int32),
    )


def describe_op(op: Op) -> str:
    """What tells it from others: "q_proj+k_proj+v_proj 576 -> 960, Q4_1"."""
    if op.weights and op.name in ("linear", "embed"):
        names = "+".join(weight.name.rpartition(".")[2] for weight in op.weights)
        formats = ", ".join(dict.fromkeys(weight.format for weight in op.weights))
        rows, cols = sum(weight.shape[0] for weight in op.weights), op.weights[0].shape[1]
        return f"{names} {cols} -> {rows}, {formats}"
    if op.name == "attention":
        window = f", window {op.attrs['window']}" if op.attrs["window"] else ""
        return f"{op.attrs['num_heads']} heads on {op.attrs['num_kv_heads']} of {op.attrs['head_dim']}{window}"
    return f"{sum(value.dim for value in op.outputs)} features"


def profile_step(
    executors: Mapping[str, Any],
    program: Program,
    step: Step,
    ceilings: Ceilings,
    *,
    kv_number_bytes: int,
    page_size: int,
    repeat: int,
    seconds: float = SECONDS,
) -> list[dict[str, Any]]:
    """Rows of the first executor by time, the longest first, and the whole step last; µs, medians over the steps.

    Steps of all executors take turns, `repeat` of each, or fewer (three at least) once that took `seconds`. Of each
    other executor a row has its µs and how many times the first's that is.
    """
    inputs = step_inputs(step, page_size, program.vocab_size)
    runs: dict[str, list[list[tuple[str, str, float]]]] = {name: [] for name in executors}
    for executor in executors.values():
        executor.copy_pages([(0, int(page)) for page in inputs.page_table.ravel()[1:]])  # else nobody wrote that memory
        executor.forward(inputs)
        executor.profile(True)
        executor.op_seconds()
    started = time.perf_counter()
    for number in range(repeat):
        if number >= LEAST_STEPS and time.perf_counter() - started > seconds:
            break
        for name, executor in executors.items():
            executor.forward(inputs)
            runs[name].append(executor.op_seconds())
    for executor in executors.values():
        executor.profile(False)

    first, *others = executors
    groups = _alike(program, runs[first][0])
    groups["step", _name(step)] = [(index, None) for index in range(len(runs[first][0]))]
    rows = []
    for (label, what), members in groups.items():
        times = {
            name: 1e6 * statistics.median(sum(run[index][2] for index, _ in members) for run in runs[name])
            for name in executors
        }
        of_each = 1 if label == "step" else len(members)
        row: dict[str, Any] = {"op": label, "what": what, "count": len(members), "us": times[first] / of_each}
        row |= _rates([op for _, op in members if op], step, times[first], ceilings, kv_number_bytes)
        for name in others:
            row[f"{name} us"] = times[name] / of_each
            row[f"times {name}"] = times[name] / times[first] if times[first] else None
        rows.append((times[first], row))
    total, last = rows.pop()
    for time_of_all, row in rows:
        row["of_step"] = time_of_all / total if total else 0.0
    rows.sort(key=lambda pair: -pair[0])
    return [*(row for _, row in rows), {**last, "of_step": 1.0}]


def _alike(program: Program, run: list[tuple[str, str, float]]) -> dict[tuple[str, str], list[tuple[int, Op | None]]]:
    """Indices of a run's ops, and the program's ops they are, by label and description.

    The executor runs more ops than the program names (cache writes, quantisation): those have a label of their own.
    """
    named: dict[tuple[str, str], list[Op]] = defaultdict(list)
    for each in program.ops:
        named[each.name, each.where].append(each)
    groups: dict[tuple[str, str], list[tuple[int, Op | None]]] = defaultdict(list)
    for index, (label, where, _) in enumerate(run):
        own = named.get((label, where))
        op = own.pop(0) if own else None
        groups[label, describe_op(op) if op else ""].append((index, op))
    return groups


def _rates(ops: list[Op], step: Step, us: float, ceilings: Ceilings, kv_number_bytes: int) -> dict[str, float]:
    """What can be said of gops, gbs and share of the ceilings (each op at its own) where `ops` took `us` together."""
    works = [op_work(op, step, kv_number_bytes) for op in ops]
    work = sum(works, Work())
    shape = StepShape(step.rows("T"), step.rows("L"), step.attended())
    known = {
        "gops": sum(OPS[op.name].flops(op, shape) for op in ops) / 1e3,
        "gbs": work.bytes / 1e3,
        "share": sum(one.seconds(ceilings) for one in works) * 1e6 if work.ops else 0.0,
    }
    return {key: value / us for key, value in known.items() if us and value}


def _name(step: Step) -> str:
    if step.tokens > 1:
        return f"a prompt of {step.tokens:,} tokens"
    many = f"{step.streams} streams" if step.streams > 1 else "1 stream"
    return f"{many} at {step.context:,} tokens"


def run_kernel_bench(
    config: EngineConfig,
    *,
    tokens: Sequence[int] = (1, 16, 512),
    context: int = 512,
    repeat: int = 15,
    against: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Every op at each number of tokens: {"steps": [{"tokens", "name", "ops": rows of profile_step()}], ...}.

    `against`: other instruction sets of this machine, the plain C++ one among them, on the same steps.
    """
    from ..engine.load import load_engine

    if min(tokens) < 1 or context < 1:
        raise ConfigError("tokens and context must be at least 1")
    config = replace(
        config,
        max_num_seqs=max(config.max_num_seqs, *(step_of(n, context).streams for n in tokens)),
        max_num_batched_tokens=max(config.max_num_batched_tokens, *tokens),
    )
    progress("loading the model")
    loaded = load_engine(config)
    resolved, program = loaded.resolved, loaded.model.program
    for n in tokens:
        step = step_of(n, context)
        if step.context > resolved.max_model_len:
            raise ConfigError(f"{_name(step)} are more than the context of {resolved.max_model_len}")
        if step.streams * -(-step.context // resolved.page_size) > resolved.num_pages:
            raise ConfigError(f"{_name(step)} need more KV pages than there are; give --kv-cache-bytes")
    if not hasattr(loaded.engine.runner.executor, "op_seconds"):
        raise ConfigError(f"the {config.backend} backend has no profile; use cpu")
    executors = {"tokenmill": loaded.engine.runner.executor}
    for isa in against:
        progress(f"loading the model for {isa}")
        executors[isa] = load_engine(replace(config, isa=isa)).engine.runner.executor
    machine = describe()
    seen = [measure_ceilings(resolved.num_threads, config.isa)]
    steps = []
    for n in tokens:
        step = step_of(n, context)
        progress(_name(step))
        rows = profile_step(
            executors,
            program,
            step,
            seen[0],
            kv_number_bytes=KV_CACHE_BYTES[config.kv_cache_dtype],
            page_size=resolved.page_size,
            repeat=repeat,
        )
        steps.append({"tokens": n, "name": _name(step), "ops": rows})
    seen.append(measure_ceilings(resolved.num_threads, config.isa))
    return {
        "machine": machine,
        "model": loaded.checkpoint.name,
        "model_digest": loaded.checkpoint.digest,
        "decisions": [list(decision) for decision in loaded.decisions],
        "ceilings": middle(seen).rounded(),
        "steps": steps,
    }
