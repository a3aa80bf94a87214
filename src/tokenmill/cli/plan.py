"""`tokenmill plan`: what a model will need and how fast it can be, worked out from its file's header alone.

Weights stay in the file: bytes, pages and operations come from the recorded Program. Speeds are a roofline: a step
takes the longer of (its bytes / memory bandwidth) and (its operations / peak): ceilings, not promises.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import click

from ..backends.select import max_logit_rows
from ..config import MIB, EngineConfig, Machine, ModelFacts, ResolvedEngine, resolve
from ..errors import ConfigError
from ..program import Program, StepShape
from .options import config_from, options_of
from .progress import download_progress

PREFILL_TOKENS = 512
FLOAT_FORMATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes, counts and tokens per second."""

    model: str
    family: str
    weight_bytes: int
    weight_formats: dict[str, int]  # format: number of tensors
    kv_bytes: int
    kv_bytes_per_token: int
    workspace_bytes: int
    total_bytes: int
    available_bytes: int
    num_pages: int
    page_size: int
    max_model_len: int
    context: int
    max_concurrency: int
    bandwidth_bytes_per_s: float
    peak_flops_per_s: float
    decode_tokens_per_s: float
    decode_bytes: int
    decode_flops: int
    decode_batch_tokens_per_s: float
    prefill_tokens_per_s: float
    prefill_bytes: int
    prefill_flops: int
    ops: dict[str, int]


def workspace_bytes(program: Program, resolved: ResolvedEngine) -> int:
    """Bytes of activations for the fullest step: for each size of value, as many as are alive at once.

    Values that a quantised matrix reads are kept in 8 bits too. Scratch of the kernels comes on top, some MiB.
    """
    rows = {"T": resolved.config.max_num_batched_tokens, "L": max_logit_rows(resolved)}
    quantised = {
        op.inputs[0].id
        for op in program.ops
        if op.name == "linear" and any(w.format not in FLOAT_FORMATS for w in op.weights)
    }
    last_use = {value.id: i for i, op in enumerate(program.ops) for value in op.inputs}
    if program.logits is not None:
        last_use[program.logits.id] = len(program.ops)
    live: Counter[tuple[str, int, bool]] = Counter()
    peak: Counter[tuple[str, int, bool]] = Counter()
    for i, op in enumerate(program.ops):
        live.update((v.rows, v.dim, v.id in quantised) for v in op.outputs)
        peak |= live
        ended = {v.id: v for v in (*op.inputs, *op.outputs) if last_use.get(v.id, i) == i}
        live.subtract((v.rows, v.dim, v.id in quantised) for v in ended.values())
    return sum(count * rows[kind] * (4 * dim + (dim * 11 // 8 if q else 0)) for (kind, dim, q), count in peak.items())


def step_seconds(program: Program, shape: StepShape, bandwidth: float, peak: float) -> float:
    return max(program.bytes(shape) / bandwidth, program.flops(shape) / peak)


def make_plan(
    name: str,
    family: str,
    program: Program,
    resolved: ResolvedEngine,
    machine: Machine,
    *,
    context: int | None,
    bandwidth: float,
    peak: float,
) -> Plan:
    """Raises ConfigError for a context that is not within the model's."""
    context = context or min(resolved.max_model_len, 2048)
    if not 1 <= context <= resolved.max_model_len:
        raise ConfigError(f"--context is {context}; the longest here is {resolved.max_model_len}")
    pages_each = -(-context // resolved.page_size)
    concurrency = min(resolved.num_pages // pages_each, resolved.config.max_num_seqs)
    decode = StepShape(1, 1, context)
    batch = StepShape(concurrency, concurrency, concurrency * context)
    tokens = min(PREFILL_TOKENS, resolved.max_model_len)
    prefill = StepShape(tokens, 1, tokens * (tokens + 1) // 2)
    kv_bytes_per_token = resolved.kv_bytes_per_token(program.kv_bytes_per_token)
    kv_bytes = resolved.num_pages * resolved.page_size * kv_bytes_per_token
    workspace = workspace_bytes(program, resolved)
    return Plan(
        model=name,
        family=family,
        weight_bytes=program.weight_bytes,
        weight_formats=dict(Counter(w.format for w in program.weights).most_common()),
        kv_bytes=kv_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        workspace_bytes=workspace,
        total_bytes=program.weight_bytes + kv_bytes + workspace,
        available_bytes=machine.memory_bytes,
        num_pages=resolved.num_pages,
        page_size=resolved.page_size,
        max_model_len=resolved.max_model_len,
        context=context,
        max_concurrency=concurrency,
        bandwidth_bytes_per_s=bandwidth,
        peak_flops_per_s=peak,
        decode_tokens_per_s=1 / step_seconds(program, decode, bandwidth, peak),
        decode_bytes=program.bytes(decode),
        decode_flops=program.flops(decode),
        decode_batch_tokens_per_s=concurrency / step_seconds(program, batch, bandwidth, peak),
        prefill_tokens_per_s=tokens / step_seconds(program, prefill, bandwidth, peak),
        prefill_bytes=program.bytes(prefill),
        prefill_flops=program.flops(prefill),
        ops=dict(Counter(op.name for op in program.ops).most_common()),
    )


@click.command()
@click.argument("model", required=False)
@click.option(
    "--context", type=int, help="Tokens each sequence holds, for concurrency and decode. [default: 2048 at most]"
)
@click.option("--bandwidth", type=click.FloatRange(0, min_open=True), help="GB/s of memory. Default: measured, 0.2 s.")
@click.option(
    "--peak", type=click.FloatRange(0, min_open=True), help="GFLOP/s. Default: numpy's float32 product, measured."
)
@click.option("--ops", "show_ops", is_flag=True, help="Also list the program, op by op.")
@click.option("--check", is_flag=True, help="Then load it and compare every op with the reference, on a short prompt.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@options_of(EngineConfig, skip=("model", "seed"))
def plan(
    model: str | None,
    context: int | None,
    bandwidth: float | None,
    peak: float | None,
    show_ops: bool,
    check: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Weights, KV pages, concurrency and predicted speed of MODEL, before loading it."""
    from ..bench.machine import measure_bandwidth, measure_flops
    from ..models.registry import build_model
    from ..weights.loader import open_checkpoint
    from ..weights.sources import resolve as find

    config = config_from(EngineConfig, {"model": model, **values})
    with download_progress() as progress:
        path = find(config.model, revision=config.revision, progress=progress)
    checkpoint = open_checkpoint(path)
    built = build_model(checkpoint.config, checkpoint.weights)
    program = built.program
    machine = Machine.detect()
    facts = ModelFacts(built.context_length, program.weight_bytes, program.kv_bytes_per_token)
    resolved, decisions = resolve(config, machine, facts)
    made = make_plan(
        checkpoint.name,
        built.family,
        program,
        resolved,
        machine,
        context=context,
        bandwidth=bandwidth * 1e9 if bandwidth else measure_bandwidth(resolved.num_threads),
        peak=peak * 1e9 if peak else measure_flops(),
    )
    if as_json:
        click.echo(json.dumps({**asdict(made), "decisions": [list(d) for d in decisions]}, indent=1))
    else:
        click.echo(format_plan(made, decisions) + (f"\n\n{program}" if show_ops else ""))
    if check:
        from .check import check_model

        check_model(config, checkpoint, program)


def format_plan(plan: Plan, decisions: list[tuple[str, str]]) -> str:
    def mib(size: float) -> str:
        return f"{size / MIB:,.1f} MiB"

    formats = ", ".join(f"{count} {name}" for name, count in plan.weight_formats.items())
    ops = ", ".join(f"{count} {name}" for name, count in plan.ops.items())
    rows = [
        ("model", f"{plan.model} ({plan.family})"),
        ("program", f"{sum(plan.ops.values())} ops: {ops}"),
        ("", ""),
        ("weights", f"{mib(plan.weight_bytes)}: {formats}"),
        (
            "KV",
            f"{mib(plan.kv_bytes)}: {plan.num_pages:,} pages of {plan.page_size}; {plan.kv_bytes_per_token:,} B/token",
        ),
        ("workspace", f"{mib(plan.workspace_bytes)}: activations of the fullest step; kernels add some MiB of scratch"),
        ("total", f"{mib(plan.total_bytes)} of {mib(plan.available_bytes)} available"),
        ("", ""),
        (
            "concurrency",
            f"{plan.max_concurrency} sequences of {plan.context:,} tokens (the context is {plan.max_model_len:,})",
        ),
        (
            "ceilings",
            f"{plan.bandwidth_bytes_per_s / 1e9:.1f} GB/s memory, {plan.peak_flops_per_s / 1e9:.0f} GFLOP/s float32",
        ),
        (
            "decode",
            f"{plan.decode_tokens_per_s:,.0f} tokens/s at most: one stream at {plan.context:,} tokens reads "
            f"{mib(plan.decode_bytes)} a token",
        ),
        ("", f"{plan.decode_batch_tokens_per_s:,.0f} tokens/s at most with {plan.max_concurrency} streams"),
        (
            "prefill",
            f"{plan.prefill_tokens_per_s:,.0f} tokens/s: {plan.prefill_flops / 1e9:.1f} GFLOP for "
            f"{min(PREFILL_TOKENS, plan.max_model_len)} tokens; integer kernels may pass the float32 ceiling",
        ),
        ("", ""),
        *((what, which) for what, which in decisions if what not in ("weights", "KV cache")),
    ]
    return "\n".join(f"{what:<12} {text}".rstrip() for what, text in rows)
