"""llama.cpp as a measured peer, through llama-cpp-python's low-level API: tokens in, tokens out, greedy, nothing else.

Runs in any interpreter that has llama_cpp (a process of its own, so that two engines never share a thread pool) and so
imports nothing of tokenmill. One JSON object a line on stdin asks, one on stdout answers; see Peer for the questions.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

BATCH = 2048  # tokens of one call
CHUNK = 512  # ... and of one pass over the weights


class Peer:
    """One model, and a context as large as the question needs: for one sequence or many, as llama.cpp likes best."""

    def __init__(self, model: str, threads: int, flash_attention: bool, repack: bool):
        import llama_cpp

        self.lib = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, user: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = repack
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), params)
        if not self.model:
            raise RuntimeError("llama.cpp could not load the model")
        self.threads, self.flash_attention = threads, flash_attention
        self.made: tuple | None = None  # (sequences, tokens of each, context)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.sampler = llama_cpp.llama_sampler_init_greedy()
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def context(self, seqs: int, tokens: int):
        """A context for `seqs` sequences of `tokens` each, its cache empty and its memory touched."""
        if self.made is None or self.made[:2] != (seqs, tokens):
            if self.made:
                self.lib.llama_free(self.made[2])
                self.made = None
            params = self.lib.llama_context_default_params()
            params.n_ctx = -(-tokens // 256) * 256 * seqs
            params.n_seq_max = seqs
            params.n_batch, params.n_ubatch = BATCH, CHUNK
            params.n_threads = params.n_threads_batch = self.threads
            params.flash_attn_type = 1 if self.flash_attention else 0
            params.kv_unified = False
            params.no_perf = True
            context = self.lib.llama_init_from_model(self.model, params)
            if not context:
                raise RuntimeError("llama.cpp could not make a context")
            self.made = (seqs, tokens, context)
            self.decode(context, [(1, 0, 0, True)])
        context = self.made[2]
        self.lib.llama_memory_clear(self.lib.llama_get_memory(context), False)
        return context

    def decode(self, context, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """One llama_decode of (token, position, sequence, wants logits) rows; the greedy token where one is wanted."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, seq, logits) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = seq
            batch.logits[i] = logits
        if self.lib.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        sample = self.lib.llama_sampler_sample
        return [sample(self.sampler, context, i) for i, row in enumerate(rows) if row[3]]

    def generate(self, prompts: list[list[int]], max_tokens: int, late: list[int] | None = None) -> dict:
        """All prompts together: prefill in full batches, then decode in step. The fields of cases.Timing.

        `late` is a prompt that joins the decoding steps in chunks that fill them up to CHUNK tokens, as llama-server
        does it.
        """
        longest = max(max(map(len, prompts)) + max_tokens, len(late or ()) + 1)
        context = self.context(len(prompts) + bool(late), longest)
        started = time.perf_counter()
        rows = [
            (token, position, seq, position == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        newest: list[int] = []
        for i in range(0, len(rows), BATCH):
            newest += self.decode(context, rows[i : i + BATCH])
        first = time.perf_counter() - started
        late_seconds, beside, done = 0.0, 0, 0
        for step in range(max_tokens - 1):
            rows = [(token, len(prompts[seq]) + step, seq, True) for seq, token in enumerate(newest)]
            if late and done < len(late):
                until = min(len(late), done + CHUNK - len(rows))
                rows += [(late[i], i, len(prompts), i == len(late) - 1) for i in range(done, until)]
                done, beside = until, beside + len(prompts)
                newest = self.decode(context, rows)[: len(prompts)]
                late_seconds = time.perf_counter() - started - first
            else:
                newest = self.decode(context, rows)
        if late and done < len(late):
            raise RuntimeError("the streams ended before the late prompt was computed")
        finished = time.perf_counter() - started
        return {
            "first": first,
            "finished": finished,
            "decoded": len(prompts) * (max_tokens - 1),
            "decoding": finished - first,
            "late": late_seconds,
            "beside": beside,
        }


def main() -> None:
    peer = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if peer is None:
                peer = Peer(**question)
                answer = {"vocab_size": peer.vocab_size, "version": peer.lib.__version__}
            else:
                answer = peer.generate(**question)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
