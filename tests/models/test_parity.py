"""Every family's logits are Transformers': from folders of each dtype and from GGUF, in any chunks, in any company.

Our cache keeps keys and values in f16; Transformers is made to round its own to f16 for the comparison, so that the
bound of 1e-3 is on everything else. Without that rounding on either side (float32 KV, reference only) it is 1e-4.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tests.support import checkpoints, transformers_oracle
from tests.support.checkpoints import FAMILIES
from tests.support.executors import NUM_PAGES
from tests.support.steps import Driver
from tokenmill.backends.reference import ReferenceBackend, ReferenceExecutor
from tokenmill.models.registry import build_model, run_eagerly
from tokenmill.weights.loader import open_checkpoint

BOUND = 1e-3  # max abs, float32 logits
KINDS = ("float32", "float16", "bfloat16", "gguf")
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)

# What a config can say beyond a family's defaults: (family, overrides of its Transformers config).
VARIANTS = {
    "llama, one kv head a head": ("llama", dict(num_key_value_heads=4)),
    "llama, tied": ("llama", dict(tie_word_embeddings=True)),
    "llama, head_dim": ("llama", dict(head_dim=24)),
    "llama, biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "llama, theta": ("llama", dict(rope_parameters=dict(rope_type="default", rope_theta=500000.0))),
    "llama, linear rope": ("llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))),
    "llama, llama3 rope": (
        "llama",
        dict(rope_parameters=dict(LLAMA3, rope_theta=1e4, original_max_position_embeddings=64)),
    ),
    "mistral, no window": ("mistral", dict(sliding_window=None)),
    "mistral, window of a page": ("mistral", dict(sliding_window=16)),
    "mistral, window of one": ("mistral", dict(sliding_window=1)),
    "qwen2, window off": ("qwen2", dict(use_sliding_window=False, sliding_window=8)),
    "qwen2, window on": ("qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "qwen2, yarn": (
        "qwen2",
        dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)),
    ),
    "qwen3, biases": ("qwen3", dict(attention_bias=True)),
    "qwen3, layer types": (
        "qwen3",
        dict(use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    ),
    "gemma3, scaled rope": (
        "gemma3",
        dict(
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
                sliding_attention=dict(rope_type="default", rope_theta=1e4),
            )
        ),
    ),
    "gemma3, untied": ("gemma3", dict(tie_word_embeddings=False)),
    "gemma3, scalar": ("gemma3", dict(query_pre_attn_scalar=20)),
}


def assert_close(got: np.ndarray, wanted: np.ndarray, bound: float = BOUND) -> None:
    assert got.dtype == np.float32 and got.shape == wanted.shape
    assert np.abs(wanted).max() > 1, "logits too flat to tell anything"
    assert np.abs(got - wanted).max() <= bound


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_transformers(tiny, executor_factory, family, kind):
    """100 tokens, several times the windows, in chunks that end inside pages and windows."""
    model = tiny(family, kind)
    tokens = model.tokens(100)
    assert_close(model.driver(executor_factory).run(tokens, chunk=37), model.wanted(tokens))


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_a_family(tiny, executor_factory, name):
    family, overrides = VARIANTS[name]
    model = tiny(family, **overrides)
    tokens = model.tokens(100)
    assert_close(model.driver(executor_factory).run(tokens), model.wanted(tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_with_a_float32_cache_the_difference_is_rounding_only(tiny, executor_factory, family):
    model = tiny(family)
    tokens = model.tokens(100)
    got = model.driver(executor_factory, kv_dtype="float32").run(tokens, chunk=41)
    assert_close(got, model.wanted(tokens, torch.float32), 1e-4)


@pytest.mark.parametrize("chunk", (1, 7, 16, 33))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chunked_prompt_is_the_whole_prompt(tiny, executor_factory, family, chunk):
    model = tiny(family)
    tokens = model.tokens(70)
    driver = model.driver(executor_factory)
    assert_close(driver.run(tokens, chunk=chunk), driver.run(tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_share_a_step(tiny, executor_factory, family):
    """A long prompt, a decode and a chunk that continues, in one step, are what each is alone."""
    model = tiny(family)
    a, b, c = model.tokens(50, 1), model.tokens(21, 2), model.tokens(60, 3)
    alone = {key: model.driver(executor_factory).run(t) for key, t in {"a": a, "b": b, "c": c}.items()}

    driver = model.driver(executor_factory)
    driver.step({"b": b[:20], "c": c[:13]})
    together = driver.step({"a": a, "b": b[20:], "c": c[13:]})
    assert_close(together["a"], alone["a"])
    assert_close(together["b"], alone["b"][20:])
    assert_close(together["c"], alone["c"][13:])


def test_a_multimodal_gemma_that_leaves_out_its_class_defaults(tmp_path, executor_factory):
    """config.json as google/gemma-3-4b-it has it: the sizes of text_config that the class assumes are not written."""
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=6, sliding_window=16, vocab_size=320)
    made = checkpoints.make_model("gemma3", num_attention_heads=8, num_key_value_heads=4, head_dim=256,
                                  query_pre_attn_scalar=256, **sizes)  # fmt: skip
    folder = checkpoints.hf_folder(tmp_path / "model", "gemma3", model=made)
    config = {"model_type": "gemma3", "text_config": dict(sizes, model_type="gemma3_text"), "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(folder)
    program = build_model(checkpoint.config, checkpoint.weights).program
    tokens = list(range(40, 90))
    got = Driver(executor_factory(program), num_pages=NUM_PAGES).run(tokens)
    assert_close(got, transformers_oracle.logits(made, tokens, torch.float16))


def test_only_the_rows_asked_for_get_logits(tiny, executor_factory):
    model = tiny("llama")
    driver = model.driver(executor_factory)
    a, b = model.tokens(9, 1), model.tokens(17, 2)
    last = driver.step({"a": a, "b": b}, all_logits=False)
    assert last["a"].shape == last["b"].shape == (1, model.model.vocab_size)
    assert_close(last["b"], model.driver(executor_factory).run(b)[-1:])


def test_a_copied_page_holds_the_same_keys_and_values(tiny, executor_factory):
    """Copy on write: a second sequence goes on from a copy of the first one's pages, and the first is left alone."""
    model = tiny("llama")
    prompt, left, right = model.tokens(20, 1), model.tokens(5, 2), model.tokens(5, 3)
    driver = model.driver(executor_factory)
    driver.step({"first": prompt})
    first = driver.sequences["first"]
    copies = [driver.free.pop() for _ in first.pages]
    driver.executor.copy_pages(list(zip(first.pages, copies)))
    driver.sequences["second"] = type(first)(copies, first.length)
    got = driver.step({"first": left, "second": right})
    assert_close(got["first"], model.driver(executor_factory).run(prompt + left)[20:])
    assert_close(got["second"], model.driver(executor_factory).run(prompt + right)[20:])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_eager_builder_runs_the_same_text(tiny, family):
    """One text, two builders: op by op on the reference backend, the logits are the recorded program's."""
    model = tiny(family)
    checkpoint = open_checkpoint(model.path)
    tokens = model.tokens(30)
    driver = model.driver(ReferenceExecutor, num_pages=NUM_PAGES)
    step = driver.inputs({0: tokens})
    eager = run_eagerly(checkpoint.config, checkpoint.weights, ReferenceBackend(NUM_PAGES), step)
    np.testing.assert_array_equal(eager, driver.executor.forward(step))
