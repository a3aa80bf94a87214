"""open_checkpoint: one form of names, rows and norms whatever the file; every quirk and contradiction by name."""

import json
import os

import numpy as np
import pytest

from tests.support.checkpoints import FAMILIES, gguf_file, hf_folder, make_model
from tests.support.gguf_writer import Tensor, edit_gguf
from tokenmill.errors import ModelFileError, UnsupportedModel
from tokenmill.quant.formats import BLOCKS, dequantize, numbers
from tokenmill.weights.loader import open_checkpoint


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_and_gguf_give_the_same_weights(tmp_path, family):
    folder = open_checkpoint(hf_folder(tmp_path / "m", family))
    file = open_checkpoint(gguf_file(tmp_path / "m.gguf", family))
    assert set(folder.weights) == set(file.weights)
    for name, weight in folder.weights.items():
        assert np.array_equal(numbers(weight), numbers(file.weights[name])), name
    assert (folder.name, file.name) == ("m", "m")
    assert (folder.kind, file.kind) == ("hf", "gguf")
    assert (folder.folder, file.folder) == (folder.path, None)
    assert folder.metadata == {} and file.metadata["general.architecture"]
    for checkpoint in (folder, file):
        assert all(path.is_file() for path in checkpoint.files)
        assert all(w.data.dtype == np.uint8 and w.data.ndim == 1 for w in checkpoint.weights.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_canonical_names(tmp_path, family):
    weights = open_checkpoint(gguf_file(tmp_path / "m.gguf", family)).weights
    layer = {name.removeprefix("layers.1.") for name in weights if name.startswith("layers.1.")}
    expected = {"input_norm", "q_proj", "k_proj", "v_proj", "o_proj", "post_attention_norm"}
    expected |= {"gate_proj", "up_proj", "down_proj"}
    if family in ("qwen3", "gemma3"):
        expected |= {"q_norm", "k_norm"}
    if family == "gemma3":
        expected |= {"pre_feedforward_norm", "post_feedforward_norm"}
    if family == "qwen2":
        expected |= {"q_proj.bias", "k_proj.bias", "v_proj.bias"}
    assert layer == expected
    top = {name for name in weights if not name.startswith("layers.")}
    assert top == {"embed_tokens", "norm"} | ({"lm_head"} if family != "gemma3" else set())


@pytest.mark.parametrize("format", [f for f in BLOCKS if f not in ("F32", "BF16")])
def test_rows_move_whole_in_every_format(tmp_path, format):
    """Undoing ggml's row order on the stored bytes equals undoing it on the decoded numbers."""
    sizes = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    path = gguf_file(tmp_path / "m.gguf", "llama", format=format, **sizes)
    from tokenmill.weights.gguf import GGUFFile

    stored, weights = GGUFFile(path).tensors, open_checkpoint(path).weights
    for name, mine, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        info, weight = stored[f"blk.0.{name}.weight"], weights[f"layers.0.{mine}"]
        assert weight.format == format
        as_stored = dequantize(format, info.data, info.shape)
        halves = as_stored.reshape(heads, -1, 2, 256).swapaxes(1, 2).reshape(info.shape)
        assert np.array_equal(numbers(weight), halves)


def test_biases_move_with_their_rows(tmp_path):
    folder = open_checkpoint(hf_folder(tmp_path / "m", "llama", attention_bias=True))
    file = open_checkpoint(gguf_file(tmp_path / "m.gguf", "llama", attention_bias=True))
    for part in "qkvo":
        name = f"layers.1.{part}_proj"
        assert np.array_equal(numbers(folder.weights[name].bias), numbers(file.weights[name].bias))
    assert file.config["attention_bias"]


def test_gemma_norms_hold_their_multiplier(tmp_path):
    model = make_model("gemma3")
    checkpoint = open_checkpoint(hf_folder(tmp_path / "m", "gemma3", model=model, dtype="bfloat16"))
    stored = model.model.layers[0].self_attn.q_norm.weight.detach().float().numpy()
    assert np.array_equal(numbers(checkpoint.weights["layers.0.q_norm"]), 1 + stored)


def test_multimodal_gemma_gives_its_text_model(tmp_path):
    """model_type gemma3: text_config is pulled up, language_model. names are read, the vision tower is left."""
    import safetensors.torch
    import torch

    folder = hf_folder(tmp_path / "m", "gemma3")
    plain = open_checkpoint(folder)
    names = {
        "old": lambda n: f"language_model.{n}",
        "new": lambda n: n.replace("model.", "model.language_model.", 1),
    }
    for form, rename in names.items():
        made = tmp_path / form
        made.mkdir()
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        tensors = {rename(name): tensor for name, tensor in tensors.items()}
        tensors |= {"vision_tower.vision_model.x.weight": torch.ones(2), "multi_modal_projector.y": torch.ones(2)}
        safetensors.torch.save_file(tensors, made / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        outer = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": config, "vision_config": {"a": 1}}
        (made / "config.json").write_text(json.dumps(outer))
        checkpoint = open_checkpoint(made)
        assert checkpoint.config["model_type"] == "gemma3_text"
        assert set(checkpoint.weights) == set(plain.weights)


# ---- the head (BC-052)


def test_the_default_model_is_tied_and_mixed(smollm2_path):
    checkpoint = open_checkpoint(smollm2_path)
    assert checkpoint.config["tie_word_embeddings"] and "lm_head" not in checkpoint.weights
    assert checkpoint.weights["embed_tokens"].format == "Q8_0"
    assert checkpoint.weights["layers.0.q_proj"].format == "Q4_1"
    assert len(checkpoint.weights) == 272
    assert checkpoint.config["rms_norm_eps"] == 1e-5 and checkpoint.config["rope_theta"] == 100000.0


@pytest.mark.parametrize("same", [True, False])
def test_a_stored_head_is_used(tmp_path, same):
    path = gguf_file(tmp_path / "m.gguf", "llama", tie_word_embeddings=True)

    def change(tensors):
        embedding = tensors["token_embd.weight"]
        head = embedding if same else Tensor.f32(embedding.decoded() + 1)
        return tensors | {"output.weight": head}

    assert open_checkpoint(path).config["tie_word_embeddings"]
    checkpoint = open_checkpoint(edit_gguf(path, path, tensors=change))
    assert not checkpoint.config["tie_word_embeddings"]
    difference = numbers(checkpoint.weights["lm_head"]) - numbers(checkpoint.weights["embed_tokens"])
    assert np.allclose(difference, 0 if same else 1, atol=1e-5)


# ---- what is missing, superfluous or misshapen


@pytest.mark.parametrize("family", FAMILIES)
def test_each_missing_tensor_is_named(tmp_path, family):
    path = gguf_file(tmp_path / "m.gguf", family)
    for name in ("blk.1.ffn_up.weight", "output_norm.weight", "blk.0.attn_q.weight"):
        broken = edit_gguf(path, tmp_path / "b.gguf", tensors=lambda t, n=name: {k: t[k] for k in t if k != n})
        with pytest.raises(ModelFileError, match=r"no tensor for '(layers.1.up_proj|norm|layers.0.q_proj)'"):
            open_checkpoint(broken)


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.2.ffn_up.weight", "blk.00.ffn_up.weight", "x"])
def test_unknown_tensors_are_named(tmp_path, name):
    path = gguf_file(tmp_path / "m.gguf", "llama")
    more = Tensor.f32(np.zeros((96, 64)))
    with pytest.raises(UnsupportedModel, match=name):
        open_checkpoint(edit_gguf(path, path, tensors=lambda t: t | {name: more}))


def test_a_bias_in_one_layer_only(tmp_path):
    path = gguf_file(tmp_path / "m.gguf", "qwen2")
    with pytest.raises(ModelFileError, match=r"layers.1.k_proj.bias"):
        open_checkpoint(edit_gguf(path, path, tensors=lambda t: {k: t[k] for k in t if k != "blk.1.attn_k.bias"}))


def test_wrong_shape_names_file_tensor_and_both_shapes(tmp_path):
    path = gguf_file(tmp_path / "m.gguf", "llama")
    wrong = {"blk.1.ffn_up.weight": Tensor.f32(np.zeros((95, 64)))}
    with pytest.raises(ModelFileError, match=r"m.gguf.*blk.1.ffn_up.weight.*\(95, 64\).*\(96, 64\)"):
        open_checkpoint(edit_gguf(path, path, tensors=lambda t: t | wrong))


# ---- paths


@pytest.mark.parametrize("path", ["", "x" * 5000, "a\0b", "~nobody-of-that-name/m", "/proc/self/mem", "/root/../etc"])
def test_strange_paths_are_refused_too(path):
    with pytest.raises(ModelFileError):
        open_checkpoint(path)


def test_paths_that_are_not_models(tmp_path):
    with pytest.raises(ModelFileError, match="does not exist"):
        open_checkpoint(tmp_path / "absent.gguf")
    with pytest.raises(ModelFileError, match=r"neither config.json \(a Hugging Face folder\) nor a .gguf file"):
        open_checkpoint(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="a pipe"):
        open_checkpoint(tmp_path / "pipe")
    folder = hf_folder(tmp_path / "m", "llama")
    with pytest.raises(ModelFileError, match="give the folder"):
        open_checkpoint(folder / "model.safetensors")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(ModelFileError, match="a pipe"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "empty"),
        ("[]", "not a JSON object"),
        ("{", "not JSON"),
        ("{}", "model_type None"),
        ('{"model_type": "mamba"}', "mamba"),
        ('{"model_type": ["llama"]}', "llama"),
        ('{"model_type": "llama", "model_type": "llama"}', "appears twice"),
        ('{"model_type": "llama", "tie_word_embeddings": "yes"}', "tie_word_embeddings"),
    ],
)
def test_config_json_is_nonsense(tmp_path, text, word):
    folder = hf_folder(tmp_path / "m", "llama")
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=word):
        open_checkpoint(folder)


@pytest.mark.parametrize("value", [0, -1, 1.5, "64", None, True, 1 << 40, [64]])
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_sizes_in_config_json_are_checked(tmp_path, key, value):
    folder = hf_folder(tmp_path / "m", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ModelFileError, match=key):
        open_checkpoint(folder)


def test_a_billion_layers_cost_nothing(tmp_path):
    folder = hf_folder(tmp_path / "m", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2_000_000_000}))
    with pytest.raises(ModelFileError, match="2000000000 layers"):
        open_checkpoint(folder)


def test_the_name_of_the_folder_one_stands_in(tmp_path, monkeypatch):
    monkeypatch.chdir(hf_folder(tmp_path / "mine", "llama"))
    assert open_checkpoint(".").name == "mine"


# ---- the digest


def test_digest_names_the_weights(tmp_path):
    path = gguf_file(tmp_path / "a.gguf", "llama", hidden_size=256, intermediate_size=512)
    digest = open_checkpoint(path).digest
    assert len(digest) == 32 and int(digest, 16)
    (tmp_path / "b.gguf").write_bytes(path.read_bytes())
    assert open_checkpoint(tmp_path / "b.gguf").digest == digest, "the file's name does not matter"
    other = gguf_file(tmp_path / "c.gguf", "llama", seed=1, hidden_size=256, intermediate_size=512)
    assert open_checkpoint(other).digest != digest
    theta = edit_gguf(path, tmp_path / "d.gguf", change={"llama.rope.freq_base": 5000.0})
    assert open_checkpoint(theta).digest != digest, "the same weights computed otherwise are another model"


def test_digest_and_opening_mark_nothing_as_used(tmp_path):
    checkpoint = open_checkpoint(gguf_file(tmp_path / "m.gguf", "qwen2"))
    assert checkpoint.digest
    assert checkpoint.weights.used == set()
