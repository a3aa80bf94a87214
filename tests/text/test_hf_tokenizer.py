"""Hugging Face folders: the same model, the same ids, as its GGUF form and as Transformers give."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import pytest

from tests.support.checkpoints import CHAT_TEMPLATE, tokenizer
from tokenmill.errors import ModelFileError, UnsupportedModel
from tokenmill.text.chat import chat_to_ids, render_chat
from tokenmill.text.gguf_tokenizer import gguf_tokenizer
from tokenmill.text.hf_tokenizer import hf_tokenizer
from tokenmill.text.tokenizer import load_tokenizer

from .conftest import byte_level_metadata, sentencepiece_metadata
from .test_gguf_tokenizer import STRINGS

HI = [{"role": "user", "content": "hi"}]


def folder_of(path, backend=None, config=None, **files):
    """A folder with tokenizer.json and the given JSON files (dots as __)."""
    (backend or tokenizer()).save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings | (config or {})))
    for name, value in files.items():
        (path / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_folder_and_gguf_give_the_same_ids(tmp_path):
    folder = hf_tokenizer(folder_of(tmp_path))
    gguf = gguf_tokenizer(byte_level_metadata())
    for text in STRINGS:
        ids = gguf.encode(text)
        assert folder.encode(text) == ids
        assert folder.decode(ids) == gguf.decode(ids)
        assert folder.decode(ids, skip_special_tokens=False) == gguf.decode(ids, skip_special_tokens=False) == text
    assert chat_to_ids(folder, HI) == chat_to_ids(gguf, HI)
    assert [folder.token_bytes(i) for i in range(320)] == [gguf.token_bytes(i) for i in range(320)]
    assert folder.vocab_size == gguf.vocab_size and folder.bos_token_id == gguf.bos_token_id == 1


def test_the_same_ids_as_transformers(tmp_path):
    from transformers import PreTrainedTokenizerFast

    folder = folder_of(tmp_path, config={"tokenizer_class": "PreTrainedTokenizerFast"})
    theirs, ours = (
        PreTrainedTokenizerFast.from_pretrained(folder),
        load_tokenizer(SimpleNamespace(kind="hf", folder=folder, config={}, metadata={})),
    )
    for text in STRINGS:
        assert ours.encode(text) == theirs.encode(text)
    assert render_chat(ours, HI) == theirs.apply_chat_template(HI, tokenize=False, add_generation_prompt=True)
    assert chat_to_ids(ours, HI) == theirs.apply_chat_template(HI, add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize(("add_bos", "begins"), [(True, True), (False, False), (None, False)])
def test_completions_follow_add_bos_and_chats_have_one(tmp_path, add_bos, begins):
    ours = hf_tokenizer(folder_of(tmp_path, config={} if add_bos is None else {"add_bos_token": add_bos}))
    gguf = gguf_tokenizer(byte_level_metadata(add_bos_token=add_bos))
    for text in ("hello", "<|im_start|>hello", ""):
        assert ours.encode(text) == gguf.encode(text)
    assert (ours.encode("hello")[0] == 1) is begins
    assert chat_to_ids(ours, HI) == chat_to_ids(gguf, HI)
    assert chat_to_ids(ours, HI)[:2].count(1) == 1


def test_bos_from_the_post_processor(tmp_path):
    """As Llama 3's tokenizer.json has it."""
    from tokenizers.processors import TemplateProcessing

    backend = tokenizer()
    backend.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    ours = hf_tokenizer(folder_of(tmp_path, backend))
    assert ours.encode("hello") == [1, *ours.encode("hello", add_special_tokens=False)]
    assert chat_to_ids(ours, HI).count(1) == 2  # the user's turn and the assistant's: no third
    assert not hf_tokenizer(folder_of(tmp_path, backend, config={"add_bos_token": False})).add_bos


def test_truncation_and_padding_left_from_training_are_undone(tmp_path):
    backend = tokenizer()
    backend.enable_truncation(8)
    backend.enable_padding(length=16)
    ours = hf_tokenizer(folder_of(tmp_path, backend))
    assert len(ours.encode("x" * 100)) == 100 and len(ours.encode("x")) == 1


@pytest.mark.parametrize(
    ("tokenizer_config", "generation", "config", "ends"),
    [
        ({}, {}, {}, {0, 2}),
        ({}, {"eos_token_id": [0, 2, 7]}, {"eos_token_id": 5}, {0, 2, 5, 7}),
        ({}, {"eos_token_id": 9}, {"eos_token_id": [10, 11]}, {0, 2, 9, 10, 11}),
        ({"eos_token": {"content": "hello"}}, {}, {"eos_token_id": 0}, {0, 2, 268}),
        ({"eos_token": None}, {}, {"eos_token_id": None}, {0, 2}),
        ({}, {"eos_token_id": [10**9, -1, "x", True, None]}, {}, {0, 2}),
    ],
)
def test_end_tokens_are_the_union_of_all_files(tmp_path, tokenizer_config, generation, config, ends):
    folder = folder_of(tmp_path, config=tokenizer_config, generation_config=generation)
    ours = hf_tokenizer(folder, config)
    if tokenizer_config.get("eos_token"):
        ends = {0, 2, ours.token_id("hello")}
    assert ours.eos_token_ids == ends


def test_templates_where_people_keep_them(tmp_path):
    assert hf_tokenizer(folder_of(tmp_path)).chat_template == CHAT_TEMPLATE
    listed = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}, {"name": 5}, "x"]
    assert hf_tokenizer(folder_of(tmp_path, config={"chat_template": listed})).chat_templates == {
        "default": "A",
        "tool_use": "B",
    }
    folder = folder_of(tmp_path, config={"chat_template": None}, chat_template={"chat_template": "C"})
    assert hf_tokenizer(folder).chat_template == "C"
    (folder / "chat_template.jinja").write_text("D")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("E")
    assert hf_tokenizer(folder).chat_templates == {"default": "D", "rag": "E"}


def test_special_tokens_for_templates(tmp_path):
    config = {"bos_token": {"content": "<|im_start|>", "lstrip": False}, "unk_token": None}
    folder = folder_of(tmp_path, config=config, special_tokens_map={"pad_token": "<|endoftext|>", "bos_token": "x"})
    ours = hf_tokenizer(folder)
    assert ours.template_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    assert ours.special_token_ids == {0, 1, 2}


def test_a_folder_with_a_sentencepiece_model_alone(tmp_path, sp_file, spm):
    (tmp_path / "tokenizer.model").write_bytes(sp_file)
    ours = hf_tokenizer(tmp_path)
    for text in ("the world", "<s>the", " x  y"):
        assert ours.encode(text) == spm.encode(text)
        assert ours.decode(ours.encode(text)) == spm.decode(spm.encode(text))
    assert ours.add_bos and ours.eos_token_ids == {2} == spm.eos_token_ids


def test_a_sentencepiece_style_tokenizer_json(tmp_path, sp_file, spm):
    """Llama-2's layout: spaces as ▁, bytes as <0x..>, one leading space dropped."""
    import sentencepiece
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers.tokenization_utils_base import generate_merges

    sp = sentencepiece.SentencePieceProcessor(model_proto=sp_file)
    vocab = {sp.id_to_piece(i): i for i in range(sp.get_piece_size())}
    scores = {sp.id_to_piece(i): sp.get_score(i) for i in range(sp.get_piece_size())}
    backend = Tokenizer(
        models.BPE(vocab, generate_merges(vocab, scores), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    ours = hf_tokenizer(
        folder_of(tmp_path, backend, config={"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})
    )
    for text in ("the world", "  two", "漢字 🫠", "a<s>b", ""):
        ids = spm.encode(text)
        assert ours.encode(text) == ids
        assert [ours.token_bytes(i) for i in ids] == [spm.token_bytes(i) for i in ids]
        assert ours.decode(ids) == spm.decode(ids)
    assert ours.eos_token_ids == spm.eos_token_ids
    assert sentencepiece_metadata(sp_file)["tokenizer.ggml.bos_token_id"] == ours.bos_token_id


@pytest.mark.parametrize("name", ["tokenizer_config", "generation_config", "special_tokens_map"])
@pytest.mark.parametrize("text", ["{", "[]", "null", "\x00", "[" * 100_000])
def test_a_damaged_file_is_named(tmp_path, name, text):
    folder = folder_of(tmp_path)
    (folder / f"{name}.json").write_text(text)
    with pytest.raises(ModelFileError, match=f"{name}.json"):
        hf_tokenizer(folder)


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"version": "1.0", "model": {"type": "Nope"}}'])
def test_a_damaged_tokenizer_json_is_named(tmp_path, text):
    folder = folder_of(tmp_path)
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        hf_tokenizer(folder)


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(ModelFileError, match=r"no tokenizer\.json"):
        hf_tokenizer(tmp_path)


def test_a_decoder_without_bytes_of_its_own_is_refused(tmp_path):
    from tokenizers import decoders

    backend = tokenizer()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        hf_tokenizer(folder_of(tmp_path, backend))
    for decoder in (
        decoders.Replace("_", " "),
        decoders.Metaspace("_"),
        decoders.Sequence([decoders.Replace("▁", "x")]),
    ):
        backend.decoder = decoder
        with pytest.raises(UnsupportedModel, match=r"Replace|Metaspace"):
            hf_tokenizer(folder_of(tmp_path, backend))


def test_a_metaspace_decoder_is_read(tmp_path, sp_file, spm):
    """Newer Llama layouts: the same bytes, the first space dropped only where one was put."""
    import sentencepiece
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.tokenization_utils_base import generate_merges

    sp = sentencepiece.SentencePieceProcessor(model_proto=sp_file)
    vocab = {sp.id_to_piece(i): i for i in range(sp.get_piece_size())}
    scores = {sp.id_to_piece(i): sp.get_score(i) for i in range(sp.get_piece_size())}
    backend = Tokenizer(models.BPE(vocab, generate_merges(vocab, scores), unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    for scheme in ("first", "never"):
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", prepend_scheme=scheme)])
        ours = hf_tokenizer(folder_of(tmp_path, backend, config={"bos_token": "<s>", "eos_token": "</s>"}))
        for text in ("the world", "a  b", "漢"):
            ids = ours.encode(text)
            assert ids == backend.encode(text).ids
            assert ours.decode(ids) == text
        assert ours.decode(spm.encode("the", add_special_tokens=False)) == ("the" if scheme == "first" else " the")


def test_other_threads_run_while_a_long_text_is_cut(tmp_path):
    """The library's encode() holds the GIL: one long prompt would stop a server's every stream until it is done."""
    folder = hf_tokenizer(folder_of(tmp_path))
    ended, longest = threading.Event(), 0.0

    def watch():
        nonlocal longest
        last = time.perf_counter()
        while not ended.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            last, longest = now, max(longest, now - last)

    text = "hello  world" * 60_000
    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    for parse_special in (True, False):
        folder.vocabulary.encode(text, parse_special=parse_special)
    took = time.perf_counter() - began
    ended.set()
    watcher.join()
    assert longest < took / 4
