"""SentencePiece vocabularies: the ids sentencepiece itself gives, at any speed a text asks for."""

from __future__ import annotations

import contextlib
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import InvalidRequest, ModelFileError, UnsupportedModel
from tokenmill.text.gguf_tokenizer import gguf_tokenizer
from tokenmill.text.spm import SentencePieceModel, SymbolFinder
from tokenmill.text.spm_file import read_spm_file

from .conftest import sentencepiece_metadata, train_sentencepiece

STRINGS = [
    "the quick brown fox",
    " leading",
    "trailing ",
    "  two  spaces  ",
    "\t\n\r\n",
    "numbers 1234567890",
    "ein ganz unbekanntes Wort: Straße",
    "漢字 emoji 😊🫠 and \u200d joiners",
    "▁ already spelled ▁▁",
    "<s> </s> <unk> <0x41>",
    "aaaaaaaaaaaaaaaa",
    " " * 300,
    "x" * 500,
    "",
    " ",
]
WORDY = st.text(st.sampled_from("the world ▁\n\t.é漢😊 1"), max_size=80)


@pytest.fixture(scope="module")
def reference(sp_file):
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=sp_file)


@pytest.mark.parametrize("text", STRINGS, ids=lambda s: ascii(s[:16]))
def test_ids_are_sentencepieces(spm, reference, text):
    ids = spm.encode(text, add_special_tokens=False, parse_special=False)
    assert ids == reference.encode(text)
    assert spm.decode(ids, skip_special_tokens=False) == reference.decode(ids)


@given(st.one_of(WORDY, st.text(max_size=40)))
@settings(max_examples=300, deadline=None)
def test_ids_are_sentencepieces_for_any_text(spm, reference, text):
    ids = spm.encode(text, add_special_tokens=False, parse_special=False)
    assert ids == reference.encode(text)
    assert spm.decode(ids) == text.replace("▁", " ")


def test_user_defined_symbols_and_no_prefix_space():
    """As Gemma has it: runs of spaces and tags are symbols of their own, and no space is put before a text."""
    import sentencepiece

    symbols = ["▁▁", "▁▁▁", "\n\n", "<b>", "</b>"]
    model = train_sentencepiece(user_defined_symbols=symbols, add_dummy_prefix=False)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    metadata = sentencepiece_metadata(model, add_space_prefix=False)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    for symbol in symbols:
        i = reference.piece_to_id(symbol)
        types[i] = 4
        tokens[i] = symbol.replace("▁", " ")  # the converter spells these as text has them
    tokenizer = gguf_tokenizer(metadata)

    @given(st.text(st.sampled_from("the <b>/ \n▁é"), max_size=60))
    @settings(max_examples=200, deadline=None)
    def same(text):
        text = text.replace("▁", "_")
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text)
        assert tokenizer.decode(ids) == text

    same()
    assert tokenizer.decode(tokenizer.encode(" x")) == " x"


def test_without_bytes_unknown_characters_in_a_row_are_one_unknown_token():
    import sentencepiece

    model = train_sentencepiece(byte_fallback=False, vocab_size=200)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = gguf_tokenizer(sentencepiece_metadata(model))
    for text in ("漢字", "the 漢字 the", "a漢b字c", "漢 字", "漢字 漢字漢字"):
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text), text


def test_special_tokens_and_the_space_after_them(spm):
    """Each stretch of text between special tokens begins as a text of its own does (Llama-2's tokenizer.json)."""
    bos, eos = spm.bos_token_id, spm.eos_token_id
    assert spm.add_bos and (bos, eos) == (1, 2)
    assert spm.encode("the") == [bos, *spm.encode("the", add_special_tokens=False)]
    assert spm.encode("<s>the") == spm.encode("the")  # one BOS, whoever writes it
    word = spm.encode("the", add_special_tokens=False)
    assert spm.encode("the</s>the") == [bos, *word, eos, *word]
    assert spm.encode_continuation("the") != word
    assert spm.decode(spm.encode("the</s>the"), skip_special_tokens=True) == "the the"


def test_ids_are_llama_2s(spm, sp_file):
    """Against the `tokenizers` library, put together as Llama-2's published tokenizer.json is."""
    import sentencepiece
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers.tokenization_utils_base import generate_merges

    sp = sentencepiece.SentencePieceProcessor(model_proto=sp_file)
    ids = range(sp.get_piece_size())
    vocab = {sp.id_to_piece(i): i for i in ids}
    scores = {sp.id_to_piece(i): sp.get_score(i) for i in ids}
    merges = generate_merges(vocab, scores)
    theirs = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    theirs.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    theirs.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    theirs.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    for text in [*STRINGS, "<s>[INST] hi [/INST] hello </s><s>[INST] again"]:
        ours = spm.encode(text, add_special_tokens=False)
        assert ours == theirs.encode(text).ids, text
        assert spm.decode(ours) == theirs.decode(ours), text


def test_the_model_file_alone_is_enough(sp_file, spm, tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(sp_file)
    model = read_spm_file(path)
    for text in STRINGS:
        assert model.encode(text) == spm.encode(text, add_special_tokens=False)


def test_a_cut_model_file_is_refused(sp_file, tmp_path):
    path = tmp_path / "tokenizer.model"
    for size in (1, 100, len(sp_file) // 2, len(sp_file) - 1):
        path.write_bytes(sp_file[:size])
        with pytest.raises((ModelFileError, UnsupportedModel)):
            read_spm_file(path)
    rng = random.Random(0)
    for _ in range(300):  # any damage is refused or harmless, never a crash
        data = bytearray(sp_file)
        for _ in range(3):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(bytes(data))
        with contextlib.suppress(ModelFileError, UnsupportedModel):
            read_spm_file(path).encode("the world")
    path.write_bytes(train_sentencepiece(model_type="unigram", vocab_size=340))
    with pytest.raises(UnsupportedModel, match="BPE"):
        read_spm_file(path)
    path.write_bytes(train_sentencepiece(remove_extra_whitespaces=True))
    with pytest.raises(UnsupportedModel, match="rewrites"):
        read_spm_file(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"scores": None},
        {"scores": [1.0]},
        {"scores": [float("nan")] * 420},
        {"token_type": [1]},
        {"token_type": [6] * 420},
        {"tokens": ["a"] * 420},
    ],
    ids=lambda c: f"{next(iter(c))}",
)
def test_a_damaged_vocabulary_is_refused(sp_file, changes):
    with pytest.raises(ModelFileError):
        gguf_tokenizer(sentencepiece_metadata(sp_file, **changes))


def test_a_file_without_types_still_loads(sp_file, spm):
    tokenizer = gguf_tokenizer(sentencepiece_metadata(sp_file, token_type=None))
    for text in STRINGS:
        assert tokenizer.encode(text) == spm.encode(text)


def test_half_a_surrogate_pair_is_a_client_error(spm):
    with pytest.raises(InvalidRequest):
        spm.encode("a\ud83d")


@given(st.sets(st.text(st.sampled_from("ab<|"), min_size=1, max_size=4), max_size=8), st.text(st.sampled_from("ab<|")))
@settings(max_examples=200, deadline=None)
def test_symbols_are_found_leftmost_and_longest(symbols, text):
    ids = {symbol: i for i, symbol in enumerate(sorted(symbols))}
    expected: list[str | int] = []
    position, plain = 0, ""
    while position < len(text):
        found = max((s for s in symbols if text.startswith(s, position)), key=len, default=None)
        if found is None:
            plain += text[position]
            position += 1
            continue
        expected += [plain, ids[found]] if plain else [ids[found]]
        plain, position = "", position + len(found)
    assert list(SymbolFinder(ids).split(text)) == expected + ([plain] if plain else [])


def test_long_texts_take_linear_time(spm):
    """A word of any length, and many different words, without quadratic work."""
    started = time.process_time()
    spm.encode("the world " * 20_000)
    spm.encode("x" * 20_000)
    spm.encode(" " * 20_000)
    assert time.process_time() - started < 2.0


def test_remembered_words_are_bounded(spm, monkeypatch):
    monkeypatch.setattr("tokenmill.text.spm._MAX_WORDS", 100)
    model = spm.vocabulary
    assert isinstance(model, SentencePieceModel)
    for i in range(500):
        model.encode(f"w{i}")
    assert len(model._words) <= 100


@pytest.mark.slow
def test_gemmas_262k_pieces_load_quickly_and_merge_in_order(gemma3_path):
    from tokenmill.text.tokenizer import load_tokenizer
    from tokenmill.weights.loader import open_checkpoint

    checkpoint = open_checkpoint(gemma3_path)
    started = time.process_time()
    tokenizer = load_tokenizer(checkpoint)
    assert time.process_time() - started < 1.0
    assert tokenizer.vocab_size == 262144
    assert tokenizer.encode("Hello") == [2, 9259]
    assert tokenizer.eos_token_ids == {1, 106}
    for text in (*STRINGS, "<b>bold</b>\n\n\n  indented\n\t\ttabs", "a  b   c    d", "x = {'a': [1, 2]}\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ").replace("<unk>", ""), text
    assert tokenizer.encode("a  b", add_special_tokens=False) == [
        tokenizer.token_id("a"), tokenizer.token_id("  "), tokenizer.token_id("b")
    ]  # fmt: skip
