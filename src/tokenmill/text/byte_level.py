"""A `tokenizers` tokenizer as a Vocabulary, with the bytes of each token read off its decoder.

Byte-level vocabularies spell each byte as one printable character (GPT-2's table); SentencePiece ones spell a space "▁"
and a byte <0x0A>. Knows nothing of files.
"""

from __future__ import annotations

import json
import re

from ..errors import InvalidRequest, UnsupportedModel


def _byte_table() -> dict[str, int]:
    """GPT-2's bytes_to_unicode, turned round: the character that stands for each byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in plain}
    hidden = (b for b in range(256) if b not in plain)
    return table | {chr(256 + i): b for i, b in enumerate(hidden)}


BYTE_OF = _byte_table()
_BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")


class LibraryVocabulary:
    """Wraps a tokenizers.Tokenizer. Raises UnsupportedModel for one whose decoder it cannot read."""

    def __init__(self, backend):
        backend.no_truncation()  # a tokenizer.json may carry both, from training: never cut or pad a prompt
        backend.no_padding()
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self.size = max(backend.get_vocab_size(), max(added, default=-1) + 1)
        self._literal = {i: token.content for i, token in added.items()}
        self.special = frozenset(i for i, token in added.items() if token.special)
        steps = _steps(backend.decoder)
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        self.strips_leading_space = any(
            (step["type"] == "Strip" and step.get("content") == " " and step.get("start", 0) > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )
        strange = {step["type"] for step in steps if not _is_known(step)}
        if strange or not kinds:
            names = ", ".join(sorted(strange)) or "none"
            raise UnsupportedModel(f"the tokenizer's decoder ({names}) is not one whose tokens have bytes of their own")

    def encode(self, text: str, *, parse_special: bool = True, prefix: bool = True) -> list[int]:
        try:
            if parse_special:
                return _ids(self.backend, text)
            return self._encode_plain(text)
        except (UnicodeEncodeError, TypeError):  # what the binding says to a lone surrogate
            raise InvalidRequest("the text holds half of a surrogate pair, which is no character") from None

    def _encode_plain(self, text: str) -> list[int]:
        """Special tokens spelled in the text are cut as if they were not there."""
        from tokenizers import Tokenizer

        if not hasattr(self, "_plain"):
            plain = Tokenizer.from_str(self.backend.to_str())
            plain.encode_special_tokens = True
            self._plain = plain
        return _ids(self._plain, text)

    def token_text(self, token_id: int) -> str:
        return self._literal.get(token_id) or self.backend.id_to_token(token_id) or ""

    def token_id(self, text: str) -> int | None:
        return self.backend.token_to_id(text)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._literal:
            return self._literal[token_id].encode("utf-8", "replace")
        piece = self.backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            values = [BYTE_OF.get(c) for c in piece]
            return bytes(values) if None not in values else piece.encode("utf-8", "replace")  # type: ignore[arg-type]
        if _BYTE_PIECE.fullmatch(piece):
            return bytes((int(piece[3:5], 16),))
        return piece.replace("▁", " ").encode("utf-8", "replace")

    def longest_token(self) -> int:
        scale = 1 if self._byte_level else 4
        return max((len(piece) * scale for piece in self.backend.get_vocab()), default=1)


def _ids(backend, text: str) -> list[int]:
    """As backend.encode, which holds the GIL all the while: a megabyte would stop every thread for seconds."""
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _is_known(step: dict) -> bool:
    """Whether token_bytes does what this step of a decoder does."""
    if step["type"] == "Replace":
        return step.get("pattern") == {"String": "▁"} and step.get("content") == " "
    if step["type"] == "Metaspace":
        return step.get("replacement") == "▁"
    return step["type"] in ("ByteLevel", "ByteFallback", "Fuse", "Strip")


def _steps(decoder) -> list[dict]:
    """The decoder's parts, flat."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]
