"""config.json is read typed and loud: both forms give one Config, and what is not understood is refused by name."""

from __future__ import annotations

import dataclasses
import json
import logging
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import checkpoints
from tokenmill.errors import UnsupportedModel
from tokenmill.models import gemma3, llama, mistral, qwen2, qwen3
from tokenmill.models.hf_config import RopeParameters, read_config
from tokenmill.models.registry import FAMILIES, build_model
from tokenmill.models.rope import make_rope
from tokenmill.program import Weights
from tokenmill.weights.loader import open_checkpoint

MODULES = {"llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3, "gemma3": gemma3}

LLAMA = dict(
    model_type="llama", vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-5, hidden_act="silu",
)  # fmt: skip
QWEN2 = LLAMA | dict(model_type="qwen2")
MISTRAL = LLAMA | dict(model_type="mistral", sliding_window=16)
QWEN3 = LLAMA | dict(model_type="qwen3", head_dim=32)
GEMMA3 = dict(
    model_type="gemma3_text", hidden_size=64, intermediate_size=96, num_hidden_layers=7, sliding_window=16,
    rope_theta=1e6, rope_local_base_freq=1e4,
)  # fmt: skip


# As published by their makers, less the numbers of special tokens.
PUBLISHED = {
    "SmolLM2-135M-Instruct": """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "hidden_act": "silu",
        "attention_dropout": 0.0, "hidden_size": 576, "initializer_range": 0.0417, "intermediate_size": 1536,
        "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false, "model_type": "llama",
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.42.3",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": true, "vocab_size": 49152}""",
    "Llama-3.2-1B": """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0,
        "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true,
        "vocab_size": 128256}""",
    "Mistral-7B-v0.1": """{"architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": true, "vocab_size": 32000}""",
    "Qwen2.5-0.5B-Instruct": """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu",
        "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.43.1", "use_cache": true,
        "use_sliding_window": false, "vocab_size": 151936}""",
    "Qwen3-0.6B": """{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}""",
    "gemma-3-1b-it": """{"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attn_logit_softcapping": null, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
        "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": null,
        "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
        "use_cache": true, "vocab_size": 262144}""",
    "gemma-3-4b-it, text_config": """{"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}""",
}


# ---- both forms


def test_transformers_4_and_5_say_the_same():
    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    old = LLAMA | dict(rope_theta=500000.0, rope_scaling=dict(scaling, rope_type="llama3"), torch_dtype="bfloat16")
    older = LLAMA | dict(rope_theta=500000.0, rope_scaling=dict(scaling, type="llama3"))
    new = LLAMA | dict(rope_parameters=dict(scaling, rope_type="llama3", rope_theta=500000.0), dtype="bfloat16")
    assert read_config(llama.Config, old) == read_config(llama.Config, older) == read_config(llama.Config, new)
    assert read_config(llama.Config, new).rope.rope_theta == 500000.0


def test_gemma_of_transformers_4_and_5_say_the_same():
    types = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    old = GEMMA3 | dict(sliding_window_pattern=6, rope_scaling=dict(rope_type="linear", factor=8.0))
    new = GEMMA3 | dict(
        layer_types=types,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
        ),
    )
    del new["rope_theta"], new["rope_local_base_freq"]
    cfg = read_config(gemma3.Config, old)
    assert cfg == read_config(gemma3.Config, new)
    assert cfg.windows == (16, 16, 16, 16, 16, 0, 16)
    assert (cfg.rope.rope_type, cfg.rope.rope_theta) == ("linear", 1e6)
    assert (cfg.local_rope.rope_type, cfg.local_rope.rope_theta) == ("default", 1e4)


def test_gemma_leaves_out_its_class_defaults():
    """As google/gemma-3-4b-it's text_config does."""
    cfg = read_config(gemma3.Config, GEMMA3)
    assert (cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim, cfg.vocab_size) == (8, 4, 256, 262_208)
    assert cfg.query_pre_attn_scalar == 256.0


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_what_transformers_saves_is_read_without_a_warning(tiny, family, caplog):
    config = json.loads((tiny(family).path / "config.json").read_text())
    with caplog.at_level(logging.WARNING):
        read_config(MODULES[family].Config, config)
    assert not caplog.records


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_without_a_warning(name, caplog):
    config = json.loads(PUBLISHED[name])
    module = import_module(f"tokenmill.models.{FAMILIES[config['model_type']]}")
    with caplog.at_level(logging.WARNING):
        read_config(module.Config, config)
    assert not caplog.records


def test_head_dim_and_kv_heads_follow_where_older_files_leave_them_out():
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    cfg = read_config(llama.Config, config)
    assert (cfg.head_dim, cfg.num_key_value_heads) == (16, 4)
    with pytest.raises(UnsupportedModel, match="hidden_size 64 does not divide into num_attention_heads 3"):
        read_config(llama.Config, config | dict(num_attention_heads=3))


# ---- windows


@pytest.mark.parametrize(
    ("kind", "config", "windows"),
    (
        (mistral, MISTRAL, (16, 16)),
        (mistral, MISTRAL | dict(sliding_window=None), (0, 0)),
        (qwen2, QWEN2 | dict(sliding_window=8, use_sliding_window=False, max_window_layers=0), (0, 0)),
        (qwen2, QWEN2 | dict(sliding_window=None, use_sliding_window=False), (0, 0)),
        (qwen2, QWEN2 | dict(sliding_window=8, use_sliding_window=True, max_window_layers=1), (0, 8)),
        (qwen2, QWEN2 | dict(sliding_window=8, use_sliding_window=True, max_window_layers=0), (8, 8)),
        (qwen2, QWEN2 | dict(sliding_window=8, use_sliding_window=True), (0, 0)),  # from layer 28 on
        (
            qwen3,
            QWEN3
            | dict(use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
            (8, 0),
        ),
        (gemma3, GEMMA3 | dict(sliding_window_pattern=3), (16, 16, 0, 16, 16, 0, 16)),
    ),
)
def test_windows_of_the_layers(kind, config, windows):
    assert read_config(kind.Config, config).windows == windows


# ---- refusals: (family, change, what the message must name)

REFUSED = (
    (llama, LLAMA, dict(hidden_act="gelu"), "hidden_act = 'gelu'"),
    (llama, LLAMA, dict(hidden_act=None), "hidden_act"),
    (llama, LLAMA, dict(vocab_size="320"), "vocab_size = '320' should be an int"),
    (llama, LLAMA, dict(num_hidden_layers=0), "num_hidden_layers = 0"),
    (llama, LLAMA, dict(num_hidden_layers=True), "num_hidden_layers = True"),
    (llama, LLAMA, dict(num_hidden_layers=2.0), "num_hidden_layers = 2.0"),
    (llama, LLAMA, dict(rms_norm_eps=float("nan")), "rms_norm_eps = nan"),
    (llama, LLAMA, dict(rms_norm_eps=-1e-5), "rms_norm_eps = -1e-05"),
    (llama, LLAMA, dict(rope_theta=0), "rope_theta = 0"),
    (llama, LLAMA, dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)), "rope_type = 'dynamic'"),
    (llama, LLAMA, dict(rope_scaling=dict(type="longrope", factor=2.0)), "rope_type = 'longrope'"),
    (llama, LLAMA, dict(rope_scaling=dict(type="linear")), "'linear' needs factor"),
    (llama, LLAMA, dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "needs low_freq_factor"),
    (llama, LLAMA, dict(rope_scaling=dict(rope_type="default", mrope_section=[16, 24])), "mrope_section"),
    (
        llama,
        LLAMA,
        dict(rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0)),
        "high_freq_factor = 4.0 should be more than low_freq_factor 4.0",
    ),
    (llama, LLAMA, dict(rope_theta=1), "rope_theta = 1.0 should be more than 1"),
    (llama, LLAMA, dict(rope_scaling=[]), "rope_scaling = []"),
    (llama, LLAMA, dict(rope_scaling=dict(rope_type="linear", factor="2")), "factor = '2'"),
    (llama, LLAMA, dict(attention_bias="yes"), "attention_bias = 'yes'"),
    (llama, LLAMA, dict(rope_interleaved=True), "rope_interleaved = True"),
    (llama, LLAMA, dict(sliding_window=4096), "sliding_window = 4096"),
    (llama, LLAMA, dict(quantization_config=dict(quant_method="awq")), "quantization_config"),
    (llama, LLAMA, dict(num_local_experts=8), "num_local_experts = 8"),
    (llama, LLAMA, dict(residual_multiplier=0.22), "residual_multiplier = 0.22"),
    (mistral, MISTRAL, dict(num_hidden_layers=2**40), "num_hidden_layers = 1099511627776 is more than"),
    (qwen2, QWEN2, dict(num_hidden_layers=2**40), "num_hidden_layers = 1099511627776 is more than"),
    (mistral, MISTRAL, dict(sliding_window=0), "sliding_window = 0"),
    (mistral, MISTRAL, dict(attention_bias=True), "attention_bias = True"),
    (qwen2, QWEN2, dict(use_sliding_window=True, max_window_layers=0), "sliding_window is not given"),
    (qwen2, QWEN2, dict(layer_types=["sliding_attention"] * 2, sliding_window=8), "use_sliding_window = False"),
    (qwen2, QWEN2, dict(layer_types=["full_attention"]), "layer_types has 1 entries for 2 layers"),
    (qwen2, QWEN2, dict(layer_types=["full_attention", "chunked_attention"]), "'chunked_attention'"),
    (qwen3, QWEN3, dict(head_dim=None), "head_dim"),
    (gemma3, GEMMA3, dict(hidden_activation="gelu"), "hidden_activation = 'gelu'"),
    (gemma3, GEMMA3, dict(final_logit_softcapping=30.0), "final_logit_softcapping = 30.0"),
    (gemma3, GEMMA3, dict(attn_logit_softcapping=50.0), "attn_logit_softcapping = 50.0"),
    (gemma3, GEMMA3, dict(use_bidirectional_attention=True), "use_bidirectional_attention = True"),
    (gemma3, GEMMA3, dict(rope_parameters=dict(rope_type="default", rope_theta=1e4)), "for each layer type"),
)


@pytest.mark.parametrize(("kind", "config", "change", "message"), REFUSED, ids=[r[3] for r in REFUSED])
def test_what_is_not_understood_is_refused_by_name(kind, config, change, message):
    read_config(kind.Config, config)
    with pytest.raises(UnsupportedModel) as refusal:
        read_config(kind.Config, config | change)
    assert message in str(refusal.value)


ODD = st.sampled_from(
    [None, True, 0, 1, 2, 7, -1, 2**40, 0.0, 0.5, 1e-9, 1e30, float("nan"), float("inf"), "", "x", [], {}]
)
KEYS = sorted({*LLAMA, *QWEN2, *GEMMA3, "head_dim", "rope_scaling", "layer_types", "use_sliding_window",
               "max_window_layers", "partial_rotary_factor", "sliding_window_pattern"} - {"model_type"})  # fmt: skip
ROPE_KEYS = [field.name for field in dataclasses.fields(RopeParameters)]
KINDS_OF_ROPE = st.sampled_from(["default", "linear", "llama3", "yarn", "dynamic"])


@settings(max_examples=200, deadline=None)
@given(
    base=st.sampled_from([(llama, LLAMA), (mistral, MISTRAL), (qwen2, QWEN2), (qwen3, QWEN3), (gemma3, GEMMA3)]),
    changes=st.dictionaries(st.sampled_from(KEYS), ODD, max_size=3),
    rope=st.none() | st.dictionaries(st.sampled_from(ROPE_KEYS), ODD, max_size=4),
    kind=KINDS_OF_ROPE,
)
def test_a_config_is_read_or_refused_and_nothing_else(base, changes, rope, kind):
    """Whatever stands in it: a Config whose angles are finite numbers, or UnsupportedModel."""
    module, config = base
    config = config | changes
    if rope is not None:
        config["rope_scaling"] = {"rope_type": kind, "factor": 4.0} | rope
    try:
        cfg = read_config(module.Config, config)
        if cfg.head_dim > 4096 or cfg.num_hidden_layers > 4096:
            return
        assert np.isfinite(make_rope(cfg.rope, cfg.head_dim).inv_freq).all()
    except UnsupportedModel as refusal:
        assert str(refusal)


@pytest.mark.parametrize("key", sorted(LLAMA.keys() - {"model_type", "num_key_value_heads"}))
def test_a_missing_field_is_named(key):
    with pytest.raises(UnsupportedModel, match=f"no '{key}', which llama needs"):
        read_config(llama.Config, {k: v for k, v in LLAMA.items() if k != key})


def test_unknown_keys_are_warned_of_once(caplog):
    with caplog.at_level(logging.WARNING):
        read_config(llama.Config, LLAMA | dict(zebra=1, aardvark=2, use_cache=True, eos_token_id=[1, 2]))
    assert [record.message for record in caplog.records] == ["config of llama: ignoring unknown keys aardvark, zebra"]


# ---- the registry


@pytest.mark.parametrize("model_type", ("mamba", "", None, "gemma3", "../llama"))
def test_an_unknown_model_type_is_refused_with_what_there_is(model_type):
    with pytest.raises(UnsupportedModel) as refusal:
        build_model({"model_type": model_type}, Weights({}))
    assert repr(model_type) in str(refusal.value)
    assert all(name in str(refusal.value) for name in FAMILIES)


def test_a_tensor_left_over_or_missing_is_named(tiny):
    checkpoint = open_checkpoint(tiny("llama").path)
    tensors = dict(checkpoint.tensors)
    tensors["layers.2.q_proj"] = tensors["layers.1.q_proj"]
    with pytest.raises(UnsupportedModel, match=r"1 tensors have no place in this model: layers\.2\.q_proj"):
        build_model(checkpoint.config, Weights(tensors))
    del tensors["layers.2.q_proj"], tensors["layers.1.o_proj"]
    with pytest.raises(UnsupportedModel, match=r"no tensor for 'layers\.1\.o_proj'"):
        build_model(checkpoint.config, Weights(tensors))


def test_the_context_is_what_the_model_was_made_for(tiny):
    yarn = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=512)
    assert tiny("llama").model.context_length == 512
    assert tiny("qwen2", rope_parameters=yarn).model.context_length == 2048
