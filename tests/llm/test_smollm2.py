"""The default model in one's own process: it knows what the capital of France is."""

import pytest

from tokenmill import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def llm(smollm2_path):
    with LLM("smollm2-135m-instruct", kv_cache_bytes=256 << 20) as llm:
        yield llm


def test_completion(llm):
    (output,) = llm.generate("The capital of France is", GREEDY)
    assert output.outputs[0].text.startswith(" Paris")


def test_chat_ends_by_itself(llm):
    (output,) = llm.chat([{"role": "user", "content": "What is the capital of France? Answer with one word."}], GREEDY)
    (choice,) = output.outputs
    assert "Paris" in choice.text and choice.finish_reason == "stop" and "<|im_end|>" not in choice.text


def test_the_same_answer_whatever_the_company(llm):
    """Alone, in a batch, and again with everything cached: bit-equal, logprobs too."""
    params = SamplingParams(temperature=0.8, seed=11, max_tokens=16, logprobs=2)
    prompts = ["The capital of France is", "Once upon a time", "def main():", "The sky is blue because"]
    alone = [llm.generate(p, params)[0].outputs[0] for p in prompts]
    together = [o.outputs[0] for o in llm.generate(prompts, params)]
    assert alone == together
