"""Any small load on any small engine comes to its end with the right tokens, and every page back."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.drive import Ask, drive
from tokenmill.core import FinishReason, SamplingParams
from tokenmill.engine.fake import FakeExecutor, expected
from tokenmill.sampling.seeds import choice_seed

VOCAB = 97


@st.composite
def asks(draw, capacity: int) -> Ask:
    prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=capacity - 1))
    scored = draw(st.sampled_from([None, None, None, 0]))
    params = SamplingParams(
        n=draw(st.sampled_from([1, 1, 2, 3])),
        seed=draw(st.integers(0, 3)),
        max_tokens=draw(st.integers(1 if scored is None else 0, 40)),
        prompt_logprobs=scored,
        logprobs=draw(st.sampled_from([None, 1])),
    )
    return Ask(
        prompt,
        params,
        priority=draw(st.integers(0, 2)),
        namespace=draw(st.sampled_from(["", "other"])),
        at_step=draw(st.integers(0, 30)),
        abort_at_step=draw(st.sampled_from([None, None, None, 0, 3, 17, 40])),
    )


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_every_request_ends_rightly(data):
    page_size = data.draw(st.sampled_from([1, 3, 4, 16]))
    pages = data.draw(st.integers(2, 14))
    load = data.draw(st.lists(asks(pages * page_size), min_size=1, max_size=8))
    device = FakeExecutor(num_pages=pages, page_size=page_size, vocab_size=VOCAB)
    run = drive(
        device,
        load,
        num_pages=pages,
        page_size=page_size,
        max_num_seqs=data.draw(st.integers(1, 6)),
        budget=data.draw(st.integers(1, 40)),
        caching=data.draw(st.booleans()),
        overlap=data.draw(st.booleans()),
        preempt_every=data.draw(st.sampled_from([0, 0, 5])) if pages > 4 else 0,
        check_each_step=True,
    )
    for i, ask in enumerate(load):
        room = pages * page_size - len(ask.prompt)
        for k in range(ask.params.n):
            reply = run[i, k]
            assert reply.error is None
            count = (
                min(ask.params.max_tokens, room) if reply.finish_reason == FinishReason.LENGTH else len(reply.tokens)
            )
            seed = choice_seed(ask.params.seed, k)
            assert reply.tokens == expected(ask.prompt, count, seed=seed, vocab_size=VOCAB)
            assert len(reply.logprobs) == (0 if ask.params.logprobs is None else count)
            if ask.params.prompt_logprobs is not None and k == 0 and reply.finish_reason == FinishReason.LENGTH:
                assert [p.token_id for p in reply.prompt_logprobs] == ask.prompt[1:]
            assert reply.num_cached_tokens < len(ask.prompt) or len(ask.prompt) == 1
