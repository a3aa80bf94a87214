"""The sampler's specification in numpy: one row of logits in, one token out. Slow, short, exact.

A native sampler follows this text step by step. What each step computes in, so that both give the same token:

  f32     the raw logits; x after bias and penalties (each step rounded to f32 once)
  f64     everything after: weights, probabilities, cumulative sums, u

Row i, with V logits:

  0. Any logit that is NaN or infinite: token -1, nothing else is written.
  1. Scoring (target >= 0) reports `target` and ends here. Logprobs are those of the raw logits:
     logprob[t] = f32(f64(logit[t]) - max - log(sum_j exp(f64(logit[j]) - max))); rank = 1 + |{j: logit[j] > logit[t]}|;
     the best N by (logit descending, id ascending), at most V of them. Finite, whatever was forbidden below.
  2. x = logit; x[id] = f32(x[id] + value) for each bias entry in list order. An allowed list that is not empty sets
     every other x to -inf.
  3. Each distinct history token, where repetition_penalty r != 1: x = f32(x / r) if x > 0 else f32(x * r), in f32.
     Each distinct token of the output part, seen c times: x = f32(f64(x) - (f64(frequency) * c + f64(presence))).
  4. The best x is not finite (everything is forbidden): token -1.
     temperature < GREEDY_BELOW: the highest x, the lowest id among equals; filters do not apply.
     Otherwise w[t] = exp((f64(x[t]) - f64(max x)) / f64(temperature)), so the best token has w = 1 exactly.
     Survivors are all t with w > 0. `order` is (x descending, id ascending). In turn, where not off:
       top_k (off: 0 or >= V)   the first top_k of `order`
       top_p (off: >= 1)        walking `order`: t stays while the sum of w before it < top_p * (sum of w of survivors)
       min_p (off: <= 0)        t stays if w[t] >= min_p  (of the best, whose w is 1)
       typical_p (off: >= 1)    p = w / sum(w of survivors); H = -sum(p log p); walking (|-log p - H| ascending, id
                                ascending): t stays while the sum of p before it < typical_p   (Meister et al. 2022)
     At least one token stays in each.
  5. u = philox(seed, counter) in [0, 1). The first survivor in ascending id with cumulative w > u * (sum of w of
     survivors); the last survivor if rounding leaves none.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): key = (seed mod 2^32, seed div 2^32),
counter block = (counter, 0, 0, 0), u = first output word * 2^-32. No state: a token's number depends on the request's
seed and its position alone, never on who else is in the batch or whether the request was preempted.
"""

from __future__ import annotations

import numpy as np

from .interface import GREEDY_BELOW, MAX_LOGPROBS, SamplingInputs, SamplingOutputs

MASK32 = 0xFFFFFFFF


def philox4x32(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Ten rounds. Words are unsigned 32-bit."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0 = 0xD2511F53 * c0
        p1 = 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def uniform(seed: int, counter: int) -> float:
    """The random number in [0, 1) of output token `counter` of a request with `seed` (unsigned 64-bit)."""
    return philox4x32((seed & MASK32, seed >> 32), (counter, 0, 0, 0))[0] * 2.0**-32


def sample(logits: np.ndarray, sampling: SamplingInputs, out: SamplingOutputs) -> None:
    """Sample or score every row of `logits` f32 (L, V) into `out`. Logits are not changed."""
    for row in range(len(logits)):
        _sample_row(logits[row], row, sampling, out)


def _sample_row(logits: np.ndarray, row: int, s: SamplingInputs, out: SamplingOutputs) -> None:
    if not np.isfinite(logits).all():
        out.token_ids[row] = -1
        return
    target = int(s.target[row])
    token = target if target >= 0 else _choose(logits, row, s)
    out.token_ids[row] = token
    if s.num_logprobs[row] >= 0 and token >= 0:
        _report(logits, token, int(s.num_logprobs[row]), row, out)


def _report(logits: np.ndarray, token: int, num_logprobs: int, row: int, out: SamplingOutputs) -> None:
    shifted = logits.astype(np.float64) - np.float64(logits.max())
    logprobs = shifted - np.log(np.exp(shifted).sum())
    out.logprobs[row] = logprobs[token]
    out.ranks[row] = 1 + np.count_nonzero(logits > logits[token])
    count = min(num_logprobs, MAX_LOGPROBS, len(logits))
    best = np.argsort(-logits, kind="stable")[:count]
    out.top_ids[row, :count] = best
    out.top_logprobs[row, :count] = logprobs[best]


def _choose(logits: np.ndarray, row: int, s: SamplingInputs) -> int:
    x = _adjusted(logits, row, s)
    best = int(x.argmax())
    if not np.isfinite(x[best]):
        return -1
    temperature = float(s.temperature[row])
    if temperature < GREEDY_BELOW:
        return best
    w = np.exp((x.astype(np.float64) - np.float64(x[best])) / temperature)
    order = np.argsort(-x, kind="stable")
    survivors = np.sort(_filtered(w, order[w[order] > 0], row, s))
    cumulative = np.cumsum(w[survivors])
    u = uniform(int(s.seed[row]), int(s.counter[row]))
    chosen = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return int(survivors[min(chosen, len(survivors) - 1)])


def _adjusted(logits: np.ndarray, row: int, s: SamplingInputs) -> np.ndarray:
    """x: the logits with bias, allowed list and penalties, float32 (V,)."""
    x = logits.copy()
    lo, hi = s.bias_start[row], s.bias_start[row + 1]
    for token, value in zip(s.bias_ids[lo:hi], s.bias_values[lo:hi]):
        x[token] += value
    lo, hi = s.allowed_start[row], s.allowed_start[row + 1]
    if hi > lo:
        forbidden = np.ones(len(x), bool)
        forbidden[s.allowed_ids[lo:hi]] = False
        x[forbidden] = -np.inf
    lo, hi = s.history_start[row], s.history_start[row + 1]
    if hi > lo:
        history = s.history_ids[lo:hi]
        repetition = s.repetition_penalty[row]
        if repetition != 1:
            seen = np.unique(history)
            x[seen] = np.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
        ids, counts = np.unique(history[s.history_prompt_len[row] :], return_counts=True)
        frequency, presence = np.float64(s.frequency_penalty[row]), np.float64(s.presence_penalty[row])
        x[ids] = x[ids].astype(np.float64) - (frequency * counts + presence)
    return x


def _filtered(w: np.ndarray, order: np.ndarray, row: int, s: SamplingInputs) -> np.ndarray:
    """The ids that stay; `order` holds the survivors, best first, and stays so until typical_p."""
    top_k = int(s.top_k[row])
    if top_k > 0:
        order = order[:top_k]
    if (top_p := float(s.top_p[row])) < 1:
        cumulative = np.cumsum(w[order])
        order = order[_stays(cumulative, top_p * cumulative[-1])]
    if (min_p := float(s.min_p[row])) > 0:
        order = order[w[order] >= min_p]
    if (typical_p := float(s.typical_p[row])) < 1:
        ids = np.sort(order)
        p = w[ids] / w[ids].sum()
        surprise = -np.log(p)
        ids, p = (a[np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")] for a in (ids, p))
        order = ids[_stays(np.cumsum(p), typical_p)]
    return order


def _stays(cumulative: np.ndarray, limit: float) -> np.ndarray:
    before = np.concatenate(([0.0], cumulative[:-1]))
    stays = before < limit
    stays[0] = True
    return stays
