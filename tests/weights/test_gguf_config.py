"""GGUF metadata becomes the config dict that the same model's config.json would be."""

import numpy as np
import pytest

from tests.support.checkpoints import gguf_file, make_model
from tests.support.gguf_writer import Tensor, edit_gguf
from tokenmill.errors import ModelFileError, UnsupportedModel
from tokenmill.weights.loader import open_checkpoint


@pytest.fixture
def path(tmp_path):
    return gguf_file(tmp_path / "m.gguf", "llama")


def config(path):
    return open_checkpoint(path).config


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_agrees_with_the_config_it_was_made_from(tmp_path, family):
    model = make_model(family)
    made = config(gguf_file(tmp_path / "m.gguf", family, model=model))
    theirs = model.config.to_dict()
    for key, value in made.items():
        if key in theirs and key not in ("rope_scaling", "attention_bias"):
            assert value == theirs[key], key
    rope = theirs["rope_parameters"]
    assert made["rope_theta"] == rope.get("full_attention", rope)["rope_theta"]
    if family == "gemma3":
        assert made["rope_local_base_freq"] == rope["sliding_attention"]["rope_theta"]
        assert made["layer_types"].count("full_attention") == 1
    assert made["model_type"] == theirs["model_type"]


REQUIRED = [
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.layer_norm_rms_epsilon",
]  # fmt: skip


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(path, key):
    with pytest.raises(ModelFileError, match=f"llama.{key}"):
        config(edit_gguf(path, path, remove=(f"llama.{key}",)))


@pytest.mark.parametrize("value", [0, -5, 1.5, "64", True, ["a"], np.uint64(1 << 63)])
@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count"])
def test_a_wrong_value_is_named(path, key, value):
    with pytest.raises(ModelFileError, match=f"llama.{key}"):
        config(edit_gguf(path, path, change={f"llama.{key}": value}))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "1", False])
@pytest.mark.parametrize("key", ["attention.layer_norm_rms_epsilon", "rope.freq_base"])
def test_a_wrong_number_is_named(path, key, value):
    with pytest.raises(ModelFileError, match=f"llama.{key}"):
        config(edit_gguf(path, path, change={f"llama.{key}": value}))


@pytest.mark.parametrize("arch", ["mamba", "", 7])
def test_unknown_architecture(path, arch):
    with pytest.raises(ModelFileError, match="architecture"):
        config(edit_gguf(path, path, change={"general.architecture": arch}))
    with pytest.raises(ModelFileError, match="architecture"):
        config(edit_gguf(path, path, remove=("general.architecture",)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("attention.clamp_kqv", 8.0),
        ("logit_scale", 0.5),
        ("attention.causal", False),
        ("attn_logit_softcapping", 50.0),
        ("attention.value_length", 8),
        ("rope.dimension_count", 8),
        ("expert_count", np.array([8, 8], np.int32)),
    ],
)
def test_what_changes_the_maths_and_is_not_understood_is_refused(path, key, value):
    with pytest.raises(UnsupportedModel, match=f"llama.{key}"):
        config(edit_gguf(path, path, change={f"llama.{key}": value}))


def test_neutral_values_are_fine(path):
    neutral = {"llama.expert_count": 0, "llama.attention.causal": True, "llama.logit_scale": 1.0}
    assert config(edit_gguf(path, path, change=neutral))["model_type"] == "llama"


def test_per_layer_arrays(path):
    same = {"llama.attention.head_count_kv": np.array([2, 2], np.int32)}
    assert config(edit_gguf(path, path, change=same))["num_key_value_heads"] == 2
    with pytest.raises(UnsupportedModel, match="head_count_kv"):
        config(edit_gguf(path, path, change={"llama.attention.head_count_kv": np.array([2, 4], np.int32)}))


def test_a_window_is_not_ignored(tmp_path, path):
    made = config(edit_gguf(path, path, change={"llama.attention.sliding_window": 64}))
    assert (made["model_type"], made["sliding_window"]) == ("mistral", 64)
    qwen = gguf_file(tmp_path / "q.gguf", "qwen3")
    with pytest.raises(UnsupportedModel, match="sliding_window"):
        config(edit_gguf(qwen, qwen, change={"qwen3.attention.sliding_window": 64}))
    gemma = gguf_file(tmp_path / "g.gguf", "gemma3")
    with pytest.raises(ModelFileError, match="sliding_window"):
        config(edit_gguf(gemma, gemma, remove=("gemma3.attention.sliding_window",)))


# ---- rope scaling


def test_linear_and_none(path):
    assert config(path)["rope_scaling"] is None
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert config(edit_gguf(path, path, change=linear))["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    no_type = edit_gguf(path, path, remove=("llama.rope.scaling.type",))
    assert config(no_type)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert config(edit_gguf(path, path, change={"llama.rope.scaling.type": "none"}))["rope_scaling"] is None
    with pytest.raises(UnsupportedModel, match="longrope"):
        config(edit_gguf(path, path, change={"llama.rope.scaling.type": "longrope"}))


def test_yarn(tmp_path):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
    path = gguf_file(tmp_path / "m.gguf", "qwen3", rope_parameters=rope)
    expected = {key: rope[key] for key in ("rope_type", "factor", "original_max_position_embeddings")}
    assert config(path)["rope_scaling"] == expected
    with pytest.raises(ModelFileError, match=r"rope.scaling.factor"):
        config(edit_gguf(path, path, remove=("qwen3.rope.scaling.factor",)))


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (2.0, 8.0)])
def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path, theta, factor, head_dim, low, high):
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": 8192, "rope_theta": theta}  # fmt: skip
    sizes = dict(head_dim=head_dim, num_hidden_layers=1, max_position_embeddings=131072)
    path = gguf_file(tmp_path / "m.gguf", "llama", rope_parameters=rope, **sizes)
    got = config(path)["rope_scaling"]
    assert got["rope_type"] == "llama3" and got["original_max_position_embeddings"] == 8192
    assert got["factor"] == pytest.approx(factor)
    # What matters is the angles: with few frequencies between, several low and high give the same ones.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    mine = LlamaConfig(head_dim=head_dim, rope_parameters=got | {"rope_theta": theta}, max_position_embeddings=131072)
    theirs = LlamaConfig(head_dim=head_dim, rope_parameters=rope, max_position_embeddings=131072)
    angles = [ROPE_INIT_FUNCTIONS["llama3"](c, "cpu")[0].numpy() for c in (mine, theirs)]
    assert np.allclose(*angles, rtol=1e-4)


def test_divisors_of_another_kind_are_refused(path):
    for values in (np.linspace(8, 1, 8), np.full(8, np.nan), np.zeros(8), np.array([1, 8] * 4)):
        with pytest.raises(ModelFileError, match="rope_freqs"):
            config(edit_gguf(path, path, tensors=lambda t, v=values: t | {"rope_freqs.weight": Tensor.f32(v)}))
    ones = {"rope_freqs.weight": Tensor.f32(np.ones(8))}
    assert config(edit_gguf(path, path, tensors=lambda t: t | ones))["rope_scaling"] is None


def test_gemma3_27b_scales_by_its_own_rule(tmp_path):
    path = gguf_file(tmp_path / "m.gguf", "gemma3", num_hidden_layers=62, hidden_size=16, intermediate_size=16)
    assert config(path)["query_pre_attn_scalar"] == 16 // 4


@pytest.mark.slow
def test_the_real_gemma(gemma3_path):
    made = config(gemma3_path)
    assert made["model_type"] == "gemma3_text" and made["tie_word_embeddings"]
    assert (made["hidden_size"], made["num_hidden_layers"], made["vocab_size"]) == (640, 18, 262144)
    assert (made["head_dim"], made["sliding_window"], made["query_pre_attn_scalar"]) == (256, 512, 256)
    assert (made["rope_theta"], made["rope_local_base_freq"]) == (1e6, 1e4)
    assert [i for i, kind in enumerate(made["layer_types"]) if kind == "full_attention"] == [5, 11, 17]
