"""load_tokenizer on whole models: a folder and its GGUF agree, and an edited header is caught."""

from __future__ import annotations

import json

import pytest

from tests.support.checkpoints import gguf_file, hf_folder, make_model
from tokenmill.errors import ModelFileError, UnsupportedModel
from tokenmill.text.chat import chat_to_ids
from tokenmill.text.tokenizer import load_tokenizer
from tokenmill.weights.loader import open_checkpoint

from .test_gguf_tokenizer import STRINGS

HI = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    model = make_model("llama")
    return gguf_file(path / "m.gguf", "llama", model=model), hf_folder(path / "m", "llama", model=model)


def load(path):
    return load_tokenizer(open_checkpoint(path))


def test_a_folder_and_its_gguf_give_the_same_ids(files):
    gguf, folder = map(load, files)
    for text in STRINGS:
        assert gguf.encode(text) == folder.encode(text)
        assert gguf.decode(gguf.encode(text)) == folder.decode(folder.encode(text))
    assert chat_to_ids(gguf, HI) == chat_to_ids(folder, HI)
    assert gguf.eos_token_ids == folder.eos_token_ids
    assert (gguf.bos_token_id, gguf.add_bos) == (folder.bos_token_id, folder.add_bos)


@pytest.mark.parametrize("add_bos", [True, False])
def test_add_bos_means_the_same_in_both(files, tmp_path, add_bos):
    gguf_path, folder_path = files
    data = gguf_path.read_bytes()
    key = b"tokenizer.ggml.add_bos_token" + (7).to_bytes(4, "little")
    assert data.count(key) == 1
    at = data.index(key) + len(key)
    edited = tmp_path / "edited.gguf"
    edited.write_bytes(data[:at] + bytes([add_bos]) + data[at + 1 :])
    config = folder_path / "tokenizer_config.json"
    kept = config.read_text()
    try:
        config.write_text(json.dumps(json.loads(kept) | {"add_bos_token": add_bos}))
        gguf, folder = load(edited), load(folder_path)
    finally:
        config.write_text(kept)
    assert gguf.encode("hello") == folder.encode("hello")
    assert (gguf.encode("hello")[0] == gguf.bos_token_id) is add_bos
    assert chat_to_ids(gguf, HI) == chat_to_ids(folder, HI)


def test_an_edited_header_is_refused_by_name(files, tmp_path):
    data = files[0].read_bytes()
    edited = tmp_path / "edited.gguf"
    edited.write_bytes(data.replace(b"smollm", b"nonsen"))
    with pytest.raises(UnsupportedModel, match="'nonsen'"):
        load(edited)
    edited.write_bytes(data.replace(b"\x04\0\0\0\0\0\0\0gpt2", b"\x04\0\0\0\0\0\0\0gpt9"))
    with pytest.raises(UnsupportedModel, match="'gpt9'"):
        load(edited)
    edited.write_bytes(data.replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.mergez"))
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.merges"):
        load(edited)
