"""llama.cpp as a measured peer, through llama-cpp-python's low-level API: tokens in, tokens out, greedy, nothing else.

Runs in any interpreter that has llama_cpp (a process of its own, so that two engines never share a thread pool) and so
imports nothing of tokenmill. One JSON object a line on stdin asks, one on stdout answers; see Peer for the questions.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time


class Peer:
    """One model and two contexts: "single" for one sequence, "batch" for many, each as llama.cpp likes it best."""

    def __init__(self, model: str, threads: int, max_tokens: int, max_seqs: int, flash_attention: bool, repack: bool):
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
        self.threads, self.max_tokens, self.max_seqs, self.flash_attention = (
            threads,
            max_tokens,
            max_seqs,
            flash_attention,
        )
        self.contexts: dict[int, ctypes.c_void_p] = {}
        self.batch = llama_cpp.llama_batch_init(max(2048, max_seqs), 0, 1)
        self.sampler = llama_cpp.llama_sampler_init_greedy()
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def context(self, num_seqs: int):
        """A context for `num_seqs` sequences of max_tokens each, made on first use, its cache emptied."""
        seqs = 1 if num_seqs == 1 else self.max_seqs
        if seqs not in self.contexts:
            params = self.lib.llama_context_default_params()
            params.n_ctx = self.max_tokens * seqs
            params.n_seq_max = seqs
            params.n_batch, params.n_ubatch = 2048, 512
            params.n_threads = params.n_threads_batch = self.threads
            params.flash_attn_type = 1 if self.flash_attention else 0
            params.kv_unified = False
            params.no_perf = True
            self.contexts[seqs] = self.lib.llama_init_from_model(self.model, params)
            if not self.contexts[seqs]:
                raise RuntimeError("llama.cpp could not make a context")
        context = self.contexts[seqs]
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

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict:
        """All prompts together: prefill in full batches, then decode in step. Seconds from the start for each mark."""
        context = self.context(len(prompts))
        started = time.perf_counter()
        rows = [
            (token, position, seq, position == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        newest: list[int] = []
        for i in range(0, len(rows), 2048):
            newest += self.decode(context, rows[i : i + 2048])
        first = time.perf_counter() - started
        outputs = [[token] for token in newest]
        for step in range(max_tokens - 1):
            newest = self.decode(context, [(t, len(prompts[s]) + step, s, True) for s, t in enumerate(newest)])
            for output, token in zip(outputs, newest):
                output.append(token)
        return {"first": first, "finished": time.perf_counter() - started, "outputs": outputs}


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
