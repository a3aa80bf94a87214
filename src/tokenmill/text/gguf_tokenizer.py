"""A Tokenizer from the tokenizer.ggml.* key-values of a GGUF file.

Everything in the file is checked before use: a vocabulary that is cut or contradicts itself is a ModelFileError, one
that asks for what tokenmill lacks an UnsupportedModel; both name the key. Knows nothing of how the file is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from typing import Any

from ..errors import ModelFileError, UnsupportedModel
from .byte_level import LibraryVocabulary
from .pre_tokenizers import pre_tokenizer
from .spm import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, SentencePieceModel, index_pieces
from .tokenizer import Tokenizer, Vocabulary, end_tokens

_KEY = "tokenizer.ggml."


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    model = metadata.get(_KEY + "model")
    pieces = _strings(metadata, "tokens")
    if "" in pieces:  # fillers, which need a name of their own
        pieces = [piece or f"[EMPTY_{i}]" for i, piece in enumerate(pieces)]
    vocabulary: Vocabulary
    if model == "gpt2":
        pre = pre_tokenizer(metadata.get(_KEY + "pre"))
        vocabulary = _byte_level(metadata, pieces, pre)
        add_bos = pre.add_bos
    elif model == "llama":
        vocabulary = _sentencepiece(metadata, pieces)
        add_bos = True
    else:
        raise UnsupportedModel(
            f"tokenizer.ggml.model is {model!r}; tokenmill has gpt2 (byte-level BPE) and llama (SPM)"
        )

    ids = {
        name: _token_id(metadata, key, len(pieces))
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    declared = [_token_id(metadata, key, len(pieces)) for key in ("eos", "eot", "eom")]
    special = vocabulary.special | {i for i in (ids["bos"], ids["eos"]) if i is not None}
    ends = end_tokens([*declared, _plain(metadata.get(_KEY + "eos_token_ids"))], special, vocabulary)
    return Tokenizer(
        vocabulary,
        bos_token_id=ids["bos"],
        eos_token_id=ids["eos"],
        eos_token_ids=ends,
        special_token_ids=special | ends,
        add_bos=bool(metadata.get(_KEY + "add_bos_token", add_bos)),
        add_eos=bool(metadata.get(_KEY + "add_eos_token", False)),
        chat_templates=_templates(metadata),
        template_tokens={f"{name}_token": pieces[i] for name, i in ids.items() if i is not None},
    )


def _byte_level(metadata, pieces: list[str], pre) -> LibraryVocabulary:
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import BPE

    types = _plain(metadata.get(_KEY + "token_type")) or [NORMAL] * len(pieces)
    if len(types) != len(pieces):
        raise ModelFileError(f"tokenizer.ggml has {len(pieces)} tokens and {len(types)} token types; they must agree")
    vocab = index_pieces(pieces)
    merges: list[Any] = list(map(tuple, map(str.split, _strings(metadata, "merges"), repeat(" "))))
    try:
        backend = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    except Exception:  # looked for only now: checking each merge costs more than all the rest
        raise _wrong_merge(vocab, merges) from None
    normalizer, backend.pre_tokenizer = pre.build()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    whole = [i for i, kind in enumerate(types) if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
    backend.add_tokens([AddedToken(pieces[i], normalized=False, special=types[i] != USER_DEFINED) for i in whole])
    return LibraryVocabulary(backend)


def _wrong_merge(vocab: dict[str, int], merges: list[tuple[str, ...]]) -> ModelFileError:
    for i, merge in enumerate(merges):
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys():
            text = " ".join(merge)[:40]
            return ModelFileError(f"tokenizer.ggml.merges[{i}] is {text!r}, which does not join two tokens into one")
    return ModelFileError("tokenizer.ggml.merges cannot be used")


def _sentencepiece(metadata, pieces: list[str]) -> SentencePieceModel:
    scores = metadata.get(_KEY + "scores")
    if scores is None:
        raise ModelFileError("tokenizer.ggml.scores is missing; a llama (SPM) tokenizer cannot merge without it")
    unknown = _token_id(metadata, "unknown", len(pieces))
    types = _plain(metadata.get(_KEY + "token_type"))
    if types is None:
        fixed = {_token_id(metadata, key, len(pieces)) for key in ("bos", "eos", "padding")}
        types = [
            CONTROL if i in fixed else UNKNOWN if i == unknown else BYTE if _is_byte(piece) else NORMAL
            for i, piece in enumerate(pieces)
        ]
    return SentencePieceModel(
        pieces,
        scores,
        types,
        unknown_id=unknown,
        add_space_prefix=bool(metadata.get(_KEY + "add_space_prefix", True)),
    )


def _is_byte(piece: str) -> bool:
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


def _templates(metadata) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {
        key[len(prefix) + 1 :] or "default": value
        for key, value in metadata.items()
        if (key == prefix or key.startswith(prefix + ".")) and isinstance(value, str)
    }
    return found


def _strings(metadata, key: str) -> list[str]:
    value = _plain(metadata.get(_KEY + key))
    if not isinstance(value, list) or not value:
        raise ModelFileError(f"{_KEY}{key} is missing; the file holds no usable tokenizer")
    if set(map(type, value)) != {str}:
        raise ModelFileError(f"{_KEY}{key} must be a list of strings")
    return value


def _token_id(metadata, name: str, size: int) -> int | None:
    """A special token's id; one outside the vocabulary counts as absent, as other readers do."""
    value = metadata.get(f"{_KEY}{name}_token_id")
    return int(value) if value is not None and 0 <= int(value) < size else None


def _plain(value):
    return value.tolist() if hasattr(value, "tolist") else list(value) if isinstance(value, tuple) else value
