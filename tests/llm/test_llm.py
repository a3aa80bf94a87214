"""LLM: what a script gets back. On models that write known text, so that every field can be checked exactly."""

import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.support.checkpoints import IM_END_ID, gguf_file, rigged_gguf, token_list
from tokenmill import LLM, RequestOutput, SamplingParams
from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError, ContextLengthExceeded, EngineUnavailable, InvalidRequest, SourceError
from tokenmill.llm import engine_config

IDS = {text: i for i, text in enumerate(token_list())}
HELLO = [IDS["hello"], IDS["Ġ"], IDS["Ġwor"], IDS["l"], IDS["d"]]  # "hello  world": letters that follow one another
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
SMALL = {"num_threads": 1, "kv_cache_bytes": 4 << 20}


@pytest.fixture(scope="module")
def rigged(tmp_path_factory):
    return rigged_gguf(tmp_path_factory.mktemp("rigged") / "rigged.gguf", HELLO)


@pytest.fixture(scope="module")
def llm(rigged):
    with LLM(rigged, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def random_llm(tmp_path_factory):
    path = gguf_file(tmp_path_factory.mktemp("random") / "random.gguf", "llama")
    with LLM(path, **SMALL) as llm:
        yield llm


# ---- what comes back


def test_a_request_output(llm):
    (output,) = llm.generate("in", GREEDY)
    assert isinstance(output, RequestOutput) and output.finished
    assert output.prompt == "in" and output.prompt_token_ids == [IDS["in"]]
    (choice,) = output.outputs
    assert choice.text == "hello  world"
    assert choice.token_ids == [*HELLO, IM_END_ID]
    assert (choice.index, choice.finish_reason, choice.stop_reason) == (0, "stop", None)
    assert choice.logprobs is None and choice.cumulative_logprob is None and output.prompt_logprobs is None
    metrics = output.metrics
    assert 0 < metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time


def test_every_form_of_prompt(llm):
    ids = [IDS["in"], IDS["a"]]
    for prompt in ("ina", {"prompt": "ina"}, {"prompt_token_ids": ids}, ids, ["ina"], [ids], [{"prompt": "ina"}]):
        (output,) = llm.generate(prompt, GREEDY)
        assert output.prompt_token_ids == ids and output.outputs[0].text == "hello  world"
    (both,) = llm.generate({"prompt": "shown", "prompt_token_ids": ids}, GREEDY)
    assert both.prompt == "shown" and both.prompt_token_ids == ids
    assert llm.generate([], GREEDY) == []


def test_outputs_come_in_the_order_of_prompts_each_with_its_own_params(llm):
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (5, 1, 3)]
    outputs = llm.generate(["a", "b", "c"], params, priority=[5, 0, 9])
    assert [o.prompt for o in outputs] == ["a", "b", "c"]
    assert [o.outputs[0].token_ids for o in outputs] == [HELLO[:5], HELLO[:1], HELLO[:3]]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 3


def test_stop_strings(llm):
    for stop, text, reason in (
        ("wor", "hello  ", "wor"),
        (["zzz", " w"], "hello ", " w"),
        ("zzz", "hello  world", None),
    ):
        (choice,) = llm.generate("a", SamplingParams(temperature=0.0, max_tokens=32, stop=stop))[0].outputs
        assert (choice.text, choice.finish_reason, choice.stop_reason) == (text, "stop", reason)
    (choice,) = llm.generate("a", SamplingParams(temperature=0.0, stop_token_ids=[HELLO[2]]))[0].outputs
    assert (choice.finish_reason, choice.stop_reason) == ("stop", HELLO[2])


def test_logprobs_are_dicts_by_token_the_chosen_first(random_llm):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    (output,) = random_llm.generate("hello world", params)
    (choice,) = output.outputs
    assert len(choice.logprobs) == len(choice.token_ids) == 6
    for token, position in zip(choice.token_ids, choice.logprobs):
        assert next(iter(position)) == token and 3 <= len(position) <= 4
        assert position[token].logprob <= 0 and position[token].rank >= 1
        ranked = sorted((p.rank, -p.logprob) for p in position.values())
        assert [p for _, p in ranked] == sorted(p for _, p in ranked)
        assert {1, 2, 3} <= {p.rank for p in position.values()}
    assert choice.cumulative_logprob == pytest.approx(
        sum(p[t].logprob for t, p in zip(choice.token_ids, choice.logprobs))
    )
    prompt = output.prompt_logprobs
    assert len(prompt) == len(output.prompt_token_ids) and prompt[0] is None
    assert all(token in position for token, position in zip(output.prompt_token_ids[1:], prompt[1:]))
    assert prompt[1][output.prompt_token_ids[1]].decoded_token is not None


def test_choices(random_llm):
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)
    one, two = (random_llm.generate("hello", params)[0] for _ in range(2))
    texts = [choice.token_ids for choice in one.outputs]
    assert [choice.index for choice in one.outputs] == [0, 1, 2]
    assert len({tuple(t) for t in texts}) == 3, "choices of one seed must differ"
    assert texts == [choice.token_ids for choice in two.outputs], "and repeat"


def test_cached_tokens_are_counted(random_llm):
    prompt = {"prompt_token_ids": list(range(100, 180))}
    cold, warm = (random_llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert cold.num_cached_tokens == 0 and warm.num_cached_tokens > 0
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids


def test_more_prompts_than_the_queue_holds(rigged):
    with LLM(rigged, max_num_seqs=2, max_waiting=4, **SMALL) as llm:
        params = [SamplingParams(temperature=0.0, max_tokens=2, n=1 + i % 3) for i in range(40)]
        outputs = llm.generate(["the"] * 40, params)
    assert [len(o.outputs) for o in outputs] == [p.n for p in params]
    assert {c.text for o in outputs for c in o.outputs} == {"hello "}


def test_chat(llm):
    messages = [{"role": "user", "content": "hello"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.outputs[0].text == "hello  world"
    rendered = llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert rendered == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    two = llm.chat([messages, messages], GREEDY, chat_template="{{ messages[0].content }}")
    assert [o.prompt_token_ids for o in two] == [[IDS["hello"]]] * 2
    assert llm.get_tokenizer() is llm.tokenizer


# ---- what is refused


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt_token_ids": [10**6]}, "prompt"),
        ({"prompt_token_ids": [-1]}, "prompt"),
        ({"prompt_token_ids": ["a"]}, "prompt"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids"),
        ({"prompt": 3}, "prompt"),
        ({"text": "x"}, "prompt"),
        ({}, "prompt"),
        (None, "prompts"),
        (7, "prompts"),
    ],
)
def test_bad_prompts_name_the_field(llm, prompt, param):
    with pytest.raises(InvalidRequest) as error:
        llm.generate(prompt if not isinstance(prompt, dict) else [prompt], GREEDY)
    assert error.value.param == param


def test_bad_params_are_refused_before_anything_runs(llm):
    before = llm.stats.prompt_tokens
    for params, param in ((SamplingParams(temperature=-1), "temperature"), (SamplingParams(top_p=2), "top_p")):
        with pytest.raises(InvalidRequest) as error:
            llm.generate(["a", "b"], [GREEDY, params])
        assert error.value.param == param
    with pytest.raises(InvalidRequest, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(InvalidRequest, match="sampling_params must be SamplingParams, not dict"):
        llm.generate("a", {"temperature": 0})
    with pytest.raises(InvalidRequest, match="priority"):
        llm.generate(["a", "b"], GREEDY, priority=[1, 2, 3])
    with pytest.raises(InvalidRequest, match="priority is 'x'"):
        llm.generate(["a", "b"], GREEDY, priority=["x", 1])
    with pytest.raises(ContextLengthExceeded):
        llm.generate("the " * 5000, GREEDY)
    with pytest.raises(InvalidRequest):
        llm.chat([], GREEDY)
    assert llm.stats.prompt_tokens == before


def test_an_unknown_setting_is_refused_by_name(rigged):
    with pytest.raises(ConfigError, match="'max_model_length' is not understood; did you mean max_model_len"):
        LLM(rigged, max_model_length=5)
    with pytest.raises(ConfigError, match="'zzz' is not understood; known settings"):
        LLM(rigged, zzz=5)


@pytest.mark.parametrize(
    ("name", "value"), [("max_model_len", "2048"), ("max_num_seqs", 2.5), ("num_threads", True), ("isa", 5)]
)
def test_a_setting_of_the_wrong_type_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value!r}; expected "):
        engine_config("m", {name: value})


def test_settings_are_the_configs_fields_and_other_engines_names(monkeypatch):
    monkeypatch.setenv("TOKENMILL_MAX_NUM_SEQS", "9")
    config = engine_config("m", {"kv_cache_memory_bytes": 5, "seed": 1})
    assert (config.model, config.kv_cache_bytes, config.seed, config.max_num_seqs) == ("m", 5, 1, 9)


def test_a_missing_model_is_a_setup_error(tmp_path):
    with pytest.raises(SourceError):
        LLM(tmp_path / "none.gguf")


# ---- life and death


def test_threads_may_share_one(llm):
    results = queue.Queue()

    def work():
        results.put([o.outputs[0].text for o in llm.generate(["a"] * 5, GREEDY)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [results.get_nowait() for _ in threads] == [["hello  world"] * 5] * 4


def test_pages_are_all_free_when_idle(llm):
    llm.generate(["hello"] * 7, GREEDY)
    assert idle_stats(llm).pages_used == 0


def idle_stats(llm, seconds=10):
    deadline = time.monotonic() + seconds
    while (stats := llm.stats).num_running or stats.num_waiting or stats.pages_used:
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)
    return stats


def test_closed_is_closed(rigged):
    llm = LLM(rigged, **SMALL)
    llm.generate("a", GREEDY)
    llm.close()
    llm.close()
    with pytest.raises(EngineUnavailable):
        llm.generate("a", GREEDY)


def test_many_threads_share_the_queue(rigged):
    """Together they ask for far more than it takes, and one of them for more than all of it."""
    with LLM(rigged, **SMALL, max_num_seqs=2, max_waiting=1) as llm:
        texts: list = [None] * 6

        def work(i):
            if i == 0:
                with pytest.raises(InvalidRequest, match="at most 3 sequences"):
                    llm.generate("a", SamplingParams(n=4))
            texts[i] = [o.outputs[0].text for o in llm.generate(["a"] * 8, GREEDY)]

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert texts == [["hello  world"] * 8] * 6


def test_an_interrupted_thread_leaves_its_room_to_the_others(rigged):
    with LLM(rigged, **SMALL, max_num_seqs=1, max_waiting=1) as llm:
        for _ in range(3):
            with pytest.raises(ZeroDivisionError), pytest.MonkeyPatch.context() as patch:
                patch.setattr("tokenmill.outputs.Tracked.take", lambda *a: 1 / 0)
                llm.generate(["a", "b"], GREEDY)
        assert [o.outputs[0].text for o in llm.generate(["a", "b"], GREEDY)] == ["hello  world"] * 2


SCRIPT = """
import sys, threading, time
from tokenmill import LLM, SamplingParams
from tokenmill.errors import EngineUnavailable
llm = LLM(sys.argv[1], num_threads=1, kv_cache_bytes=4 << 20, max_num_seqs=4)
long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
mode = sys.argv[2]
if mode == "exit":
    def work():
        try:
            llm.generate(["a"] * 500, long)
        except EngineUnavailable:
            pass
    threading.Thread(target=work, daemon=True).start()
    time.sleep(0.3)
    print("leaving")
elif mode == "interrupt":
    print("running", flush=True)
    try:
        llm.generate(["a"] * 5000, long)
    except KeyboardInterrupt:
        deadline = time.monotonic() + 20
        while (llm.stats.num_running or llm.stats.pages_used) and time.monotonic() < deadline:
            time.sleep(0.01)
        print("live", llm.stats.num_running, llm.stats.pages_used)
        print(llm.generate("a", SamplingParams(temperature=0.0))[0].outputs[0].text)
print("torch" in sys.modules or "transformers" in sys.modules)
"""


def test_the_interpreter_exits_while_requests_run_and_torch_was_never_imported(rigged):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(rigged), "exit"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "leaving\nFalse\n")
    assert "Traceback" not in done.stderr


def test_an_interrupt_aborts_what_runs_and_the_engine_goes_on(rigged):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(rigged), "interrupt"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "running\n"
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert rest == "live 0 0\nhello  world\nFalse\n"


@pytest.mark.parametrize("field", dataclasses.fields(EngineConfig), ids=lambda field: field.name)
def test_every_setting_is_taken(field):
    value = 1.5 if field.type == "float" else True if field.type == "bool" else "x" if "str" in field.type else 1
    assert getattr(engine_config(None, {field.name: value}), field.name) == value
