"""The rotary frequencies are Transformers' within float32's rounding."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tokenmill.models.hf_config import RopeParameters
from tokenmill.models.rope import make_rope

CASES = (
    dict(rope_type="linear", factor=4.0),
    dict(rope_type="linear", factor=8.0, rope_theta=1e6),
    dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=500000.0),
    dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=500000.0),
    dict(rope_type="yarn", factor=4.0, rope_theta=1e6),
    dict(rope_type="yarn", factor=40.0, beta_fast=16.0, beta_slow=2.0),
    dict(rope_type="yarn", factor=4.0, truncate=False),
    dict(rope_type="yarn", factor=4.0, attention_factor=1.5),
    dict(rope_type="yarn", factor=40.0, mscale=1.0, mscale_all_dim=0.7),
    dict(rope_type="yarn", factor=0.5),
    dict(rope_type="linear", factor=2.0, partial_rotary_factor=0.5),
    dict(rope_type="yarn", factor=2.0, partial_rotary_factor=0.25),
)


@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_scaled_frequencies_are_transformers(case, head_dim):
    given = dict(rope_theta=10000.0, original_max_position_embeddings=8192) | case
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=dict(given))
    wanted, wanted_scale = ROPE_INIT_FUNCTIONS[case["rope_type"]](config, "cpu")
    rope = make_rope(RopeParameters(**given), head_dim)
    assert rope.head_dim == head_dim
    np.testing.assert_allclose(np.float32(rope.inv_freq), wanted.numpy(), rtol=1e-6)
    assert rope.scale == pytest.approx(wanted_scale, rel=1e-7)


@pytest.mark.parametrize("theta", (1e4, 1e5, 1e6))
def test_plain_frequencies_are_the_paper_s(theta):
    rope = make_rope(RopeParameters(rope_theta=theta), 64)
    np.testing.assert_allclose(rope.inv_freq, theta ** (-np.arange(0, 64, 2) / 64), rtol=5e-7)
    assert rope.scale == 1.0


def test_a_part_of_the_head_turns():
    rope = make_rope(RopeParameters(partial_rotary_factor=0.25), 64)
    assert len(rope.inv_freq) == 8 and rope.head_dim == 64
