"""Philox against the published vectors of Random123 (kat_vectors), and the edges of the reference sampler."""

import pytest

from tokenmill.backends.reference_sampler import philox4x32, uniform

F = 0xFFFFFFFF


@pytest.mark.parametrize(
    "counter, key, expected",
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((F, F, F, F), (F, F), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, expected):
    assert philox4x32(key, counter) == expected


def test_a_seed_is_not_cut_to_32_bits():
    assert uniform(7, 0) != uniform(7 + 2**32, 0)
    assert uniform(2**64 - 1, 0) != uniform(2**32 - 1, 0)


def test_u_is_in_the_unit_interval_and_depends_on_seed_and_counter_only():
    values = [uniform(3, i) for i in range(2000)]
    assert all(0 <= u < 1 for u in values)
    assert len(set(values)) == len(values)
    assert abs(sum(values) / len(values) - 0.5) < 0.03
    assert values[5] == uniform(3, 5)
