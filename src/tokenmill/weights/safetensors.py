"""Reads the tensors of a Hugging Face folder: model.safetensors, or the shards that model.safetensors.index.json names.

    | header length: u64 | header: JSON {name: {dtype, shape, data_offsets}, __metadata__} | data, without holes |
    0                    8                                                       8 + length                   size

The header is checked here before anything trusts it: size, JSON, duplicate names, dtype, shape x dtype = bytes, and
that the ranges cover the data exactly once. Then the safetensors library opens the file too and must agree. The data is
taken from a mapping of the file and not through the library, because numpy has no bfloat16.

It does not know what the tensors mean (names.py).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from ..errors import ModelFileError, UnsupportedModel
from .files import MappedFile, TensorInfo, describe_content

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 16 << 20  # bytes; the largest real ones are a few MB
MAX_TENSORS = 1 << 17  # in one file
MAX_JSON = 64 << 20  # bytes of an index

FORMATS = ("F32", "F16", "BF16")
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


def read_json(path: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """A JSON object from a small file; ModelFileError says what is wrong with it."""
    file = MappedFile(path)
    if file.size > limit:
        raise ModelFileError(f"{path} has {file.size} bytes; at most {limit} are read")
    return _parse_object(bytes(file.data), str(path))


def _parse_object(text: bytes, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise ModelFileError(f"{where}: {twice!r} appears twice")
        return result

    try:
        value = json.loads(text.decode(), object_pairs_hook=unique)
    except ModelFileError:
        raise
    except (ValueError, RecursionError) as e:
        guess = describe_content(text[:256])
        raise ModelFileError(f"{where} is {guess}" if guess else f"{where} is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{where} is not a JSON object")
    return value


def open_safetensors(folder: Path) -> tuple[dict[str, TensorInfo], list[MappedFile]]:
    """Every tensor of the folder, by the name its file gives it, and the files.

    Raises ModelFileError naming each missing shard, or the tensor that is wrong.
    """
    if os.path.exists(folder / INDEX):
        return _open_shards(folder)
    names = sorted(p.name for p in folder.glob("*.safetensors"))
    if SINGLE in names:
        names = [SINGLE]
    if len(names) > 1:
        raise ModelFileError(f"{folder} holds {len(names)} .safetensors files and no {INDEX} to say which belong to it")
    if not names:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth"))
        raise ModelFileError(
            f"{folder} holds no {SINGLE}"
            + (": its weights are pickles, which may run code; convert them to safetensors" if pickled else "")
        )
    file, tensors = open_file(folder / names[0])
    return tensors, [file]


def _open_shards(folder: Path) -> tuple[dict[str, TensorInfo], list[MappedFile]]:
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index} has no weight_map")
    for name, shard in weight_map.items():
        plain = isinstance(shard, str) and re.fullmatch(r"[^/\\\0]+", shard) and shard not in (".", "..")
        if not plain:
            raise ModelFileError(f"{index} puts {name!r} in {shard!r}; it may only name files of its own folder")
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not os.path.exists(folder / shard)]
    if missing:
        raise ModelFileError(f"{folder} lacks {_some(missing)}, which {INDEX} names")
    tensors: dict[str, TensorInfo] = {}
    files = []
    for shard in shards:
        file, found = open_file(folder / shard)
        for name, info in found.items():
            if weight_map.get(name) != shard:
                other = f"says is in {weight_map[name]!r}" if name in weight_map else "does not name"
                raise ModelFileError(f"{folder / shard} holds {name!r}, which {INDEX} {other}")
            tensors[name] = info
        files.append(file)
    lost = [name for name in weight_map if name not in tensors]
    if lost:
        raise ModelFileError(f"{INDEX} names {_some(lost)}, which the file it points to does not hold")
    return tensors, files


def _some(names: list[str]) -> str:
    """At most five of them, quoted, and how many more."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(repr(name) for name in names[:5]) + more


def open_file(path: Path) -> tuple[MappedFile, dict[str, TensorInfo]]:
    """One .safetensors file, its header checked against its size."""
    file = MappedFile(path)
    guess = describe_content(file.data[:256])
    if guess:
        raise ModelFileError(f"{path} is {guess}")
    if file.size < 10:
        raise ModelFileError(f"{path} is cut short: it has {file.size} bytes, less than any safetensors file")
    length = int.from_bytes(file.data[:8], "little")
    if length > min(file.size - 8, MAX_HEADER) or length < 2:
        raise ModelFileError(
            f"{path} is cut short or damaged: it says its header takes {length} bytes; the file has {file.size}, "
            f"and a header at most {MAX_HEADER}"
        )
    text = file.data[8 : 8 + length]
    if text.count(b"data_offsets") > MAX_TENSORS:
        raise ModelFileError(f"{path} names more than {MAX_TENSORS} tensors")
    header = _parse_object(text, f"the header of {path}")
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise ModelFileError(f"{path}: __metadata__ is not a map of strings")
    tensors = {name: _tensor(name, entry, file, 8 + length) for name, entry in header.items()}
    _check_ranges(file, tensors, 8 + length)
    _ask_library(path, tensors)
    return file, tensors


def _tensor(name: str, entry: Any, file: MappedFile, data_start: int) -> TensorInfo:
    what = f"{file.path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ModelFileError(f"{what} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ModelFileError(f"{what} has unknown dtype {dtype!r}")
    if not isinstance(shape, list) or len(shape) > 16 or not all(_is_size(n) for n in shape):
        raise ModelFileError(f"{what} has shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise ModelFileError(f"{what} has data_offsets {offsets!r}")
    begin, end = offsets
    bits = DTYPE_BITS[dtype]
    for n in shape:
        bits *= n
    if begin > end or (end - begin) * 8 != bits:
        raise ModelFileError(
            f"{what} ({dtype} {shape}) takes {bits / 8:g} bytes, its data_offsets are {begin} to {end}"
        )
    if data_start + end > file.size:
        raise ModelFileError(
            f"{file.path} is cut short: tensor {name!r} ends at byte {data_start + end}, the file has {file.size}"
        )
    return TensorInfo(name, tuple(shape), dtype, data_start + begin, end - begin, file)


def _is_size(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 63


def _check_ranges(file: MappedFile, tensors: dict[str, TensorInfo], at: int) -> None:
    for info in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if info.offset != at:
            problem = "overlaps the one before it" if info.offset < at else f"leaves a hole of {info.offset - at} bytes"
            raise ModelFileError(f"{file.path}: tensor {info.name!r} {problem}")
        at += info.nbytes
    if at != file.size:
        raise ModelFileError(f"{file.path} is {file.size - at} bytes longer than its tensors")


def _ask_library(path: Path, tensors: dict[str, TensorInfo]) -> None:
    import safetensors

    try:
        with safetensors.safe_open(str(path), framework="numpy") as opened:
            same = set(opened.keys()) == set(tensors)
    except (safetensors.SafetensorError, OSError) as e:
        raise ModelFileError(f"{path}: {e}") from None
    if not same:
        raise ModelFileError(f"{path}: the safetensors library reads other tensors in it")


def check_format(info: TensorInfo) -> None:
    """Raise UnsupportedModel unless a weight may be stored in this dtype."""
    if info.format not in FORMATS:
        raise UnsupportedModel(
            f"{info.file.path}: tensor {info.name!r} is {info.format}; supported are {', '.join(FORMATS)}"
        )
