"""`tokenmill plan`: what a model will need and how fast it can be, worked out from its file's header alone.

Weights stay in the file: bytes, pages and operations come from the recorded Program. Speeds are what bench/limits.py
allows at the ceilings measured now: limits, not promises. --measure sets the engine's own figures beside them.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import click

from ..backends.select import max_logit_rows
from ..bench.limits import FLOAT_FORMATS, Step, decode_limit, prefill_limit, step_work
from ..bench.machine import Ceilings, measure_ceilings
from ..config import KV_CACHE_BYTES, MIB, EngineConfig, Machine, ModelFacts, ResolvedEngine, resolve
from ..errors import ConfigError
from ..program import Program
from .options import config_from, options_of
from .progress import download_progress

PREFILL_TOKENS = 512
SHORT = 96  # tokens of context of a short stream, as in the benchmark's
MEASURED_TOKENS = 64  # output tokens of --measure at the long context
GIGA = click.FloatRange(0, min_open=True)


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
    ceilings: Ceilings
    decode_tokens_per_s: float  # one stream, short
    decode_bytes: int  # a token
    decode_context_tokens_per_s: float  # one stream with `context` tokens
    decode_context_bytes: int
    decode_batch_tokens_per_s: float  # max_concurrency streams of `context` tokens
    prefill_tokens: int
    prefill_tokens_per_s: float
    prefill_ops: int
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


def make_plan(
    name: str,
    family: str,
    program: Program,
    resolved: ResolvedEngine,
    machine: Machine,
    *,
    context: int | None,
    ceilings: Ceilings,
) -> Plan:
    """Raises ConfigError for a context that is not within the model's."""
    context = context or min(resolved.max_model_len, 2048)
    if not 1 <= context <= resolved.max_model_len:
        raise ConfigError(f"--context is {context}; the longest here is {resolved.max_model_len}")
    pages_each = -(-context // resolved.page_size)
    concurrency = min(resolved.num_pages // pages_each, resolved.config.max_num_seqs)
    number_bytes = KV_CACHE_BYTES[resolved.config.kv_cache_dtype]
    tokens = min(PREFILL_TOKENS, resolved.max_model_len)
    short = Step(1, 1, min(SHORT, context))
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
        ceilings=ceilings,
        decode_tokens_per_s=decode_limit(program, ceilings, short.context, 1, number_bytes),
        decode_bytes=step_work(program, short, number_bytes).bytes,
        decode_context_tokens_per_s=decode_limit(program, ceilings, context, 1, number_bytes),
        decode_context_bytes=step_work(program, Step(1, 1, context), number_bytes).bytes,
        decode_batch_tokens_per_s=decode_limit(program, ceilings, context, concurrency, number_bytes),
        prefill_tokens=tokens,
        prefill_tokens_per_s=prefill_limit(program, ceilings, tokens, number_bytes),
        prefill_ops=step_work(program, Step(1, tokens, tokens), number_bytes).ops,
        ops=dict(Counter(op.name for op in program.ops).most_common()),
    )


@click.command()
@click.argument("model", required=False)
@click.option(
    "--context", type=int, help="Tokens each sequence holds, for concurrency and decode. [default: 2048 at most]"
)
@click.option("--bandwidth", type=GIGA, help="GB/s read from memory, in place of what is measured.")
@click.option("--float-ops", type=GIGA, help="Gop/s of float32, likewise.")
@click.option("--int8-ops", type=GIGA, help="Gop/s of 8-bit integers, likewise.")
@click.option("--ops", "show_ops", is_flag=True, help="Also list the program, op by op.")
@click.option("--check", is_flag=True, help="Then load it and compare every op with the reference, on a short prompt.")
@click.option("--measure", is_flag=True, help="Then load it and measure the speeds that were predicted.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@options_of(EngineConfig, skip=("model", "seed"))
def plan(
    model: str | None,
    context: int | None,
    bandwidth: float | None,
    float_ops: float | None,
    int8_ops: float | None,
    show_ops: bool,
    check: bool,
    measure: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Weights, KV pages, concurrency and predicted speed of MODEL, before loading it."""
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
        ceilings=_ceilings(resolved, bandwidth, float_ops, int8_ops),
    )
    report: dict[str, Any] = {**asdict(made), "decisions": [list(d) for d in decisions]}
    if not as_json:
        click.echo(format_plan(made, decisions) + (f"\n\n{program}" if show_ops else ""))
    if measure:
        report["measured"] = _measure(config, made, quiet=as_json)
    if as_json:
        click.echo(json.dumps(report, indent=1))
    if check:
        from .check import check_model

        check_model(config, checkpoint, program)


def _ceilings(
    resolved: ResolvedEngine, bandwidth: float | None, float_ops: float | None, int8_ops: float | None
) -> Ceilings:
    """What was given, and what was not is measured."""
    if bandwidth and float_ops and int8_ops:
        return Ceilings(bandwidth * 1e9, float_ops * 1e9, int8_ops * 1e9)
    try:
        found = measure_ceilings(resolved.num_threads, resolved.config.isa)
    except ValueError as error:
        raise ConfigError(f"isa is {resolved.config.isa!r}: {error}") from None
    return replace(
        found,
        read_bytes=bandwidth * 1e9 if bandwidth else found.read_bytes,
        float_ops=float_ops * 1e9 if float_ops else found.float_ops,
        int8_ops=int8_ops * 1e9 if int8_ops else found.int8_ops,
    )


def _measure(config: EngineConfig, plan: Plan, *, quiet: bool) -> list[dict[str, Any]]:
    """Each prediction again, from ceilings of the same minute, and what the engine reaches."""
    from ..bench.cases import DECODE, decode_case, prefill_case
    from ..bench.engine import run_engine_bench
    from ..bench.report import percent, print_table
    from .bench_common import progress_lines

    cases = [DECODE, prefill_case(min(PREFILL_TOKENS, plan.max_model_len - 1))]
    if plan.context > DECODE.longest + MEASURED_TOKENS:
        cases.insert(1, decode_case(plan.context - MEASURED_TOKENS, MEASURED_TOKENS))
    result = run_engine_bench(config, cases, progress=progress_lines(quiet))
    rows = [
        {"case": row["case"], "predicted": row["limit"], "measured": row["tokenmill"], "share": row["share"]}
        for row in result["medians"]
    ]
    if not quiet:
        shown = [{**row, "share": percent(row["share"])} for row in rows]
        print_table("tokens/s, medians of three rounds", shown, {key: key for key in rows[0]})
        click.echo("predicted here: from ceilings measured again beside each round, not the plan's own of before")
    return rows


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
        ("ceilings", str(plan.ceilings)),
        (
            "decode",
            f"{plan.decode_tokens_per_s:,.0f} tokens/s at most: one stream, {mib(plan.decode_bytes)} read a token",
        ),
        (
            "",
            f"{plan.decode_context_tokens_per_s:,.0f} tokens/s at most with {plan.context:,} tokens of context, "
            f"{mib(plan.decode_context_bytes)} a token",
        ),
        ("", f"{plan.decode_batch_tokens_per_s:,.0f} tokens/s at most with {plan.max_concurrency} such streams"),
        (
            "prefill",
            f"{plan.prefill_tokens_per_s:,.0f} tokens/s at most: {plan.prefill_ops / 1e9:.1f} Gop for "
            f"{plan.prefill_tokens} tokens",
        ),
        ("", ""),
        *((what, which) for what, which in decisions if what not in ("weights", "KV cache")),
    ]
    return "\n".join(f"{what:<12} {text}".rstrip() for what, text in rows)
