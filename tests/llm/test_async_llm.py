"""AsyncLLM: streams, aborts and endings."""

import asyncio
import itertools

import pytest

from tests.llm.test_llm import GREEDY, HELLO, IDS, SMALL
from tests.support.checkpoints import gguf_file, rigged_gguf
from tokenmill import AsyncLLM, SamplingParams
from tokenmill.errors import EngineUnavailable, InvalidRequest, Overloaded
from tokenmill.outputs import RequestOutputKind

ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def rigged(tmp_path_factory):
    return rigged_gguf(tmp_path_factory.mktemp("rigged") / "rigged.gguf", HELLO)


@pytest.fixture(scope="module")
def llm(rigged):
    llm = AsyncLLM(rigged, **SMALL)
    yield llm
    llm.close()


async def gather(stream):
    return [output async for output in stream]


async def idle(llm):
    for _ in range(1000):
        stats = llm.stats
        if not (stats.num_running or stats.num_waiting or stats.pages_used):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(llm.stats)


def test_cumulative_outputs_grow_to_the_whole(llm):
    outputs = asyncio.run(gather(llm.generate("the", GREEDY, "mine")))
    texts = [o.outputs[0].text for o in outputs]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == "hello  world" and outputs[-1].outputs[0].finish_reason == "stop"
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {o.request_id for o in outputs} == {"mine"}


def test_deltas_add_up_to_the_whole(tmp_path):
    async def go():
        async with AsyncLLM(gguf_file(tmp_path / "m.gguf", "llama"), **SMALL) as llm:
            params = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True, logprobs=1)
            deltas = await gather(llm.generate("the", params, output_kind=RequestOutputKind.DELTA))
            (whole,) = await gather(llm.generate("the", params, output_kind=RequestOutputKind.FINAL_ONLY))
            return deltas, whole

    deltas, whole = asyncio.run(go())
    for choice in whole.outputs:
        parts = [d.outputs[choice.index] for d in deltas]
        assert "".join(p.text for p in parts) == choice.text
        assert [t for p in parts for t in p.token_ids] == choice.token_ids
        assert [p for part in parts for p in part.logprobs] == choice.logprobs
        assert parts[-1].finish_reason == choice.finish_reason == "length"


def test_many_streams_at_once_over_several_event_loops(llm):
    async def go():
        return await asyncio.gather(*(gather(llm.generate("the", GREEDY)) for _ in range(20)))

    for _ in range(2):
        assert {outputs[-1].outputs[0].text for outputs in asyncio.run(go())} == {"hello  world"}


def test_leaving_the_iteration_aborts(llm):
    async def go():
        stream = llm.generate("the", ENDLESS)
        async for _ in stream:
            break
        await stream.aclose()
        await idle(llm)

    asyncio.run(go())


def test_cancelling_the_task_aborts(llm):
    async def go():
        task = asyncio.create_task(gather(llm.generate("the", ENDLESS)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(llm)

    asyncio.run(go())


def test_abort_by_id_ends_the_stream_with_its_reason(llm):
    async def go():
        outputs = []
        async for output in llm.generate("the", ENDLESS, "victim"):
            outputs.append(output)
            await llm.abort("victim")
        await llm.abort("victim")
        await idle(llm)
        return outputs[-1]

    last = asyncio.run(go())
    assert last.finished and last.outputs[0].finish_reason == "abort" and len(last.outputs[0].token_ids) < 400


def test_one_id_at_a_time(llm):
    async def go():
        first = llm.generate("the", ENDLESS, "same")
        await anext(first)
        with pytest.raises(InvalidRequest, match="already running"):
            await anext(llm.generate("the", GREEDY, "same"))
        await first.aclose()
        return await gather(llm.generate("the", GREEDY, "same"))

    assert asyncio.run(go())[-1].outputs[0].text == "hello  world"


def test_bad_input_is_refused_at_the_call(llm):
    with pytest.raises(InvalidRequest):
        llm.generate("the", SamplingParams(temperature=-1))
    with pytest.raises(InvalidRequest):
        llm.chat([{"role": "user"}], GREEDY)


def test_a_full_queue_refuses_and_the_others_go_on(rigged):
    async def go():
        async with AsyncLLM(rigged, max_num_seqs=1, max_waiting=2, **SMALL) as llm:
            return await asyncio.gather(
                *(gather(llm.generate("the", GREEDY)) for _ in range(30)), return_exceptions=True
            )

    results = asyncio.run(go())
    refused = [r for r in results if isinstance(r, Overloaded)]
    served = [r for r in results if isinstance(r, list)]
    assert refused and served and len(refused) + len(served) == 30
    assert {outputs[-1].outputs[0].text for outputs in served} == {"hello  world"}


def test_chat_streams(llm):
    outputs = asyncio.run(gather(llm.chat([{"role": "user", "content": "a"}], GREEDY)))
    assert outputs[-1].outputs[0].text == "hello  world"
    assert outputs[-1].prompt_token_ids[0] == IDS["<|im_start|>"]


def test_closing_ends_what_runs(rigged):
    async def go():
        llm = AsyncLLM(rigged, **SMALL)
        stream = llm.generate("the", ENDLESS)
        await anext(stream)
        await asyncio.to_thread(llm.close)
        with pytest.raises(EngineUnavailable):
            await gather(stream)
        with pytest.raises(EngineUnavailable):
            await gather(llm.generate("the", GREEDY))

    asyncio.run(go())
