"""The samplers that run the same tests: name -> sample(logits f32 (L, V), SamplingInputs, SamplingOutputs)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenmill.backends.cpu import _native
from tokenmill.backends.interface import MAX_LOGPROBS, SamplingInputs, SamplingOutputs
from tokenmill.backends.reference_sampler import sample
from tokenmill.core import Request, SamplingParams
from tokenmill.sampling.batch import SamplingBatch


def _native_sampler(isa: str):
    return lambda logits, sampling, out: _native.sample(isa, logits, sampling, out)


SAMPLERS = {"reference": sample, **{f"cpu-{isa}": _native_sampler(isa) for isa in _native.instruction_sets()}}


def make_request(params: SamplingParams, *, seed=0, prompt=(1,), output=(), eos=(), bad_words=()) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=list(prompt),
        params=params,
        seed=seed,
        eos_token_ids=frozenset(eos),
        bad_words_ids=tuple(bad_words),
        output_token_ids=list(output),
    )


def inputs(requests: Sequence[Request], counters: Sequence[int] | None = None) -> SamplingInputs:
    """One row a request, as the runner would fill them."""
    batch = SamplingBatch(len(requests), len(requests))
    for i, request in enumerate(requests):
        batch.seat(i, request)
    if counters is None:
        counters = [request.num_output_tokens for request in requests]
    return batch.fill(np.arange(len(requests), dtype=np.int32), list(requests), list(counters), [])


def empty_outputs(rows: int) -> SamplingOutputs:
    return SamplingOutputs(
        token_ids=np.full(rows, -7, np.int32),
        logprobs=np.full(rows, np.nan, np.float32),
        ranks=np.zeros(rows, np.int32),
        top_ids=np.full((rows, MAX_LOGPROBS), -1, np.int32),
        top_logprobs=np.full((rows, MAX_LOGPROBS), np.nan, np.float32),
    )


def run(sampler, logits, requests: Sequence[Request], counters: Sequence[int] | None = None) -> SamplingOutputs:
    logits = np.ascontiguousarray(
        np.broadcast_to(np.asarray(logits, np.float32), (len(requests), np.shape(logits)[-1]))
    )
    out = empty_outputs(len(requests))
    sampler(logits, inputs(requests, counters), out)
    return out
