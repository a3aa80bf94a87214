"""Read sentencepiece's own file, tokenizer.model: enough of its protobuf to get pieces, scores, types and two flags.

    ModelProto       1: SentencePiece (repeated)   2: TrainerSpec   3: NormalizerSpec
    SentencePiece    1: piece (string)   2: score (float)   3: type (enum, 1 = normal)
    TrainerSpec      3: model_type (2 = BPE)
    NormalizerSpec   2: precompiled_charsmap (bytes)   3: add_dummy_prefix (bool)   4: remove_extra_whitespaces (bool)

Field numbers from sentencepiece_model.proto. Every length is checked against the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from ..errors import ModelFileError, UnsupportedModel
from .spm import NORMAL, UNKNOWN, SentencePieceModel

_BPE = 2


def read_spm_file(path: Path) -> SentencePieceModel:
    """Raises ModelFileError for a damaged file, UnsupportedModel for a model that is not BPE or rewrites its text."""
    name = path.name
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    model_type, prefix, squeezes, rewrites = 1, True, True, False
    for number, value in _fields(path.read_bytes(), name):
        if number not in (1, 2, 3):
            continue
        if not isinstance(value, bytes):
            raise ModelFileError(f"{name} is damaged: field {number} is not a message")
        fields = dict(_fields(value, name))

        def get(key: int, default, fields=fields):
            found = fields.get(key, default)
            if type(found) is not type(default):
                raise ModelFileError(f"{name} is damaged: a field has the wrong type")
            return found

        if number == 1:
            pieces.append(_string(get(1, b""), name))
            scores.append(get(2, 0.0))
            types.append(get(3, NORMAL))
        elif number == 2:
            model_type = get(3, model_type)
        else:
            prefix, squeezes, rewrites = bool(get(3, 1)), bool(get(4, 1)), bool(get(2, b""))
    if model_type != _BPE:
        raise UnsupportedModel(f"{name} is not a BPE model (model_type {model_type}); only BPE has merges by score")
    if rewrites or squeezes:
        raise UnsupportedModel(
            f"{name} rewrites its text (normalisation rules, or spaces squeezed), which tokenmill does not have"
        )
    if not pieces:
        raise ModelFileError(f"{name} holds no pieces")
    unknown = types.index(UNKNOWN) if UNKNOWN in types else None
    return SentencePieceModel(pieces, scores, types, unknown_id=unknown, add_space_prefix=prefix)


def _fields(data: bytes, name: str) -> Iterator[tuple[int, int | float | bytes]]:
    position, end = 0, len(data)
    while position < end:
        key, position = _varint(data, position, name)
        number, wire = key >> 3, key & 7
        if wire == 0:
            varint, position = _varint(data, position, name)
            yield number, varint
            continue
        if wire == 2:
            size, position = _varint(data, position, name)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ModelFileError(f"{name} is damaged at byte {position}")
        if position + size > end:
            raise ModelFileError(f"{name} is cut: {position + size} bytes are named, it has {end}")
        value = data[position : position + size]
        yield number, value if wire == 2 else struct.unpack("<d" if wire == 1 else "<f", value)[0]
        position += size


def _varint(data: bytes, position: int, name: str) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 64:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
    raise ModelFileError(f"{name} is cut or damaged at byte {position}")


def _string(value: bytes, name: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ModelFileError(f"{name} holds a piece that is not UTF-8 text") from None
