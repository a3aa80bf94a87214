"""Byte-level tokenizers from GGUF metadata give the ids of the published tokenizer, or refuse by name."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import InvalidRequest, ModelFileError, UnsupportedModel
from tokenmill.text.byte_level import BYTE_OF
from tokenmill.text.gguf_tokenizer import gguf_tokenizer
from tokenmill.text.pre_tokenizers import PRE_TOKENIZERS

from .conftest import byte_level_metadata

STRINGS = [
    "a  1",
    "12345",
    "1 2  3   ½ ² ٣ Ⅷ",
    "I'll you've IT'S he'd",
    " \n\n x",
    "\ta\t\tb\t",
    "a\r\nb\r\n\r\nc",
    "Café déjà vu — 123 😊",
    "Cafe\u0301 decomposed",
    "مرحبا بالعالم ١٢٣",
    "नमस्ते दुनिया १२३",
    "👩‍👩‍👧‍👦 family \u200d joiner \u200b zero",
    "漢字かな交じり文。한국어",
    "<|im_start|>user\nhi<|im_end|>",
    "x<|endoftext|>y",
    "def f(x):\n    return x**2  # comment\n\n\n",
    "\x00\x01\x7f\u0080\ufeff\ufffd",
    "",
    " ",
    "  ",
    " " * 10_000,
    "a" * 3_000,
    "\n" * 500,
]


@pytest.fixture(scope="module")
def reference(smollm2_path):
    """SmolLM2 as its tokenizer.json defines it: each digit alone, then byte level with GPT-2's own split."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from tokenmill.weights.loader import open_checkpoint

    metadata = open_checkpoint(smollm2_path).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in metadata["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    made.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    made.add_special_tokens([AddedToken(t, normalized=False) for t, kind in zip(tokens, kinds) if kind == 3])
    return made


@pytest.mark.parametrize("text", STRINGS, ids=lambda s: ascii(s[:16]))
def test_smollm2_gives_the_published_ids(smollm2, reference, text):
    ids = smollm2.encode(text)
    assert ids == reference.encode(text).ids
    assert smollm2.decode(ids, skip_special_tokens=False) == text == reference.decode(ids, skip_special_tokens=False)


@given(st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_smollm2_gives_the_published_ids_for_any_text(smollm2, reference, text):
    ids = smollm2.encode(text)
    assert ids == reference.encode(text).ids
    assert smollm2.decode(ids, skip_special_tokens=False) == reference.decode(ids, skip_special_tokens=False)


def test_digits_come_first(smollm2):
    """A plain GPT-2 split would give 216, 216 for the double space."""
    assert smollm2.encode("a  1") == [81, 256, 33]


def test_smollm2_says_what_its_file_says(smollm2):
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_token_id == 1 and smollm2.eos_token_id == 2
    assert smollm2.add_bos is False
    assert {0, 2} <= smollm2.eos_token_ids
    assert smollm2.special_token_ids == frozenset(range(17))
    assert smollm2.token_bytes(2) == b"<|im_end|>"
    assert smollm2.token_bytes(10813) + smollm2.token_bytes(238) + smollm2.token_bytes(115) == "🔥".encode()
    assert smollm2.token_id("<|im_start|>") == 1
    assert smollm2.token_text(256) == "ĠĠ"
    assert smollm2.token_bytes(10**9) == b"" and smollm2.token_bytes(-1) == b"" and smollm2.token_text(10**9) == ""


def test_smollm2_loads_quickly(smollm2_path):
    from tokenmill.text.tokenizer import load_tokenizer
    from tokenmill.weights.loader import open_checkpoint

    checkpoint = open_checkpoint(smollm2_path)
    started = time.process_time()
    load_tokenizer(checkpoint)
    assert time.process_time() - started < 0.35


@pytest.mark.parametrize("text", STRINGS, ids=lambda s: ascii(s[:16]))
def test_every_pre_tokeniser_keeps_all_of_the_text(text):
    """No split drops or reorders anything; only normalising (NFC) may respell."""
    import unicodedata

    for name, pre in PRE_TOKENIZERS.items():
        normaliser, splitter = pre.build()
        kept = normaliser.normalize_str(text) if normaliser else text
        assert kept == (unicodedata.normalize("NFC", text) if pre.nfc else text), name
        pieces = "".join(piece for piece, _ in splitter.pre_tokenize_str(kept))
        assert bytes(BYTE_OF[c] for c in pieces).decode() == kept, name


CUTS = {  # what each family's own splits make of one line
    "gpt-2": ["I", "'ll", "Ġpay", "Ġ12345", "Ġ", "Ġor"],
    "smollm": ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "5", "Ġ", "Ġor"],
    "llama-bpe": ["I", "'ll", "Ġpay", "Ġ", "123", "45", "Ġ", "Ġor"],
    "qwen2": ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "5", "Ġ", "Ġor"],
    "gpt-4o": ["I'll", "Ġpay", "Ġ", "123", "45", "Ġ", "Ġor"],
    "tekken": ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "5", "Ġ", "Ġor"],
    "deepseek-v3": ["I", "'ll", "Ġpay", "Ġ", "123", "45", "Ġ", "Ġor"],
    "falcon": ["I", "'", "ll", "Ġpay", "Ġ", "123", "45", "Ġ", "Ġor"],
}


@pytest.mark.parametrize("name", CUTS)
def test_each_family_cuts_in_its_own_way(name):
    _, splitter = PRE_TOKENIZERS[name].build()
    assert [piece for piece, _ in splitter.pre_tokenize_str("I'll pay 12345  or")] == CUTS[name]


def test_qwen2_is_cut_as_transformers_cuts_it():
    from transformers import Qwen2Tokenizer

    theirs = Qwen2Tokenizer(vocab={"<|endoftext|>": 0}, merges=[]).backend_tokenizer
    normaliser, splitter = PRE_TOKENIZERS["qwen2"].build()
    for text in STRINGS:
        assert normaliser.normalize_str(text) == theirs.normalizer.normalize_str(text)
        assert splitter.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "tekken", "gpt-4o", "qwen35", "command-r", "olmo", "qwen2"])
def test_pre_tokenisers_agree_with_transformers(name):
    """Transformers defines the same families in its own words."""
    from tokenizers import Regex, pre_tokenizers
    from transformers import CohereTokenizer, GPT2Tokenizer, GPTNeoXTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    vocab = {"a": 0}
    if name in GGUF_PRE_TOKENIZER_SPLITS:
        theirs = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        made = {"gpt-2": GPT2Tokenizer, "command-r": CohereTokenizer, "olmo": GPTNeoXTokenizer}[name]
        theirs = made(vocab=vocab, merges=[]).backend_tokenizer.pre_tokenizer
    _, ours = PRE_TOKENIZERS[name].build()
    for text in STRINGS:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text[:40]


def test_an_unknown_pre_tokeniser_is_refused_by_name():
    for value in ("nonsense", "SMOLLM", ""):
        with pytest.raises(UnsupportedModel, match=repr(value)):
            gguf_tokenizer(byte_level_metadata(pre=value))
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.pre"):
        gguf_tokenizer(byte_level_metadata(pre=None))


def test_an_unknown_tokenizer_model_is_refused_by_name():
    for value in ("bert", "rwkv", None, 7):
        with pytest.raises(UnsupportedModel, match=repr(value)):
            gguf_tokenizer(byte_level_metadata(model=value))


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": None},
        {"tokens": []},
        {"tokens": [1, 2, 3]},
        {"tokens": "abc"},
        {"tokens": ["a", "a", "b"], "token_type": [1, 1, 1]},
        {"merges": None},
        {"merges": ["a"]},
        {"merges": ["a b c"]},
        {"merges": ["a nothere"]},
        {"merges": ["z q"]},
        {"token_type": [1, 1]},
    ],
    ids=str,
)
def test_a_damaged_vocabulary_is_refused(changes):
    with pytest.raises(ModelFileError):
        gguf_tokenizer(byte_level_metadata(**changes))


def test_a_wrong_merge_is_named():
    with pytest.raises(ModelFileError, match=r"merges\[1\] is 'z q'"):
        gguf_tokenizer(byte_level_metadata(merges=["h e", "z q"]))


def test_special_ids_outside_the_vocabulary_count_as_absent():
    tokenizer = gguf_tokenizer(byte_level_metadata(bos_token_id=10**6, eos_token_id=10**6))
    assert tokenizer.bos_token_id is None and tokenizer.eos_token_id is None
    assert tokenizer.eos_token_ids == {0, 2}  # still there by name


def test_fillers_are_no_duplicates():
    metadata = byte_level_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[-3:] = ["", "", ""]
    tokenizer = gguf_tokenizer(metadata)
    assert tokenizer.vocab_size == len(tokens)


def test_half_a_surrogate_pair_is_a_client_error(small):
    for text in ("\ud800", "ok \udfff ok"):
        with pytest.raises(InvalidRequest):
            small.encode(text)


def test_special_tokens_are_parsed_unless_asked_not_to(small):
    assert small.encode("<|im_end|>") == [2]
    plain = small.encode("<|im_end|>", parse_special=False)
    assert 2 not in plain and small.decode(plain) == "<|im_end|>"


def test_user_defined_tokens_are_matched_whole_and_shown():
    metadata = byte_level_metadata()
    i = len(metadata["tokenizer.ggml.tokens"]) - 1
    metadata["tokenizer.ggml.tokens"][i] = "<tool_call>"
    metadata["tokenizer.ggml.token_type"][i] = 4
    tokenizer = gguf_tokenizer(metadata)
    assert tokenizer.encode("a<tool_call>")[-1] == i
    assert i not in tokenizer.special_token_ids
    assert tokenizer.decode([i]) == "<tool_call>"


@pytest.mark.parametrize(
    ("add_bos", "pre", "begins"),
    [(True, "smollm", True), (False, "smollm", False), (None, "smollm", False), (None, "llama-bpe", True)],
)
def test_completions_follow_add_bos(add_bos, pre, begins):
    tokenizer = gguf_tokenizer(byte_level_metadata(add_bos_token=add_bos, pre=pre))
    assert (tokenizer.encode("hello")[0] == 1) is begins
    assert tokenizer.encode("<|im_start|>hello").count(1) == 1  # never a second one
    assert tokenizer.encode("hello", add_special_tokens=False)[0] != 1
    assert (tokenizer.encode("") == [1]) is begins


def test_end_tokens_are_the_union_of_all_declared():
    assert gguf_tokenizer(byte_level_metadata(eos_token_id=0, eot_token_id=2)).eos_token_ids == {0, 2}
    assert gguf_tokenizer(byte_level_metadata(eos_token_id=5, eom_token_id=7)).eos_token_ids == {0, 2, 5, 7}
    assert gguf_tokenizer(byte_level_metadata(eos_token_ids=[9, 11])).eos_token_ids == {0, 2, 9, 11}
    # a well-known name counts only as a special token, not where text may spell it
    plain = byte_level_metadata(eos_token_id=None)
    plain["tokenizer.ggml.token_type"] = [1] * len(plain["tokenizer.ggml.tokens"])
    assert gguf_tokenizer(plain).eos_token_ids == frozenset()


def test_a_message_end_is_no_reply_end_where_both_exist():
    metadata = byte_level_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[-3:] = ["<|return|>", "<|call|>", "<|end|>"]
    n = len(tokens)
    assert {n - 3, n - 2} <= gguf_tokenizer(metadata).eos_token_ids
    assert n - 1 not in gguf_tokenizer(metadata).eos_token_ids


def test_named_templates_are_found():
    metadata = byte_level_metadata() | {"tokenizer.chat_template.tool_use": "tools", "tokenizer.chat_templates": ["x"]}
    tokenizer = gguf_tokenizer(metadata)
    assert tokenizer.chat_templates["tool_use"] == "tools"
    assert tokenizer.chat_template == metadata["tokenizer.chat_template"]
