"""Random-weight models of a known shape in any common format: speed depends on shapes and formats, not on values.

A tensor's blocks are filled directly (random codes, scales of a weight's usual size), a piece at a time, so a file of
gigabytes takes seconds and little memory. The file loads in tokenmill and in llama.cpp; its tokenizer knows every byte
and a few merges, the rest of the vocabulary are filler words. The text it writes is noise.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..quant.formats import BLOCKS

ALIGNMENT = 32
PIECE = 4 << 20  # weights filled at a time
SPREAD = 0.02  # standard deviation of weights, about

Progress = Callable[[str, int, int], None]  # what, bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's sizes."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocab: int
    context: int
    rope_theta: float
    tied: bool  # the output matrix is the embedding table


PRESETS = {
    "smollm2-135m": Shape("SmolLM2-135M", 30, 576, 9, 3, 1536, 49152, 8192, 1e5, True),
    "llama-1.1b": Shape("Llama-1.1B", 22, 2048, 32, 4, 5632, 32000, 8192, 1e4, False),
}
FORMATS = ("Q4_0", "Q4_1", "Q4_K", "Q8_0", "F16")
FALLBACK = {"Q4_K": "Q5_0"}  # for rows that are no whole number of blocks, as llama.cpp's quantiser chooses
FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K": 14}  # general.file_type


def write_random_model(path: Path, preset: str, format: str, *, seed: int = 0, progress: Progress | None = None) -> int:
    """Bytes written. Raises ConfigError for an unknown preset or format; an unfinished file is not left behind."""
    if preset not in PRESETS:
        raise ConfigError(f"--like is {preset!r}; there are {', '.join(PRESETS)}")
    if format not in FORMATS:
        raise ConfigError(f"--format is {format!r}; there are {', '.join(FORMATS)}")
    shape = PRESETS[preset]
    tensors = [(name, dims, _format(format, dims)) for name, dims in _tensors(shape)]
    total = sum(_nbytes(dims, kind) for _, dims, kind in tensors)
    metadata = _metadata(shape, format)
    path = Path(path)
    unfinished = path.with_name(path.name + ".unfinished")
    rng = np.random.Generator(np.random.SFC64(seed))
    done = 0
    try:
        with open(unfinished, "wb") as file:
            file.write(_header(metadata, tensors))
            for _, dims, kind in tensors:
                file.write(b"\0" * (-file.tell() % ALIGNMENT))
                for piece in _fill(kind, dims, rng):
                    file.write(piece.data)
                    done += piece.nbytes
                    if progress:
                        progress(f"writing {path.name}", done, total)
            size = file.tell()
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)
    return size


def _tensors(s: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape as in numpy) in the order of the file."""
    head = s.hidden // s.heads
    yield "token_embd.weight", (s.vocab, s.hidden)
    for i in range(s.layers):
        yield f"blk.{i}.attn_norm.weight", (s.hidden,)
        yield f"blk.{i}.attn_q.weight", (s.heads * head, s.hidden)
        yield f"blk.{i}.attn_k.weight", (s.kv_heads * head, s.hidden)
        yield f"blk.{i}.attn_v.weight", (s.kv_heads * head, s.hidden)
        yield f"blk.{i}.attn_output.weight", (s.hidden, s.heads * head)
        yield f"blk.{i}.ffn_norm.weight", (s.hidden,)
        yield f"blk.{i}.ffn_gate.weight", (s.feed_forward, s.hidden)
        yield f"blk.{i}.ffn_up.weight", (s.feed_forward, s.hidden)
        yield f"blk.{i}.ffn_down.weight", (s.hidden, s.feed_forward)
    yield "output_norm.weight", (s.hidden,)
    if not s.tied:
        yield "output.weight", (s.vocab, s.hidden)


def _format(format: str, dims: tuple[int, ...]) -> str:
    if len(dims) == 1:
        return "F32"
    return format if dims[-1] % BLOCKS[format].block_size == 0 else FALLBACK[format]


def _nbytes(dims: tuple[int, ...], format: str) -> int:
    return BLOCKS[format].nbytes(int(np.prod(dims)))


# ---- values

# (byte, value) of each f16 in a block: the scale for codes of b bits, which are spread by 2^b / sqrt(12), and the
# minimum that puts the mean at zero. Q4_K's 6-bit scales and minimums have a mean of 32 and a root mean square of 37.
SCALES = {
    "Q4_0": [(0, SPREAD / 4.6)],
    "Q4_1": [(0, SPREAD / 4.6), (2, SPREAD / 4.6 * -7.5)],
    "Q5_0": [(0, SPREAD / 9.2)],
    "Q8_0": [(0, SPREAD / 74)],
    "Q4_K": [(0, SPREAD / 4.6 / 37), (2, SPREAD / 4.6 / 37 * 7.5)],
}


def _fill(format: str, dims: tuple[int, ...], rng: np.random.Generator) -> Iterator[np.ndarray]:
    """uint8 pieces of a tensor's data."""
    count, f = int(np.prod(dims)), BLOCKS[format]
    if format == "F32":  # norms
        yield np.ones(count, np.float32).view(np.uint8)
        return
    for start in range(0, count, PIECE):
        weights = min(PIECE, count - start)
        nbytes = f.nbytes(weights)
        words = rng.bit_generator.random_raw(-(-nbytes // 8))
        data = words.view(np.uint8)[:nbytes]
        if format == "F16":  # a random sign and mantissa, the exponent of [2^-6, 2^-5)
            words &= np.uint64(0x83FF83FF83FF83FF)
            words |= np.uint64(0x2400240024002400)
        else:
            for at, value in SCALES[format]:
                halves = np.dtype(
                    {"names": ["f16"], "formats": ["<f2"], "offsets": [at], "itemsize": f.bytes_per_block}
                )
                data.view(halves)["f16"] = value
        yield data


# ---- the file: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md


def _metadata(s: Shape, format: str) -> dict[str, Any]:
    """Keys and values; an int is written as uint32, a float as float32, a list of str as such, an array as int32."""
    tokens, kinds, merges = _vocabulary(s.vocab)
    return {
        "general.architecture": "llama",
        "general.name": f"{s.name}-random",
        "general.file_type": FILE_TYPES[format],
        "general.alignment": ALIGNMENT,
        "llama.vocab_size": s.vocab,
        "llama.context_length": s.context,
        "llama.embedding_length": s.hidden,
        "llama.block_count": s.layers,
        "llama.feed_forward_length": s.feed_forward,
        "llama.rope.dimension_count": s.hidden // s.heads,
        "llama.rope.freq_base": s.rope_theta,
        "llama.attention.head_count": s.heads,
        "llama.attention.head_count_kv": s.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def _vocabulary(size: int) -> tuple[list[str], np.ndarray, list[str]]:
    """(tokens, types, merges): the end token, the 256 bytes in byte-level BPE's letters, some merges, filler words."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [chr(code) for code in letters] + [chr(256 + i) for i in range(256 - len(letters))]
    merges = ["t h", "th e", "i n", "a n", "Ġ the", "Ġ a", "Ġ in"]
    tokens = ["<|endoftext|>", *alphabet, *(merge.replace(" ", "") for merge in merges)]
    tokens += [f"Ġfiller{i}" for i in range(size - len(tokens))]
    return tokens, np.array([3] + [1] * (size - 1), np.int32), merges


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """Type and value."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", 9, 5, len(value)) + value.tobytes()
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))


def _header(metadata: dict[str, Any], tensors: list[tuple[str, tuple[int, ...], str]]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    parts += [_string(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for name, dims, format in tensors:
        parts.append(_string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims[::-1]))
        parts.append(struct.pack("<IQ", BLOCKS[format].ggml_type, offset))
        offset += -(-_nbytes(dims, format) // ALIGNMENT) * ALIGNMENT
    return b"".join(parts)
