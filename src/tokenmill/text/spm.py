"""SentencePiece BPE: merge neighbours by the score of the piece they make, spell what is left over in bytes.

    text -> cut at user-defined and special pieces (leftmost, longest) -> " " becomes "▁" -> cut into words -> merged

A vocabulary of this kind holds scores and no merges. Deriving the merges of Gemma's 262k pieces takes seconds, so the
scores are used as they are: a heap pops the best pair, the leftmost of equals, as sentencepiece does. Words are merged
alone and remembered, which changes nothing: text is cut before a "▁" only where no piece could span the cut.

Knows nothing of files, chat or which tokens end a reply.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from heapq import heappop, heappush
from math import inf

import numpy as np

from ..errors import InvalidRequest, ModelFileError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"  # U+2581
_MAX_WORDS = 32768  # remembered merges; dropped all at once when full
_MAX_REMEMBERED = 64  # characters; a longer word is merged anew each time


class SymbolFinder:
    """Where the pieces that are matched whole stand in a text. Thousands of them cost no more than a few."""

    def __init__(self, symbols: dict[str, int]):
        self._ids = symbols
        lengths: dict[str, set[int]] = {}
        for symbol in symbols:
            lengths.setdefault(symbol[:2], set()).add(len(symbol))
        self._lengths = {head: sorted(found, reverse=True) for head, found in lengths.items()}
        heads = sorted(lengths, key=len, reverse=True)
        self._head = re.compile("|".join(map(re.escape, heads)) if heads else r"(?!)")

    def split(self, text: str) -> Iterable[str | int]:
        """Pieces of text, and ids of the symbols between them, in order."""
        start = position = 0
        find = self._head.search
        while (head := find(text, position)) is not None:
            position = head.start()
            for length in self._lengths.get(text[position : position + 2], ()):
                found = self._ids.get(text[position : position + length])
                if found is not None:
                    break
            else:  # a symbol of one character
                length, found = 1, self._ids.get(text[position])
            if found is None:
                position += 1
                continue
            if position > start:
                yield text[start:position]
            yield found
            start = position = position + length
        if start < len(text):
            yield text[start:]


class SentencePieceModel:
    """pieces, scores and types are parallel, one for each id; types as in sentencepiece_model.proto.

    Raises ModelFileError where they do not agree.
    """

    def __init__(self, pieces: list[str], scores, types, *, unknown_id: int | None, add_space_prefix: bool = True):
        self.pieces = pieces
        self.size = len(pieces)
        self.add_space_prefix = self.strips_leading_space = add_space_prefix
        scores = np.asarray(scores, dtype=np.float32)
        types = np.asarray(types, dtype=np.int32)
        if len(scores) != self.size or len(types) != self.size:
            raise ModelFileError(
                f"the tokenizer has {self.size} pieces, {len(scores)} scores and {len(types)} types; they must agree"
            )
        if not np.isfinite(scores).all():
            raise ModelFileError(f"the score of token {int(np.argmin(np.isfinite(scores)))} is not a finite number")
        self._types = types
        self._unknown_id = unknown_id
        self.special = frozenset(np.flatnonzero(np.isin(types, (UNKNOWN, CONTROL))).tolist())
        self._ids = index_pieces(pieces)
        # Lower merges first; a piece that is never merged into has none.
        self._rank = np.where(np.isin(types, (NORMAL, UNUSED)), -scores, np.inf).tolist()
        self._bytes = {_byte_of(pieces[i], i): i for i in np.flatnonzero(types == BYTE).tolist()}
        whole = np.flatnonzero(np.isin(types, (UNKNOWN, CONTROL, USER_DEFINED))).tolist()
        self._user_defined = SymbolFinder({pieces[i]: i for i in whole if types[i] == USER_DEFINED and pieces[i]})
        self._symbols = SymbolFinder({pieces[i]: i for i in whole if pieces[i]})
        # Characters that some piece has just before a "▁": a word may not be cut there.
        spanning = "\0".join(piece for piece in pieces if piece.rfind(SPACE) > 0)
        keep = "".join(re.escape(c) for c in sorted(set(re.findall(f"[^{SPACE}\0](?={SPACE})", spanning))))
        self._word = re.compile(rf"{SPACE}*(?:[{keep}]{SPACE}+|[^{SPACE}])*" if keep else f"{SPACE}*[^{SPACE}]*")
        self._words: dict[str, list[int]] = {}

    def encode(self, text: str, *, parse_special: bool = True, prefix: bool = True) -> list[int]:
        """Ids of text; nothing is added. prefix False: text goes on from other text, so it gets no leading space."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("the text holds half of a surrogate pair, which is no character") from None
        ids: list[int] = []
        finder = self._symbols if parse_special else self._user_defined
        space = SPACE if self.add_space_prefix and prefix else ""
        for part in finder.split(text):
            if isinstance(part, int):
                ids.append(part)
                space = SPACE if self.add_space_prefix else ""
            else:
                self._encode_plain(space + part.replace(" ", SPACE), ids)
        return ids

    def _encode_plain(self, text: str, ids: list[int]) -> None:
        words = self._words
        for word in self._word.findall(text):
            found = words.get(word)
            if found is None:
                if not word:
                    continue
                found = self._merge(word)
                if len(word) <= _MAX_REMEMBERED:
                    if len(words) >= _MAX_WORDS:
                        words.clear()
                    words[word] = found
            if found and ids and found[0] == self._unknown_id == ids[-1]:
                ids.extend(found[1:])  # unknown characters in a row are one unknown token
            else:
                ids.extend(found)

    def _merge(self, word: str) -> list[int]:
        ids, rank = self._ids, self._rank
        symbols = list(word)
        n = len(symbols)
        following = list(range(1, n + 1))
        previous = list(range(-1, n - 1))
        heap: list[tuple[float, int, str]] = []

        def offer(left: int, pair: str) -> None:
            found = ids.get(pair)
            if found is not None and rank[found] != inf:
                heappush(heap, (rank[found], left, pair))

        for i in range(n - 1):
            offer(i, symbols[i] + symbols[i + 1])
        while heap:
            _, left, pair = heappop(heap)
            right = following[left]
            if not symbols[left] or right >= n or symbols[left] + symbols[right] != pair:
                continue  # one of the two was merged elsewhere meanwhile
            symbols[left], symbols[right] = pair, ""
            after = following[left] = following[right]
            if after < n:
                previous[after] = left
                offer(left, pair + symbols[after])
            if (before := previous[left]) >= 0:
                offer(before, symbols[before] + pair)
        out: list[int] = []
        for symbol in symbols:
            if symbol:
                self._append(symbol, out)
        return out

    def _append(self, symbol: str, out: list[int]) -> None:
        found = self._ids.get(symbol)
        if found is not None and self._rank[found] != inf:
            out.append(found)
            return
        spelled = [self._bytes.get(byte) for byte in symbol.encode()]
        if None not in spelled:
            out.extend(spelled)  # type: ignore[arg-type]
        elif self._unknown_id is not None and (not out or out[-1] != self._unknown_id):
            out.append(self._unknown_id)

    def token_bytes(self, token_id: int) -> bytes:
        piece = self.pieces[token_id]
        if self._types[token_id] == BYTE:
            return bytes((_byte_of(piece, token_id),))
        return piece.replace(SPACE, " ").encode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return self.pieces[token_id]

    def token_id(self, text: str) -> int | None:
        return self._ids.get(text)

    def longest_token(self) -> int:
        return max(map(len, self.pieces), default=1) * 4


def index_pieces(pieces: list[str]) -> dict[str, int]:
    """Id by text. Raises ModelFileError for a text that stands twice: one of its ids could never be reached."""
    ids = dict(zip(pieces, range(len(pieces))))
    if len(ids) != len(pieces):
        seen: set[str] = set()
        twice = next(piece for piece in pieces if piece in seen or seen.add(piece))  # type: ignore[func-returns-value]
        raise ModelFileError(f"the vocabulary has {twice[:40]!r} twice, as {pieces.index(twice)} and {ids[twice]}")
    return ids


def _byte_of(piece: str, token_id: int) -> int:
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece) is None:
        raise ModelFileError(f"token {token_id} is marked as a byte but reads {piece[:20]!r}, not <0x..>")
    return int(piece[3:5], 16)
