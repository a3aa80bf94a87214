"""How each byte-level vocabulary cuts text into words before merging: tokenizer.ggml.pre -> its pre-tokeniser.

A GGUF file carries only a name. The tables below give back what that model family publishes in its tokenizer.json: the
normaliser, the ordered splits, and whether a whole word found in the vocabulary skips the merges. A near miss here
costs quality with no message, so a name that is not in the table is refused.

Knows nothing of vocabularies or files.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnsupportedModel

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{0}}|"

LLAMA3 = _CONTRACTION + _WORD + r"|\p{N}{1,3}" + _PUNCTUATION + _SPACES
QWEN2 = _CONTRACTION + _WORD + r"|\p{N}" + _PUNCTUATION + _SPACES
QWEN35 = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES
)  # marks belong to words
TEKKEN = _CASED.replace("{0}", "") + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
GPT4O = _CASED.replace("{0}", _CONTRACTION + "?") + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
SEED_CODER = _CONTRACTION + _WORD + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
EXAONE_MOE = (
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
MINICPM5 = _CONTRACTION + _WORD + r"|\p{N}+" + _PUNCTUATION + _SPACES
JAIS2 = (
    _CONTRACTION
    + _WORD
    + r"|\p{N}{1,3}"
    + _PUNCTUATION
    + r"|\s*[\r\n]+"
    + "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"|\s{1,2}(?!\S)|\s{1}"
)
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES,
)
DEEPSEEK_LLM = (  # six letters as \x{...}: Unicode's normal form would turn them into others
    r"[\r\n]",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}"
    r"ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """splits run in order, each isolating its matches in the pieces the one before left. GPT-2's own split comes last
    where gpt2 is true; digits: every digit becomes a word of its own, before ("first") or after ("last") the splits."""

    splits: tuple[str, ...] = ()
    gpt2: bool = False
    digits: str | None = None
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token as it stands is not merged from its bytes
    add_bos: bool = False  # what the family does where the file has no add_bos_token
    falcon: bool = False  # punctuation before, runs of three digits after

    def build(self):
        """-> (normaliser or None, pre-tokeniser) of the `tokenizers` library."""
        from tokenizers import Regex, normalizers
        from tokenizers.pre_tokenizers import ByteLevel, Digits, Punctuation, Sequence, Split

        steps = [Punctuation(behavior="contiguous")] if self.falcon else []
        if self.digits == "first":
            steps.append(Digits(individual_digits=True))
        steps += [Split(Regex(pattern), behavior="isolated") for pattern in self.splits]
        if self.digits == "last":
            steps.append(Digits(individual_digits=True))
        steps.append(ByteLevel(add_prefix_space=False, use_regex=self.gpt2))
        if self.falcon:
            steps += [Digits(individual_digits=False), Split(Regex("[0-9][0-9][0-9]"), behavior="isolated")]
        return (normalizers.NFC() if self.nfc else None), Sequence(steps)


_GPT2 = PreTokenizer(gpt2=True)
_GPT2_NFC = PreTokenizer(gpt2=True, nfc=True)
_DIGITS_GPT2 = PreTokenizer(gpt2=True, digits="first")
_LLAMA3 = PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizer((LLAMA3,))
_QWEN2 = PreTokenizer((QWEN2,), nfc=True)
_GPT4O = PreTokenizer((GPT4O,))
_DEEPSEEK3 = PreTokenizer(DEEPSEEK3)
_BLOOM = PreTokenizer((BLOOM,))
_BAILING = PreTokenizer((BAILING,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    # GPT-2's own split
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "jais", "trillion"), _GPT2),
    **dict.fromkeys(("granite-docling", "roberta-bpe"), _GPT2),
    **dict.fromkeys(("olmo", "mpt", "modern-bert"), _GPT2_NFC),  # GPT-NeoX's tokeniser
    # each digit alone, then GPT-2's split
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_GPT2),
    "command-r": PreTokenizer(gpt2=True, digits="first", nfc=True),
    "falcon": PreTokenizer(gpt2=True, falcon=True),
    # digits in threes
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _CL100K),
    "jais-2": PreTokenizer((JAIS2,)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", MINICPM5), ignore_merges=True),
    # digits one by one
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    **dict.fromkeys(("grok-2", "solar-open"), PreTokenizer((QWEN2,))),
    "qwen35": PreTokenizer((QWEN35,), nfc=True),
    "seed-coder": PreTokenizer((SEED_CODER,)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "exaone-moe": PreTokenizer((EXAONE_MOE,)),
    # case-aware words
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    # DeepSeek
    "deepseek-llm": PreTokenizer(DEEPSEEK_LLM, digits="last"),
    "deepseek-coder": PreTokenizer(DEEPSEEK_CODER, digits="last"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    # Bloom
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), _BLOOM),
    "viking": PreTokenizer((BLOOM,), digits="last"),
}


def pre_tokenizer(name: str | None) -> PreTokenizer:
    """Raises UnsupportedModel naming the value where it is absent or unknown."""
    if name is None:
        raise UnsupportedModel(
            "the file has no tokenizer.ggml.pre, so how its tokenizer cuts text is unknown; convert the model again"
        )
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        raise UnsupportedModel(
            f"tokenizer.ggml.pre is {name!r}, which tokenmill does not have; "
            f"known are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return found
