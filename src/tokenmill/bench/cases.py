"""The cases of the engine benchmark: how many streams of how many tokens, what of it is counted, and its limit.

decode   output tokens a second while every stream decodes: after the last first token, until the first stream ends
prefill  prompt tokens a second until the first token
total    all tokens over the whole time
mixed    a prompt arrives while streams decode: all tokens computed until its first token. What counts is the loss:
         the time it took over the sum of the two apart, less one
"""

from __future__ import annotations

from dataclasses import dataclass

from ..program import Program
from .limits import decode_limit, prefill_limit
from .machine import Ceilings


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds and tokens of one run of a case."""

    first: float  # until every stream has its first token
    finished: float  # until all are done
    decoded: int = 0  # tokens that came while every stream decoded
    decoding: float = 0.0  # ... and how long that was
    late: float = 0.0  # from the arrival of the late prompt until its first token
    beside: int = 0  # tokens the streams got meanwhile


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    streams: int
    prompt_tokens: int
    output_tokens: int
    counts: str  # "decode", "prefill", "total" or "mixed"
    late_tokens: int = 0  # of the prompt that arrives once all streams decode

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.prompt_tokens + self.output_tokens, self.late_tokens + 1 if self.late_tokens else 0)

    @property
    def sequences(self) -> int:
        return self.streams + bool(self.late_tokens)

    @property
    def panel(self) -> str:
        """What it is plotted with."""
        if self.counts == "decode":
            return "decode, many streams" if self.streams > 1 else "decode"
        return self.counts

    def says_something(self, timing: Timing) -> bool:
        """False where the first stream ended before the last began: steps too small for so many streams."""
        return self.counts not in ("decode", "mixed") or timing.decoded > 0

    def rate(self, timing: Timing) -> float:
        """Tokens a second of what the case counts."""
        if self.counts == "prefill":
            return self.streams * self.prompt_tokens / timing.first
        if self.counts == "decode":
            return timing.decoded / timing.decoding
        if self.counts == "mixed":
            return (self.late_tokens + timing.beside) / timing.late
        return self.streams * (self.prompt_tokens + self.output_tokens) / timing.finished

    def limit(self, program: Program, ceilings: Ceilings, kv_number_bytes: int = 2) -> float | None:
        """The rate that `ceilings` allow; None for mixed, which is held against its own parts."""
        context = self.prompt_tokens + self.output_tokens // 2  # in the middle of the answer
        decode = decode_limit(program, ceilings, context, self.streams, kv_number_bytes)
        prefill = prefill_limit(program, ceilings, self.prompt_tokens, kv_number_bytes)
        if self.counts == "prefill":
            return prefill
        if self.counts == "decode":
            return decode
        if self.counts == "mixed":
            return None
        tokens = self.streams * self.prompt_tokens, self.streams * self.output_tokens
        return sum(tokens) / (tokens[0] / prefill + tokens[1] / decode)


def mixed_loss(mixed: Timing, prefill: Timing, decode: Timing) -> float:
    """How much longer the same tokens took in the same steps than apart: 0.1 is a tenth."""
    return mixed.late / (prefill.first + mixed.beside * decode.decoding / decode.decoded) - 1


def decode_case(context: int, output_tokens: int = 64) -> Case:
    return Case(f"decode at {context:,} tokens", 1, context, output_tokens, "decode")


def prefill_case(tokens: int) -> Case:
    return Case(f"prefill, {tokens:,} tokens", 1, tokens, 1, "prefill")


def batch_case(streams: int, prompt_tokens: int = 64, output_tokens: int = 64) -> Case:
    return Case(f"decode, {streams} streams", streams, prompt_tokens, output_tokens, "decode")


def streams_case(streams: int, prompt_tokens: int, output_tokens: int) -> Case:
    return Case(f"{streams} streams of {prompt_tokens}+{output_tokens}", streams, prompt_tokens, output_tokens, "total")


DECODE = Case("decode, 1 stream", 1, 32, 128, "decode")
MIXED = Case("mixed: 8 streams, a prompt of 2,048", 8, 64, 64, "mixed", late_tokens=2048)
LATENCY = [DECODE, prefill_case(512), prefill_case(2048)]
QUICK = [DECODE, decode_case(2048), prefill_case(512), prefill_case(2048), batch_case(16), MIXED]
FULL = [
    DECODE,
    decode_case(2048),
    decode_case(8000),
    prefill_case(512),
    prefill_case(2048),
    prefill_case(8000),
    *(batch_case(streams) for streams in (4, 8, 16, 32, 64)),
    MIXED,
]
