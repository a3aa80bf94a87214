"""Seeds over HTTP: the same seed the same text, whatever happens beside it; other seeds another (BC-042, 043, 044)."""

import threading

import pytest

from tests.api.conftest import QUICK
from tests.api.server import serving, strict_json

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"prompt": "the ", "max_tokens": 16, "temperature": 1.2, "ignore_eos": True}


def texts(answer) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


class TestChoices:
    def test_they_differ_and_come_again_the_same(self, tiny):
        first = tiny.complete(**BODY, n=4, seed=7)
        assert len(set(texts(first))) == 4
        assert texts(tiny.complete(**BODY, n=4, seed=7)) == texts(first)
        assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]

    def test_greedy_ones_are_equal(self, tiny):
        assert len(set(texts(tiny.complete(**BODY | {"temperature": 0}, n=4)))) == 1

    def test_the_prompt_counts_once(self, tiny):
        one, four = tiny.complete(**BODY, n=1)["usage"], tiny.complete(**BODY, n=4)["usage"]
        assert four["prompt_tokens"] == one["prompt_tokens"]
        assert four["completion_tokens"] == 4 * one["completion_tokens"]
        assert four["prompt_tokens_details"]["cached_tokens"] < four["prompt_tokens"]

    def test_a_list_of_prompts_with_two_each(self, tiny):
        answer = tiny.complete(**BODY | {"prompt": ["a", "b", "c"]}, n=2, seed=3)
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        for i, prompt in enumerate(["a", "b", "c"]):
            assert texts(tiny.complete(**BODY | {"prompt": prompt}, n=2, seed=3)) == texts(answer)[2 * i : 2 * i + 2]

    def test_choice_zero_is_the_choice_of_a_request_for_one(self, tiny):
        assert texts(tiny.complete(**BODY, n=3, seed=9))[0] == texts(tiny.complete(**BODY, seed=9))[0]


class TestSeeds:
    SEEDS = (0, -1, 2**31, 2**32, 2**63 - 1, 5, 5 + 2**32)

    def test_all_sixty_four_bits_count(self, tiny):
        assert len({texts(tiny.complete(**BODY, seed=seed))[0] for seed in self.SEEDS}) == len(self.SEEDS)

    def test_the_same_again_with_others_between_and_beside(self, tiny):
        alone = {seed: texts(tiny.complete(**BODY, seed=seed))[0] for seed in self.SEEDS}
        found: list[bool] = []

        def one(seed: int) -> None:
            found.append(texts(tiny.complete(**BODY, seed=seed))[0] == alone[seed])

        threads = [threading.Thread(target=one, args=(seed,)) for seed in self.SEEDS * 3]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * len(threads)

    def test_a_stream_is_the_whole_answer(self, tiny):
        whole = texts(tiny.complete(**BODY, seed=5))[0]
        assert "".join(e["choices"][0]["text"] for e in tiny.stream(COMPLETIONS, BODY | {"seed": 5})) == whole

    def test_after_a_restart_and_with_other_settings(self, tiny, tiny_path):
        """Other chunks, other batch, other threads, no prefix cache: bit-identical, as promised."""
        with serving(
            tiny_path, *QUICK, "--max-num-batched-tokens", "7", "--max-num-seqs", "2", "--no-enable-prefix-caching"
        ) as other:
            for seed in (5, 2**32):
                body = BODY | {"prompt": "hello the world " * 4, "logprobs": 3, "seed": seed}
                assert other.complete(**body)["choices"] == tiny.complete(**body)["choices"]

    @pytest.mark.parametrize("fields", [{}, {"seed": None}])
    def test_without_one_it_is_random(self, tiny, fields):
        assert len({texts(tiny.complete(**BODY, **fields))[0] for _ in range(4)}) > 1


def test_greedy_is_the_same_alone_and_in_company(smol):
    """BC-043 on the real model, briefly; the matrix is in tests/pairs."""
    body = {"prompt": "Once upon a time " * 8, "max_tokens": 12, "temperature": 0, "logprobs": 2}
    alone = strict_json(smol.post(COMPLETIONS, body).content)["choices"]
    answers: list = []

    def one(i: int) -> None:
        other = body if i % 2 else body | {"prompt": f"{i} green bottles", "temperature": 1.0}
        answer = strict_json(smol.post(COMPLETIONS, other).content)["choices"]
        if i % 2:
            answers.append(answer)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [alone] * 4
