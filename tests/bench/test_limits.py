"""What a step must read and compute, by hand; and the machine's ceilings, which only have to be sane."""

import time

import pytest

from tokenmill.bench.limits import Step, Work, decode_limit, op_work, prefill_limit, step_work
from tokenmill.bench.machine import Ceilings, measure_ceilings, middle
from tokenmill.models.registry import build_model
from tokenmill.weights.loader import open_checkpoint


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 30])
@pytest.mark.parametrize("context", [30, 31, 64])
@pytest.mark.parametrize("window", [0, 1, 4, 8, 29, 30, 31, 100])
def test_attended_and_cached_positions(tokens, context, window):
    seen = [
        set(range(max(0, p + 1 - window) if window else 0, p + 1)) for p in range(context - tokens, context)
    ]  # of each of the last tokens
    step = Step(3, tokens, context)
    assert step.attended(window) == 3 * sum(map(len, seen))
    assert step.cached(window) == 3 * len(set().union(*seen))


def test_a_step_takes_the_longer_of_reading_and_computing():
    ceilings = Ceilings(read_bytes=10.0, float_ops=2.0, int8_ops=4.0)
    assert Work(bytes=100, int_ops=8, float_ops=2).seconds(ceilings) == 10
    assert Work(bytes=10, int_ops=8, float_ops=2).seconds(ceilings) == 3


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    checkpoint = open_checkpoint(smollm2_path)
    return build_model(checkpoint.config, checkpoint.weights).program


def test_smollm2_by_hand(smollm2):
    """135M parameters, of which the embedding (tied, Q8_0) is read once for the head; norms are not counted."""
    layer, head = 576 * (576 + 2 * 192) + 576 * 576 + 3 * 576 * 1536, 49152 * 576
    one = step_work(smollm2, Step(1, 1, 100))
    row = 576 // 32 * 34
    assert one.bytes == 30 * layer // 32 * 20 + head // 32 * 34 + row + 100 * 2 * 2 * 3 * 64 * 30
    assert one.int_ops == 2 * (30 * layer + head)
    assert one.float_ops == 4 * 9 * 64 * 100 * 30
    prompt = step_work(smollm2, Step(1, 512, 512))
    assert prompt.int_ops == 2 * (512 * 30 * layer + head)  # only the last row goes through the head
    assert prompt.float_ops == 4 * 9 * 64 * 30 * 512 * 513 // 2


def test_limits_follow_what_binds(smollm2):
    slow_memory, slow_integers = Ceilings(1e9, 1e15, 1e15), Ceilings(1e15, 1e15, 1e11)
    assert decode_limit(smollm2, slow_memory, 100) == pytest.approx(1e9 / step_work(smollm2, Step(1, 1, 100)).bytes)
    assert decode_limit(smollm2, slow_memory, 100, 16) > 11 * decode_limit(smollm2, slow_memory, 100)
    assert prefill_limit(smollm2, slow_integers, 512) == pytest.approx(
        512 * 1e11 / step_work(smollm2, Step(1, 512, 512)).int_ops, rel=1e-3
    )
    # what a longer context costs is its keys and values, nothing else
    cost = 1 / decode_limit(smollm2, slow_memory, 2048) - 1 / decode_limit(smollm2, slow_memory, 100)
    assert cost == pytest.approx((2048 - 100) * smollm2.kv_bytes_per_token / 1e9)


def test_ops_on_activations_are_free(smollm2):
    assert {op.name for op in smollm2.ops if op_work(op, Step(1, 4, 4)) == Work()} == {
        "rms_norm",
        "rope",
        "act_mul",
        "select_rows",
    }


# ---- the machine


def test_ceilings_take_about_a_second_and_are_those_of_a_computer():
    started = time.process_time()
    found = measure_ceilings(1, seconds=0.02)
    assert time.process_time() - started < 1.5
    assert 1e8 < found.read_bytes < 1e12 and 1e9 < found.float_ops < 1e13 and 1e9 < found.int8_ops < 1e14
    assert found.isa and found.recipe


def test_each_instruction_set_has_ceilings_of_its_own():
    from tokenmill.backends.cpu import _native

    found = {isa: measure_ceilings(1, isa, seconds=0.01) for isa in _native.instruction_sets()}
    assert [c.isa for c in found.values()] == list(found)
    assert len({c.recipe for c in found.values()}) == len(found)
    assert max(found.values(), key=lambda c: c.int8_ops).isa != "plain" or len(found) == 1
    with pytest.raises(ValueError, match="instruction set"):
        measure_ceilings(1, "mmx")


def test_ceilings_before_and_after_meet_in_the_middle():
    both = [Ceilings(1.0, 2.0, 3.0, "a", "b"), Ceilings(3.0, 4.0, 5.0, "a", "b")]
    assert middle(both) == Ceilings(2.0, 3.0, 4.0, "a", "b") and middle(both[:1]) == both[0]
    assert both[0].rounded() == {"read_bytes": 1, "float_ops": 2, "int8_ops": 3, "isa": "a", "recipe": "b"}
