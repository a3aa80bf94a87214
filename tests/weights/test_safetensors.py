"""Hugging Face folders: every shard, every byte range and every dtype is checked before a weight is used."""

import json
import struct
import time

import numpy as np
import pytest
import safetensors.numpy

from tests.support.checkpoints import hf_folder
from tokenmill.errors import ModelFileError, UnsupportedModel
from tokenmill.weights.loader import open_checkpoint
from tokenmill.weights.safetensors import INDEX, open_file, open_safetensors


def write(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def refused(path, *words, error=ModelFileError):
    started = time.monotonic()
    with pytest.raises(error) as raised:
        open_file(path)
    assert time.monotonic() - started < 1
    for word in (path.name, *words):
        assert str(word) in str(raised.value)


def test_reads_what_the_library_writes(tmp_path):
    made = {"z": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(4, np.float16), "empty": np.zeros((0, 3))}
    safetensors.numpy.save_file(made, tmp_path / "m.safetensors", metadata={"format": "pt"})
    _, tensors = open_file(tmp_path / "m.safetensors")
    assert set(tensors) == set(made)
    assert (tensors["z"].shape, tensors["z"].format) == ((2, 3), "F32")
    assert tensors["z"].data.tobytes() == made["z"].tobytes()


def test_order_of_names_and_of_data_may_differ(tmp_path):
    path = write(tmp_path / "m.safetensors", {"b": entry(begin=8, end=16), "a": entry()}, b"\1" * 8 + b"\2" * 8)
    _, tensors = open_file(path)
    assert tensors["a"].data.tobytes() == b"\1" * 8


# ---- headers that lie (BC-058)

DEEP = b"[" * 200_000
LIES = {
    "not JSON": (b"not json at all", b"", "JSON"),
    "an array": (b"[1, 2]", b"", "object"),
    "not UTF-8": (b'{"\xff": 1}', b"", "JSON"),
    "deep": (DEEP, b"", "JSON"),
    "duplicate": (b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2), bytes(8), "'a' appears twice"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
    "metadata a list": ({"__metadata__": ["a"]}, b"", "__metadata__"),
    "dtype F99": ({"a": entry("F99")}, bytes(8), "'a'", "F99"),
    "dtype bool": ({"a": entry("bool")}, bytes(8), "'a'", "bool"),
    "dtype a list": ({"a": entry([])}, bytes(8), "'a'"),
    "entry a number": ({"a": 3}, bytes(8), "'a'"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), "'a'"),
    "three offsets": ({"a": entry() | {"data_offsets": [0, 4, 8]}}, bytes(8), "'a'"),
    "reversed": ({"a": entry(begin=8, end=0)}, bytes(8), "'a'"),
    "negative": ({"a": entry(begin=-8, end=0)}, bytes(8), "'a'"),
    "fractional": ({"a": entry(shape=[2.0])}, bytes(8), "'a'"),
    "past the end": ({"a": entry(shape=[4], end=16)}, bytes(8), "'a'", "cut short"),
    "wrong byte count": ({"a": entry(shape=[3])}, bytes(8), "'a'", "12"),
    "overlap": ({"a": entry(), "b": entry(begin=4, end=12)}, bytes(12), "'b'", "overlaps"),
    "the same range": ({"a": entry(), "b": entry()}, bytes(8), "'b'", "overlaps"),
    "hole": ({"a": entry(), "b": entry(begin=12, end=20)}, bytes(20), "'b'", "hole of 4"),
    "hole at the start": ({"a": entry(begin=8, end=16)}, bytes(16), "'a'", "hole"),
    "bytes left over": ({"a": entry()}, bytes(9), "1 bytes longer"),
    "product 2^64": ({"a": entry(shape=[1 << 32, 1 << 32], end=0)}, b"", "'a'"),
    "product 2^62 F32": ({"a": entry(shape=[1 << 31, 1 << 31], end=0)}, b"", "'a'"),
    "shape of 40": ({"a": entry(shape=[1] * 40, end=4)}, bytes(4), "'a'"),
}


@pytest.mark.parametrize("case", LIES)
def test_lies_are_refused(tmp_path, case):
    header, data, *words = LIES[case]
    refused(write(tmp_path / "m.safetensors", header, data), *words)


@pytest.mark.parametrize("length", [0, 1, 3, 1 << 32, 1 << 63, (1 << 64) - 1, "size - 7", "size", 101 << 20])
def test_header_length(tmp_path, length):
    text = json.dumps({"a": entry()}).encode()
    size = 8 + len(text) + 8
    length = {"size - 7": size - 7, "size": size}.get(length, length)
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", length) + text + bytes(8))
    refused(path)


def test_header_over_the_limit_is_not_read(tmp_path):
    path = tmp_path / "m.safetensors"
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", 200 << 20))
        f.truncate(300 << 20)
    refused(path, "at most")


def test_a_million_tensors(tmp_path):
    piece = b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    header = b"{" + b",".join(piece % i for i in range(200_000)) + b"}"
    refused(write(tmp_path / "m.safetensors", header), "more than")
    refused(write(tmp_path / "m.safetensors", header + b" " * (64 << 20)), "at most")


def test_every_cut_is_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({"a": np.ones(5, np.float32), "b": np.ones(3, np.float16)}, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelFileError):
            open_file(path)


# ---- shards (BC-056)


class TestShards:
    @pytest.fixture
    def folder(self, tmp_path):
        folder = hf_folder(tmp_path / "m", "llama", shards=3)
        assert len(list(folder.glob("*.safetensors"))) >= 3
        return folder

    def shard(self, folder, number=1):
        return sorted(folder.glob("*.safetensors"))[number]

    def fails(self, folder, *words):
        started = time.monotonic()
        with pytest.raises(ModelFileError) as raised:
            open_checkpoint(folder)
        assert time.monotonic() - started < 1
        for word in words:
            assert word in str(raised.value)

    def edit(self, folder, change):
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    def test_whole(self, folder, tmp_path):
        checkpoint = open_checkpoint(folder)
        single = open_checkpoint(hf_folder(tmp_path / "single", "llama"))
        assert set(checkpoint.weights) == set(single.weights)
        assert all(np.array_equal(checkpoint.weights[n].data, single.weights[n].data) for n in single.weights)
        assert len(checkpoint.files) == 1 + len(list(folder.glob("*.safetensors")))

    def test_missing(self, folder):
        names = [self.shard(folder, i).name for i in (0, 1)]
        for name in names:
            (folder / name).unlink()
        self.fails(folder, *names)

    def test_cut(self, folder):
        shard = self.shard(folder)
        shard.write_bytes(shard.read_bytes()[:-1])
        self.fails(folder, shard.name, "cut short")

    def test_empty(self, folder):
        self.shard(folder).write_bytes(b"")
        self.fails(folder, self.shard(folder).name, "empty")

    def test_lfs_pointer(self, folder):
        self.shard(folder).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        self.fails(folder, self.shard(folder).name, "LFS")

    def test_index_names_a_tensor_no_shard_has(self, folder):
        self.edit(folder, lambda names: names.update({"model.extra.weight": self.shard(folder).name}))
        self.fails(folder, "model.extra.weight")

    def test_tensor_left_out_of_the_index(self, folder):
        self.edit(folder, lambda names: names.pop("model.norm.weight"))
        self.fails(folder, "model.norm.weight", "does not name")

    def test_tensor_in_another_shard_than_said(self, folder):
        where = json.loads((folder / INDEX).read_text())["weight_map"]["model.norm.weight"]
        other = next(p.name for p in folder.glob("*.safetensors") if p.name != where)
        self.edit(folder, lambda names: names.update({"model.norm.weight": other}))
        self.fails(folder, "model.norm.weight")

    @pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "", "..", "a\0b", 3, None])
    def test_index_may_only_name_files_of_its_folder(self, folder, name):
        self.edit(folder, lambda names: names.update({"model.norm.weight": name}))
        self.fails(folder, "model.norm.weight", "own folder")

    def test_index_names_a_file_too_long_to_exist(self, folder):
        self.edit(folder, lambda names: names.update({"model.norm.weight": "x" * 5000}))
        self.fails(folder, "lacks")

    @pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": []}', '{"weight_map": {}}', "<html>"])
    def test_index_is_nonsense(self, folder, text):
        (folder / INDEX).write_text(text)
        self.fails(folder, INDEX)

    def test_no_index(self, folder):
        (folder / INDEX).unlink()
        self.fails(folder, INDEX)


def test_pickles_are_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelFileError, match="pickles"):
        open_safetensors(tmp_path)


# ---- dtypes, shapes and names of a model (BC-057)


def rewrite(folder, change):
    """Edit the tensors of a single-file folder: change(dict of torch tensors)."""
    import safetensors.torch

    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path)


@pytest.mark.parametrize(("dtype", "format"), [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")])
def test_dtypes(tmp_path, dtype, format):
    checkpoint = open_checkpoint(hf_folder(tmp_path / "m", "llama", dtype=dtype))
    assert {w.format for w in checkpoint.weights.values() if len(w.shape) == 2} == {format}
    assert {w.format for w in checkpoint.weights.values() if len(w.shape) == 1} == {"F32"}


def test_dtypes_may_mix_and_disagree_with_the_config(tmp_path):
    import torch

    folder = hf_folder(tmp_path / "m", "llama", dtype="bfloat16")

    def change(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"].half()
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].float()
        tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 3e38
        tensors["model.layers.0.mlp.gate_proj.weight"] = torch.full((96, 64), torch.inf, dtype=torch.float16)

    rewrite(folder, change)
    weights = open_checkpoint(folder).weights
    assert (weights["lm_head"].format, weights["embed_tokens"].format) == ("F16", "F32")
    assert weights["layers.0.gate_proj"].format == "F16"


@pytest.mark.parametrize("dtype", ["float64", "int8", "float8_e4m3fn", "bool"])
def test_other_dtypes_are_refused_by_name(tmp_path, dtype):
    import torch

    folder = hf_folder(tmp_path / "m", "llama")
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].to(getattr(torch, dtype))}))
    with pytest.raises(UnsupportedModel, match=name):
        open_checkpoint(folder)


def test_wrong_shape_names_the_tensor(tmp_path):
    folder = hf_folder(tmp_path / "m", "llama")
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))
    with pytest.raises(ModelFileError, match=rf"{name}.*\(64, 96\).*\(96, 64\)"):
        open_checkpoint(folder)


def test_extra_and_missing_tensors(tmp_path):
    import torch

    folder = hf_folder(tmp_path / "m", "llama")
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    open_checkpoint(folder)  # a buffer of old exports, harmless
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.mlp.router.weight": torch.ones(8)}))
    with pytest.raises(UnsupportedModel, match="router"):
        open_checkpoint(folder)
    rewrite(folder, lambda tensors: tensors.pop("model.layers.0.mlp.router.weight"))
    rewrite(folder, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.ones(96, 64)}))
    with pytest.raises(UnsupportedModel, match=r"layers\.2"):
        open_checkpoint(folder)
    rewrite(folder, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    rewrite(folder, lambda tensors: [tensors.pop(f"model.layers.1.mlp.{n}_proj.weight") for n in ("up", "down")])
    with pytest.raises(ModelFileError, match=r"layers.1.up_proj.*layers.1.down_proj"):
        open_checkpoint(folder)


def test_a_needed_tensor_of_no_size(tmp_path):
    import torch

    folder = hf_folder(tmp_path / "m", "llama")
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(0)}))
    with pytest.raises(ModelFileError, match=r"model.norm.weight"):
        open_checkpoint(folder)


def test_quantised_folders_are_refused(tmp_path):
    folder = hf_folder(tmp_path / "m", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UnsupportedModel, match="gptq"):
        open_checkpoint(folder)


@pytest.mark.parametrize("head", ["absent", "equal", "different"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_or_not(tmp_path, tied, head, caplog):
    """The rule at the top of weights/loader.py; the legal ones as Transformers reads them."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = hf_folder(tmp_path / "m", "llama")

    def change(tensors):
        if head == "absent":
            del tensors["lm_head.weight"]
        elif head == "equal":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(folder, change)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    if not tied and head == "absent":
        with pytest.raises(ModelFileError, match="lm_head"):
            open_checkpoint(folder)
        return
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config["tie_word_embeddings"] == ("lm_head" not in checkpoint.weights)
    assert ("lm_head" in checkpoint.weights) == (head == "different" or not tied)
    assert bool(caplog.records) == (tied and head == "different")
    mine = checkpoint.weights["lm_head" if "lm_head" in checkpoint.weights else "embed_tokens"]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).lm_head.weight
    assert np.array_equal(mine.data.view(np.float32).reshape(mine.shape), theirs.detach().numpy())
