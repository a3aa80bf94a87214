"""Small models for tests: random ones of every family as Hugging Face folders and GGUF files, and a rigged one.

    folder = hf_folder(tmp_path / "m", "qwen3")              # config.json, model.safetensors, tokenizer.json ...
    path   = gguf_file(tmp_path / "m.gguf", "qwen3")         # the same weights, as llama.cpp's converter stores them
    path   = rigged_gguf(tmp_path / "r.gguf", [5, 9, 3])     # greedy: 5, 9, 3, end of text, after any prompt

The tokenizer is byte-level BPE: 256 bytes, a few merges, and the special tokens below. Equal arguments, equal files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .gguf_writer import Tensor, write_gguf

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
ARCHITECTURE = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID, IM_START_ID, IM_END_ID = 0, 1, 2
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or"), ("t", "h"),
          ("th", "e"), ("Ġ", "the"), ("Ġ", "a"), ("i", "n"), ("Ġ", "in"))  # fmt: skip
VOCAB_SIZE = 320  # of which the last few are unused padding tokens

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def token_list(vocab_size: int = VOCAB_SIZE) -> list[str]:
    """Token texts by id, in byte-level BPE's alphabet."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*SPECIAL_TOKENS, *bytes_to_unicode().values(), *("".join(pair) for pair in MERGES)]
    return [*tokens, *(f"<|unused{i}|>" for i in range(vocab_size - len(tokens)))][:vocab_size]


def tokenizer(vocab_size: int = VOCAB_SIZE):
    """The same tokenizer as a tokenizers.Tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = token_list(vocab_size)
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(MERGES)))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    return made


def make_model(family: str, *, seed: int = 0, **overrides: Any):
    """A transformers model in float32 with weights of lively size, so that its logits are far from flat."""
    import torch
    import transformers

    sizes: dict[str, Any] = dict(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
        bos_token_id=EOS_ID, eos_token_id=IM_END_ID, pad_token_id=EOS_ID,
    )  # fmt: skip
    if family == "mistral":
        sizes |= dict(sliding_window=24, head_dim=16)
    if family == "qwen3":
        sizes |= dict(head_dim=32)
    if family == "gemma3":
        sizes |= dict(head_dim=32, num_hidden_layers=6, sliding_window=16, query_pre_attn_scalar=32,
                      tie_word_embeddings=True)  # fmt: skip
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3": "Gemma3"}
    stem = names[family]
    config_class = getattr(transformers, stem + ("TextConfig" if family == "gemma3" else "Config"))
    model = getattr(transformers, stem + "ForCausalLM")(config_class(**(sizes | overrides))).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.1 * noise + (0.0 if family == "gemma3" else 1.0))
            elif "embed_tokens" in name:
                parameter.copy_(noise * (0.1 if family == "gemma3" else 1.0))
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
    return model


def hf_folder(
    path: Path, family: str, *, seed: int = 0, dtype: str = "float32", shards: int = 1, model=None, **overrides: Any
) -> Path:
    """A Hugging Face folder. `overrides` are fields of its config; dtype float32, float16 or bfloat16."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = model or make_model(family, seed=seed, **overrides)
    model = model.to(getattr(torch, dtype))
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(path, max_shard_size=total if shards == 1 else total // shards)
    vocab_size = model.config.vocab_size
    tokenizer(vocab_size).save(str(Path(path) / "tokenizer.json"))
    (Path(path) / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": SPECIAL_TOKENS[EOS_ID],
                "eos_token": SPECIAL_TOKENS[IM_END_ID],
                "add_bos_token": False,
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
    return Path(path)


def tokenizer_metadata(vocab_size: int = VOCAB_SIZE) -> dict[str, Any]:
    """The tokenizer as GGUF keys."""
    tokens = token_list(vocab_size)
    kinds = [3 if t in SPECIAL_TOKENS else 5 if t.startswith("<|unused") else 1 for t in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.bos_token_id": EOS_ID,
        "tokenizer.ggml.eos_token_id": IM_END_ID,
        "tokenizer.ggml.unknown_token_id": EOS_ID,
        "tokenizer.ggml.padding_token_id": EOS_ID,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def gguf_metadata(family: str, config) -> dict[str, Any]:
    """A transformers config as the keys that llama.cpp's converter writes."""
    arch = ARCHITECTURE[family]
    rope = config.rope_parameters
    local, rope = rope.get("sliding_attention"), rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    metadata: dict[str, Any] = {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": f"tiny {family}",
        "general.file_type": 0,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(rope["rope_theta"]),
        f"{arch}.rope.dimension_count": head_dim,
    }
    if rope["rope_type"] in ("linear", "yarn"):
        metadata[f"{arch}.rope.scaling.type"] = rope["rope_type"]
        metadata[f"{arch}.rope.scaling.factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
        metadata[f"{arch}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if getattr(config, "sliding_window", None):
        metadata[f"{arch}.attention.sliding_window"] = config.sliding_window
    if local and local["rope_theta"] != 10000.0:
        metadata[f"{arch}.rope.freq_base_swa"] = float(local["rope_theta"])
    return metadata


def permute(array: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's converter: each head's rotary halves interleaved."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def gguf_tensors(family: str, model, format: Callable[[str], str] | str = "F32") -> dict[str, Tensor]:
    """A transformers model's weights as llama.cpp's converter names, orders and shifts them.

    `format`: of the matrices, or a function from a GGUF name to it. Vectors are F32.
    """
    import gguf

    config = model.config
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3,
            "gemma3": gguf.MODEL_ARCH.GEMMA3}[ARCHITECTURE[family]]  # fmt: skip
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = parameter.detach().float().numpy()
        if ARCHITECTURE[family] == "llama" and ("q_proj" in name or "k_proj" in name):
            array = permute(array, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if family == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        kind = "F32" if array.ndim == 1 else format(stored) if callable(format) else format
        tensors[stored] = Tensor.quantised(kind, array, seed=len(tensors))
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if rope["rope_type"] == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        inv_freq = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
        plain = rope["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
        tensors["rope_freqs.weight"] = Tensor.f32(plain / inv_freq)
    return tensors


def gguf_file(
    path: Path, family: str, *, seed: int = 0, format: Callable[[str], str] | str = "F32", model=None, **overrides: Any
) -> Path:
    """A GGUF file of the same weights as hf_folder with the same arguments."""
    model = model or make_model(family, seed=seed, **overrides)
    metadata = gguf_metadata(family, model.config) | tokenizer_metadata(model.config.vocab_size)
    return write_gguf(path, metadata, gguf_tensors(family, model, format))


def rigged_gguf(
    path: Path,
    sequence: Sequence[int],
    *,
    then: int | None = IM_END_ID,
    vocab_size: int = VOCAB_SIZE,
    layers: int = 2,
    context_length: int = 512,
    scale: float = 1.0,
    format: str = "F32",
) -> Path:
    """A llama whose next token depends on the current one only: greedily it writes `sequence` after any prompt.

    The ids of `sequence` must differ. After its last comes `then` (None: the sequence again, for ever), after any token
    that is not in it its first. Attention and MLP add nothing, so the answer is exact in every format and batch.
    With scale 1 the chosen token has nearly all the probability at temperature 1; smaller scales leave some to others.
    """
    width = 128
    if len(set(sequence)) != len(sequence) or (then is not None and then in sequence):
        raise ValueError("a rigged sequence must not repeat a token")
    rng = np.random.default_rng(0)
    embedding = rng.choice([-1.0, 1.0], (vocab_size, width)).astype(np.float32)  # each row has rms 1
    embedding[:, 0] = 1.0
    head = np.zeros((vocab_size, width), np.float32)
    followers = [*sequence[1:], sequence[0] if then is None else then]
    for token, follower in zip(sequence, followers):
        head[follower] += embedding[token]
    if then is not None or len(sequence) > 1:
        head[sequence[0], 0] += 0.7 * width
    best = (head @ embedding.T).argmax(axis=0)
    expected = np.full(vocab_size, sequence[0])
    expected[list(sequence)] = followers
    assert (best == expected).all(), "vectors too close: change the seed"

    arch = "llama"
    metadata = {
        "general.architecture": arch,
        "general.name": "rigged",
        f"{arch}.block_count": layers,
        f"{arch}.context_length": context_length,
        f"{arch}.embedding_length": width,
        f"{arch}.feed_forward_length": 128,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
    } | tokenizer_metadata(vocab_size)
    tensors = {
        "token_embd.weight": Tensor.quantised(format, embedding),
        "output_norm.weight": Tensor.f32(np.ones(width)),
        "output.weight": Tensor.quantised(format, head * scale),
    }
    shapes = {"attn_q": (128, width), "attn_k": (64, width), "attn_v": (64, width), "attn_output": (width, 128),
              "ffn_gate": (128, width), "ffn_up": (128, width), "ffn_down": (width, 128)}  # fmt: skip
    for i in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{i}.{norm}.weight"] = Tensor.f32(np.ones(width))
        for name, shape in shapes.items():
            zero = name in ("attn_output", "ffn_down")
            values = np.zeros(shape) if zero else rng.standard_normal(shape) * 0.05
            tensors[f"blk.{i}.{name}.weight"] = Tensor.quantised(format, values)
    return write_gguf(path, metadata, tensors)
