"""A Tokenizer from a Hugging Face folder: tokenizer.json and the small JSON files beside it, or tokenizer.model alone.

    bos, add_bos    tokenizer_config.json where it says so, else what tokenizer.json's post-processor does
    end tokens      the union of config.json, generation_config.json, tokenizer_config.json and the well-known ones
    chat template   chat_template.jinja, else tokenizer_config.json (one, or a list by name), else chat_template.json

Knows nothing of weights. Raises ModelFileError naming the file that is missing or damaged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ModelFileError, UnsupportedModel
from .byte_level import LibraryVocabulary
from .tokenizer import Tokenizer, Vocabulary, end_tokens

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def hf_tokenizer(folder: Path, config: Mapping[str, Any] | None = None) -> Tokenizer:
    folder = Path(folder)
    settings = _read(folder, "tokenizer_config.json")
    generation = _read(folder, "generation_config.json")
    config = config or {}
    vocabulary, adds_bos, adds_eos = _vocabulary(folder, settings)

    named = _read(folder, "special_tokens_map.json") | settings
    texts = {name: text for name in _NAMES if (text := _text(named.get(name))) is not None}
    ids = {name: vocabulary.token_id(text) for name, text in texts.items()}
    bos = ids.get("bos_token")
    if bos is None:
        bos = next((i for source in (generation, config) if type(i := source.get("bos_token_id")) is int), None)
    declared = [ids.get("eos_token"), generation.get("eos_token_id"), config.get("eos_token_id")]
    first = next((i for value in declared for i in _as_list(value)), None)
    special = vocabulary.special | {i for i in ids.values() if i is not None}
    ends = end_tokens(declared, special, vocabulary)
    explicit = settings.get("add_bos_token")
    return Tokenizer(
        vocabulary,
        bos_token_id=bos,
        eos_token_id=first,
        eos_token_ids=ends,
        special_token_ids=special | ends,
        add_bos=explicit if isinstance(explicit, bool) else (bos is not None and adds_bos == bos),
        add_eos=settings["add_eos_token"] if isinstance(settings.get("add_eos_token"), bool) else adds_eos is not None,
        chat_templates=_templates(folder, settings),
        template_tokens=texts,
    )


def _vocabulary(folder: Path, settings) -> tuple[Vocabulary, int | None, int | None]:
    """-> vocabulary, the id it puts before every text, the id it puts after."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        if (folder / "tokenizer.model").is_file():
            from .spm_file import read_spm_file

            model = read_spm_file(folder / "tokenizer.model")
            for name, text in (("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>")):
                if model.token_id(text) in model.special:
                    settings.setdefault(name, text)
            return model, model.token_id(_text(settings.get("bos_token")) or ""), None
        raise ModelFileError(f"{folder.name} has no tokenizer.json and no tokenizer.model")
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library panics, with a class of its own, on some damaged files
        raise ModelFileError(f"tokenizer.json cannot be read: {str(error)[:200]}") from None
    vocabulary = LibraryVocabulary(backend)
    plain = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a").ids
    extra = len(whole) - len(plain)
    before = next((n for n in range(extra + 1) if whole[n : n + len(plain)] == plain), 0)
    if before > 1 or extra - before > 1:
        raise UnsupportedModel(
            "tokenizer.json adds more than one token around each text; a language model adds at most BOS"
        )
    return vocabulary, whole[0] if before else None, whole[-1] if extra > before else None


def _templates(folder: Path, settings) -> dict[str, str]:
    found: dict[str, str] = {}
    value = settings.get("chat_template") or _read(folder, "chat_template.json").get("chat_template")
    if isinstance(value, str):
        found["default"] = value
    elif isinstance(value, list):
        for one in value:
            if isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("template"), str):
                found[one["name"]] = one["template"]
    for path in (*sorted(folder.glob("additional_chat_templates/*.jinja")), folder / "chat_template.jinja"):
        if path.is_file():
            name = "default" if path.parent == folder else path.stem
            found[name] = path.read_text("utf-8", errors="replace")
    return found


def _read(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{name} is not valid JSON: {str(error)[:120]}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{name} must hold a JSON object")
    return value


def _text(value: Any) -> str | None:
    """Special tokens stand in the JSON files as a string or as {"content": ...}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _as_list(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [i for i in values if type(i) is int]
