"""Token ids to text, one token at a time, exact however characters are spread over tokens.

Works on bytes: a character comes out when its last byte has, bytes that can no longer become a character come out at
once as U+FFFD (one for each maximal ill-formed run, as bytes.decode(errors="replace") has it), and flush() gives what
is still open. So the pieces joined are the whole decoded at once, for every way of cutting.
"""

from __future__ import annotations

import codecs

from .tokenizer import Tokenizer

_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """after: the token the text follows, None where it stands alone. The space that a SentencePiece tokenizer puts at
    the start of a text is dropped only there and after a special token; after words it is a real space."""

    __slots__ = ("_bytes", "_decode", "_decoder", "_open", "_skip", "_strip")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, after: int | None = None):
        self._bytes = tokenizer.token_bytes
        self._decoder = _decoder("replace")
        self._decode = self._decoder.decode
        self._open = False  # inside a character
        self._skip = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._strip = tokenizer.strips_leading_space and (after is None or after in tokenizer.special_token_ids)

    def push(self, token_id: int) -> str:
        """The text that token_id completes; often "" inside a character."""
        if token_id in self._skip:
            return ""
        data = self._bytes(token_id)
        if self._strip and data:
            self._strip = False
            if data[0] == 0x20:
                data = data[1:]
        if not self._open:
            try:  # most tokens are whole characters; suppress() would take longer than all the rest
                return data.decode()
            except UnicodeDecodeError:
                pass
        text = self._decode(data)
        self._open = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """What is left of an unfinished character, as U+FFFD. Nothing may be pushed after it."""
        return self._decode(b"", True)
