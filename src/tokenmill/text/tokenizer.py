"""Tokenizer: text to ids and back, and what the model says about its special tokens.

One class over two kinds of vocabulary: byte-level BPE (or a folder's tokenizer.json) in the `tokenizers` library, and
SentencePiece scores in spm.py. load_tokenizer(checkpoint) makes it from a GGUF file's metadata or a HF folder.

BOS: encode() begins with the model's start token when the model says so (add_bos), and never writes a second one where
the text spells it already, so a prompt has one BOS whether a chat template, a client or tokenmill wrote it.
Special tokens spelled in the text are parsed as such (parse_special), as every engine does; detokenising uses each
token's bytes, so text is exact however a character is spread over tokens.

Knows nothing of requests or sampling; chat messages it hands to text/chat.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

# Tokens that end a turn wherever a vocabulary holds them as special tokens, whatever its configuration forgets to say.
END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<|END_OF_TURN_TOKEN|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<EOT>",
    "[EOT]",
    "[EOS]",
    "</s>",
    "<eos>",
)


class Vocabulary(Protocol):
    """What Tokenizer asks of the two kinds. All calls are safe from any thread."""

    size: int  # ids are 0 .. size-1; some may be unused
    special: frozenset[int]  # control tokens: no text of their own
    strips_leading_space: bool  # the first space of a text stands for the one encode() puts there

    def encode(self, text: str, *, parse_special: bool = True, prefix: bool = True) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_text(self, token_id: int) -> str: ...

    def token_id(self, text: str) -> int | None: ...

    def longest_token(self) -> int: ...


@dataclass
class Tokenizer:
    vocabulary: Vocabulary = field(repr=False)
    bos_token_id: int | None = None
    eos_token_id: int | None = None  # the first one declared; eos_token_ids has all
    eos_token_ids: frozenset[int] = frozenset()
    special_token_ids: frozenset[int] = frozenset()  # left out of decoded text with skip_special_tokens
    add_bos: bool = False
    add_eos: bool = False
    chat_templates: dict[str, str] = field(default_factory=dict, repr=False)
    template_tokens: dict[str, str] = field(default_factory=dict)  # "bos_token" and the like, for chat templates
    _bytes: dict[int, bytes] = field(default_factory=dict, repr=False)

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size

    @property
    def strips_leading_space(self) -> bool:
        return self.vocabulary.strips_leading_space

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    @cached_property
    def max_token_bytes(self) -> int:
        """The most bytes of text one token can stand for."""
        return max(1, self.vocabulary.longest_token())

    def encode(self, text: str, add_special_tokens: bool = True, *, parse_special: bool = True) -> list[int]:
        """Raises InvalidRequest for text that is no Unicode (a lone surrogate)."""
        ids = self.vocabulary.encode(text, parse_special=parse_special)
        if add_special_tokens:
            if self.add_bos and self.bos_token_id is not None and (not ids or ids[0] != self.bos_token_id):
                ids.insert(0, self.bos_token_id)
            if self.add_eos and self.eos_token_id is not None and ids[-1:] != [self.eos_token_id]:
                ids.append(self.eos_token_id)
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """Ids of text that goes on from other text: no BOS, no leading space of the tokeniser's own."""
        return self.vocabulary.encode(text, prefix=False)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token_ids; ill-formed bytes become U+FFFD. Ids outside the vocabulary have no text."""
        special = self.special_token_ids if skip_special_tokens else ()
        data = b"".join([self.token_bytes(i) for i in token_ids if i not in special])
        if self.strips_leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str | list[int]:
        """Transformers' name and defaults for render_chat and chat_to_ids of text/chat.py: ids, or text."""
        from .chat import chat_to_ids, render_chat

        make = chat_to_ids if tokenize else render_chat
        return make(self, conversation, add_generation_prompt=add_generation_prompt, template=chat_template, **kwargs)

    def token_bytes(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            found = self.vocabulary.token_bytes(token_id) if 0 <= token_id < self.vocabulary.size else b""
            self._bytes[token_id] = found
        return found

    def token_text(self, token_id: int) -> str:
        """The vocabulary's own spelling: "Ġhello", "▁hello", "<0x0A>"."""
        return self.vocabulary.token_text(token_id) if 0 <= token_id < self.vocabulary.size else ""

    def token_id(self, text: str) -> int | None:
        """The id spelled exactly so in the vocabulary."""
        return self.vocabulary.token_id(text)


def end_tokens(declared: Iterable[object], special: frozenset[int], vocabulary: Vocabulary) -> frozenset[int]:
    """Every token that ends a reply: those declared anywhere (ids or lists of ids), and the well-known special ones."""
    ids: set[int] = set()
    for value in declared:
        for one in value if isinstance(value, Sequence) and not isinstance(value, str) else (value,):
            if isinstance(one, int) and not isinstance(one, bool) and 0 <= one < vocabulary.size:
                ids.add(one)
    known = {text: found for text in END_TOKENS if (found := vocabulary.token_id(text)) in special}
    if "<|return|>" in known and "<|call|>" in known:
        known.pop("<|end|>", None)  # in this format <|end|> closes a message inside a turn
    return frozenset(ids | set(known.values()))


def load_tokenizer(checkpoint) -> Tokenizer:
    """The tokenizer of weights.loader's Checkpoint. Raises ModelFileError or UnsupportedModel naming what is wrong."""
    if checkpoint.kind == "gguf":
        from .gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(checkpoint.metadata)
    from .hf_tokenizer import hf_tokenizer

    return hf_tokenizer(checkpoint.folder, checkpoint.config)
