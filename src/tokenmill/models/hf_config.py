"""A config.json read into a family's frozen Config: typed, and loud about what it does not understand.

A family lists its fields by the names Hugging Face gives them. A field without a default must be there; a value of the
wrong type, an activation or rope type that the family does not have, a flag that changes the maths: UnsupportedModel,
naming the key and the value. Keys that cannot change the maths are in IGNORED; any other stranger is warned of once.
Both forms are read: transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters, also by layer type).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from ..errors import UnsupportedModel

log = logging.getLogger(__name__)
Config = TypeVar("Config")
MAX_LAYERS = 1 << 16  # bounds what a config can make us allocate before the weights are looked at

_IGNORED = """
    _attn_implementation _attn_implementation_autoset _name_or_path _sliding_window_pattern architectures
    attention_dropout auto_map boi_token_id boi_token_index bos_token_id cache_implementation
    chunk_size_feed_forward dtype embd_pdrop eoi_token_id eoi_token_index eos_token_id hidden_act
    hidden_dropout_prob id2label image_token_id image_token_index initializer_range is_llama_config label2id
    max_window_layers mm_tokens_per_image model_type output_attentions output_hidden_states pad_token_id
    partial_rotary_factor pretraining_tp problem_type resid_pdrop return_dict rope_parameters rope_scaling
    rope_theta task_specific_params tie_word_embeddings tokenizer_class torch_dtype torchscript
    transformers.js_config transformers_version unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
    vision_config
"""
IGNORED = frozenset(_IGNORED.split())
# Keys that change the maths, and the values besides null that do not. A family with the feature has a field for it.
NEUTRAL: dict[str, tuple] = {
    "attention_bias": (False,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "layer_types": (),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "no_bias": (True,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "qk_layernorm": (False,),
    "quantization_config": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "sliding_window": (),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}


@dataclass(frozen=True, kw_only=True)
class RopeParameters:
    """How positions become angles. Which of the fields count depends on rope_type; models/rope.py has the maths."""

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


_REQUIRED_OF_ROPE = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


class Keys:
    """A config dict that remembers which keys were read, for the derived fields of a Config."""

    def __init__(self, config: dict[str, Any]):
        self._config = config
        self.read: set[str] = set()

    def get(self, key: str, kind: Any, default: Any = dataclasses.MISSING, *, least: int = 1) -> Any:
        """config[key] checked against a type: int (of at least `least`), float (positive), bool, Literal, X | None."""
        self.read.add(key)
        value = self._config.get(key, default)
        if value is None and default is not dataclasses.MISSING:
            value = default
        if value is dataclasses.MISSING:
            raise UnsupportedModel(f"the config has no {key!r}, which {self.family} needs", param=key)
        return _checked(key, value, kind, least)

    @property
    def family(self) -> str:
        return str(self._config.get("model_type"))


def read_config(kind: type[Config], config: dict[str, Any]) -> Config:
    """The family's Config, made of `config`. Raises UnsupportedModel naming the key and its value.

    A field annotated Annotated[type, function] is worked out from several keys by function(keys).
    """
    keys = Keys(config)
    hints = typing.get_type_hints(kind, include_extras=True)
    values = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        hint = hints[field.name]
        if typing.get_origin(hint) is Annotated:
            values[field.name] = hint.__metadata__[0](keys)
        else:
            values[field.name] = keys.get(field.name, hint, field.default)

    for key, allowed in NEUTRAL.items():
        if key not in keys.read and config.get(key) is not None and config[key] not in allowed:
            raise UnsupportedModel(f"{key} = {config[key]!r} is not something {keys.family} has here", param=key)
    if strangers := sorted(config.keys() - keys.read - IGNORED - NEUTRAL.keys()):
        log.warning("config of %s: ignoring unknown keys %s", keys.family, ", ".join(strangers))
    return kind(**values)


def _checked(key: str, value: Any, kind: Any, least: int = 1) -> Any:
    """`value` as `kind`; bool is not an int here, and an int will do for a float."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        if value not in options:
            wanted = " or ".join(repr(option) for option in options)
            raise UnsupportedModel(f"{key} = {value!r} is not supported; this family has {wanted}", param=key)
        return value
    if options:  # X | None
        return None if value is None else _checked(key, value, options[0])
    if kind is float and type(value) in (int, float) and 0 < value < math.inf:
        return float(value)
    if type(value) is kind and kind is not float and (kind is not int or value >= least):
        return value
    wanted = {int: f"an int of at least {least}", float: "a positive number"}.get(kind, kind.__name__)
    raise UnsupportedModel(f"{key} = {value!r} should be {wanted}", param=key)


# ---- derived fields that families share


def read_rope(keys: Keys) -> RopeParameters:
    """From rope_parameters, or from rope_theta and rope_scaling."""
    given = keys.get("rope_parameters", dict, {}) or keys.get("rope_scaling", dict, {})
    return _rope_parameters(keys, given, keys.get("rope_theta", float, 10000.0))


def read_global_rope(keys: Keys) -> RopeParameters:
    """Gemma, layers that see everything: rope_parameters["full_attention"], or rope_theta and rope_scaling."""
    given = _rope_of(keys, "full_attention") or keys.get("rope_scaling", dict, {})
    return _rope_parameters(keys, given, keys.get("rope_theta", float, 1_000_000.0))


def read_local_rope(keys: Keys) -> RopeParameters:
    """Gemma, layers with a window: rope_parameters["sliding_attention"], or rope_local_base_freq."""
    return _rope_parameters(keys, _rope_of(keys, "sliding_attention"), keys.get("rope_local_base_freq", float, 10000.0))


def _rope_of(keys: Keys, layer_type: str) -> dict[str, Any]:
    given = keys.get("rope_parameters", dict, {})
    if given.keys() - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(
            f"rope_parameters = {given!r} should be given for each layer type", param="rope_parameters"
        )
    return given.get(layer_type) or {}


def _rope_parameters(keys: Keys, given: dict[str, Any], rope_theta: float) -> RopeParameters:
    given = {key: value for key, value in given.items() if value is not None}
    given.setdefault("rope_type", given.get("type", "default"))
    given.pop("type", None)
    given.setdefault("rope_theta", rope_theta)
    given.setdefault("partial_rotary_factor", keys.get("partial_rotary_factor", float, 1.0))
    if given["rope_type"] in ("llama3", "yarn"):
        given.setdefault("original_max_position_embeddings", keys.get("max_position_embeddings", int))
    hints = typing.get_type_hints(RopeParameters)
    if strangers := sorted(given.keys() - hints.keys()):
        name = strangers[0]
        raise UnsupportedModel(f"rope parameter {name} = {given[name]!r} is not supported", param=name)
    rope = RopeParameters(**{name: _checked(f"rope {name}", value, hints[name]) for name, value in given.items()})
    for name in _REQUIRED_OF_ROPE.get(rope.rope_type, ()):
        if name not in given:
            raise UnsupportedModel(f"rope_type {rope.rope_type!r} needs {name}", param=name)
    if rope.rope_theta <= 1:
        raise UnsupportedModel(f"rope_theta = {rope.rope_theta!r} should be more than 1", param="rope_theta")
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise UnsupportedModel(
            f"high_freq_factor = {rope.high_freq_factor} should be more than low_freq_factor {rope.low_freq_factor}",
            param="high_freq_factor",
        )
    return rope


def read_head_dim(keys: Keys) -> int:
    """Where it is not given: hidden_size / num_attention_heads."""
    heads, hidden = keys.get("num_attention_heads", int), keys.get("hidden_size", int)
    head_dim = keys.get("head_dim", int | None, None)
    if head_dim is None and hidden % heads:
        raise UnsupportedModel(f"hidden_size {hidden} does not divide into num_attention_heads {heads}")
    return head_dim or hidden // heads


def read_num_kv_heads(keys: Keys) -> int:
    """Older files leave it out: one key/value head for each query head."""
    return keys.get("num_key_value_heads", int | None, None) or keys.get("num_attention_heads", int)


def window_everywhere(keys: Keys) -> tuple[int, ...]:
    """Mistral: every layer sees the last sliding_window positions, or all where it is null."""
    return (keys.get("sliding_window", int | None, None) or 0,) * _num_layers(keys)


def window_from_layer(keys: Keys) -> tuple[int, ...]:
    """Qwen: with use_sliding_window, layers from max_window_layers on, unless layer_types says it layer by layer."""
    enabled = keys.get("use_sliding_window", bool, False)
    first = keys.get("max_window_layers", int, 28, least=0)
    windows = _windows(keys, lambda i: enabled and i >= first)
    if any(windows) and not enabled:
        raise UnsupportedModel("layer_types has windows, use_sliding_window = False has not", param="layer_types")
    return windows


def window_by_pattern(keys: Keys) -> tuple[int, ...]:
    """Gemma: every sliding_window_pattern-th layer sees everything, unless layer_types says it layer by layer."""
    period = keys.get("sliding_window_pattern", int, 6)
    return _windows(keys, lambda i: (i + 1) % period != 0)


def _windows(keys: Keys, slides: Callable[[int], bool]) -> tuple[int, ...]:
    num_layers = _num_layers(keys)
    by_rule = ["sliding_attention" if slides(i) else "full_attention" for i in range(num_layers)]
    types = keys.get("layer_types", list, by_rule)
    if len(types) != num_layers:
        raise UnsupportedModel(f"layer_types has {len(types)} entries for {num_layers} layers", param="layer_types")
    for i, kind in enumerate(types):
        _checked(f"layer_types[{i}]", kind, Literal["full_attention", "sliding_attention"])
    window = keys.get("sliding_window", int | None, None)
    if window is None and "sliding_attention" in types:
        raise UnsupportedModel("layer_types has windows, but sliding_window is not given", param="sliding_window")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)  # type: ignore[misc]


def _num_layers(keys: Keys) -> int:
    num_layers = keys.get("num_hidden_layers", int)
    if num_layers > MAX_LAYERS:
        raise UnsupportedModel(f"num_hidden_layers = {num_layers} is more than {MAX_LAYERS}", param="num_hidden_layers")
    return num_layers
