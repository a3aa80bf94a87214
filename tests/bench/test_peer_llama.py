"""What the peer asks of llama.cpp, through a stand-in for its library that records each call."""

import sys
from types import SimpleNamespace

import pytest

from tokenmill.bench.cases import Timing
from tokenmill.bench.peer_llama import BATCH, CHUNK, Peer


class Library(SimpleNamespace):
    """The functions of llama_cpp that the peer calls. steps: the (token, position, sequence, logits) rows of each."""

    def __init__(self):
        self.steps, self.contexts, self.freed = [], [], []
        self.__version__ = "0"

    def llama_batch_init(self, size, embd, seqs):
        zeros = [0] * size
        return SimpleNamespace(
            n_tokens=0, token=[*zeros], pos=[*zeros], n_seq_id=[*zeros], logits=[*zeros], seq_id=[[0] for _ in zeros]
        )

    def llama_init_from_model(self, model, params):
        self.contexts.append(params)
        return len(self.contexts)

    def llama_decode(self, context, batch):
        self.steps.append(
            [(batch.token[i], batch.pos[i], batch.seq_id[i][0], batch.logits[i]) for i in range(batch.n_tokens)]
        )
        return 0

    def llama_sampler_sample(self, sampler, context, row):
        return 100 + row

    def llama_free(self, context):
        self.freed.append(context)

    def __getattr__(self, name):
        if name.endswith("_params"):
            return SimpleNamespace
        return {"llama_log_callback": lambda f: f, "llama_vocab_n_tokens": lambda vocab: 300}.get(name, lambda *a: 1)


@pytest.fixture
def peer(monkeypatch):
    library = Library()
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    peer = Peer("m.gguf", threads=2, flash_attention=True, repack=True)
    assert peer.vocab_size == 300
    return peer


def test_prompts_go_in_whole_batches_then_every_stream_steps(peer):
    answer = Timing(**peer.generate([[5] * 1500, [6] * 1000], 3))
    warm_up, *steps = peer.lib.steps
    assert len(warm_up) == 1
    assert [len(step) for step in steps] == [BATCH, 2500 - BATCH, 2, 2]
    assert [row for row in steps[0] + steps[1] if row[3]] == [(5, 1499, 0, True), (6, 999, 1, True)]
    # a token is sampled from the row it was computed in, and goes on at the next position
    assert steps[2] == [(100 + 1499, 1500, 0, True), (100 + 2499 - BATCH, 1000, 1, True)]
    assert steps[3] == [(100, 1501, 0, True), (101, 1001, 1, True)]
    assert answer.decoded == 4 and answer.late == answer.beside == 0
    assert answer.decoding == pytest.approx(answer.finished - answer.first)


def test_a_late_prompt_fills_the_decoding_steps(peer):
    late = list(range(1200))
    answer = Timing(**peer.generate([[5, 6], [7, 8]], 8, late))
    steps = peer.lib.steps[2:]
    assert [len(step) for step in steps] == [CHUNK, CHUNK, 2 + 1200 - 2 * (CHUNK - 2), *[2] * 4]
    prompt = [row for step in steps for row in step if row[2] == 2]
    assert [row[0] for row in prompt] == late == [row[1] for row in prompt]
    assert [row[3] for row in prompt] == [False] * 1199 + [True]
    assert answer.beside == 3 * 2 and 0 < answer.late <= answer.finished - answer.first


def test_streams_too_short_for_the_late_prompt_are_an_error(peer):
    with pytest.raises(RuntimeError, match="ended before"):
        peer.generate([[5, 6]], 2, [1] * 2000)


def test_a_context_is_as_large_as_the_question_and_made_anew_only_for_another(peer):
    for prompts, tokens in (([[1] * 10], 5), ([[2] * 10], 5), ([[1] * 300, [2]], 5)):
        peer.generate(prompts, tokens)
    first, second = peer.lib.contexts
    assert (first.n_ctx, first.n_seq_max, second.n_ctx, second.n_seq_max) == (256, 1, 2 * 512, 2)
    assert first.n_threads == first.n_threads_batch == 2 and first.n_ubatch == CHUNK
    assert peer.lib.freed == [1]
