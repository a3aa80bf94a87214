"""Workloads: the same seed gives the same requests, another round gives others, and the shapes are as documented."""

import json

import pytest

from tokenmill.bench.workloads import WORKLOADS, make_workload
from tokenmill.errors import ConfigError


@pytest.mark.parametrize("name", WORKLOADS)
def test_deterministic_in_the_seed(name):
    assert make_workload(name, 5) == make_workload(name, 5)
    assert make_workload(name, 5) != make_workload(name, 6)


def words(message):
    return len(message["content"].split())


def test_chat_lengths():
    workload = make_workload("chat", 1)
    assert len(workload.sessions) == 48 and workload.concurrency == 16
    for session in workload.sessions:
        (turn,) = session.turns
        assert 32 <= turn.max_tokens <= 256
        assert 50 / 1.27 - 1 <= words(turn.messages[0]) <= 500 / 1.27 + 1


def test_shared_prefix_shares_exactly_the_system_prompt():
    sessions = make_workload("shared_prefix", 1).sessions
    assert len({s.turns[0].messages[0]["content"] for s in sessions}) == 1
    assert len({s.turns[0].messages[1]["content"] for s in sessions}) == 64


def test_rounds_share_no_prefix():
    """Otherwise a cache warm from the round before would be measured."""
    first, second = (make_workload("shared_prefix", seed).sessions[0].turns[0].messages for seed in (1000, 1001))
    assert first[0]["content"][:40] != second[0]["content"][:40]


def test_multiturn_and_agent_grow():
    assert [len(s.turns) for s in make_workload("multiturn", 1).sessions] == [6] * 8
    agent = make_workload("agent", 1)
    assert [len(s.turns) for s in agent.sessions] == [10] * 2 and agent.concurrency == 1
    assert [m["role"] for m in agent.sessions[0].turns[0].messages] == ["system", "user"]


def test_poisson_arrivals():
    workload = make_workload("chat", 1, rate=4.0, count=400)
    arrivals = [s.arrival for s in workload.sessions]
    assert workload.concurrency is None and arrivals == sorted(arrivals) and arrivals[0] == 0
    assert arrivals[-1] == pytest.approx(100, rel=0.2)


def test_own_prompts(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(
        json.dumps({"prompt": "Hi", "max_tokens": 3})
        + "\n\n"
        + json.dumps({"messages": [{"role": "user", "content": "Ho"}]})
    )
    workload = make_workload(str(path), 1, max_tokens=9)
    assert workload.name == "mine"
    assert [t.max_tokens for s in workload.sessions for t in s.turns] == [3, 9]
    assert workload.sessions[0].turns[0].messages == ({"role": "user", "content": "Hi"},)
    assert len(make_workload(str(path), 1, count=5).sessions) == 5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not json", "line 1 is not JSON"),
        ("[1]", "line 1 is not a JSON object"),
        ('{"text": "x"}', 'needs "prompt"'),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens is 0"),
        ('{"prompt": "x", "max_tokens": true}', "max_tokens is True"),
        ('{"messages": []}', "needs"),
        ("", "no prompts"),
    ],
)
def test_a_bad_prompt_file_names_the_line(tmp_path, text, says):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        make_workload(str(path), 1)


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="structured output"):
        make_workload("json", 1)
    with pytest.raises(ConfigError, match="'poems' is not one of chat"):
        make_workload("poems", 1)
    with pytest.raises(ConfigError, match="cannot be read"):
        make_workload(str(tmp_path / "none.jsonl"), 1)
