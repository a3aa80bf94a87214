"""Workloads: what is asked of a server, and in which order. Deterministic in the seed; knows no server and no clock.

A workload is a number of sessions. A session is one or more turns; a turn adds messages and says how many tokens to
write; the answer joins the history before the next turn. `concurrency` sessions run at once, or they arrive at random
moments at a given rate. All text is English prose from the standard library's own help topics, so that it compresses
and tokenises like text and needs no download. Each round uses another seed: a prefix cache may help within a round,
which is what shared_prefix, multiturn and agent measure, and never from the round before.

    chat           sessions of one turn, prompts lognormal around 150 tokens (50-500), outputs 32-256
    shared_prefix  one system prompt of 1,000 tokens before every question of 30; outputs of 32
    multiturn      8 conversations of 6 turns
    agent          one workflow at a time, 10 calls over a growing history with tool results
    streams        64 answers of 256 tokens to short questions, all at once: what a token costs beside the model
"""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ..errors import ConfigError

TOKENS_PER_WORD = 1.27  # of this text in a vocabulary of some 49k; steers lengths only

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    messages: tuple[Message, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    turns: tuple[Turn, ...]
    arrival: float = 0.0  # seconds after the round's start; 0 where concurrency rules


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    sessions: tuple[Session, ...]
    concurrency: int | None = field(default=None)  # None: sessions start at their arrival times


@cache
def _words() -> tuple[str, ...]:
    from pydoc_data.topics import topics

    return tuple(re.findall(r"[A-Za-z][a-z']*[.,;]?", " ".join(topics[key] for key in sorted(topics))))


class Prose:
    """Passages of about so many tokens."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def passage(self, tokens: int) -> str:
        words = _words()
        count = max(1, round(tokens / TOKENS_PER_WORD))
        start = self.random.randrange(len(words) - count)
        return " ".join(words[start : start + count])


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _single(message: Message | tuple[Message, ...], max_tokens: int) -> Session:
    messages = message if isinstance(message, tuple) else (message,)
    return Session((Turn(messages, max_tokens),))


def chat(seed: int, count: int | None) -> Workload:
    prose = Prose(seed)
    sessions = []
    for _ in range(count or 48):
        length = min(500, max(50, round(prose.random.lognormvariate(math.log(150), 0.7))))
        output = prose.random.randint(32, 256)
        sessions.append(_single(_user(prose.passage(length)), output))
    return Workload("chat", tuple(sessions), 16)


def shared_prefix(seed: int, count: int | None) -> Workload:
    prose = Prose(seed)
    system = _system(prose.passage(1000))
    sessions = [_single((system, _user(f"{i}: {prose.passage(30)}")), 32) for i in range(count or 64)]
    return Workload("shared_prefix", tuple(sessions), 16)


def multiturn(seed: int, count: int | None) -> Workload:
    sessions = []
    for i in range(count or 8):
        prose = Prose(seed * 100 + i)
        turns = [Turn((_user(prose.passage(60)),), 64) for _ in range(6)]
        turns[0] = Turn((_system(prose.passage(100)), *turns[0].messages), 64)
        sessions.append(Session(tuple(turns)))
    return Workload("multiturn", tuple(sessions), 8)


def agent(seed: int, count: int | None) -> Workload:
    sessions = []
    for i in range(count or 2):
        prose = Prose(seed * 100 + i)
        first = (_system("You are an agent with tools. " + prose.passage(600)), _user(prose.passage(50)))
        results = [(_user(f"Tool result {step}: {prose.passage(120)}"),) for step in range(9)]
        sessions.append(Session(tuple(Turn(messages, 48) for messages in [first, *results])))
    return Workload("agent", tuple(sessions), 1)


def streams(seed: int, count: int | None) -> Workload:
    prose = Prose(seed)
    sessions = tuple(_single(_user(prose.passage(20)), 256) for _ in range(count or 64))
    return Workload("streams", sessions, len(sessions))


WORKLOADS = {"chat": chat, "shared_prefix": shared_prefix, "multiturn": multiturn, "agent": agent}
MORE_WORKLOADS = {"streams": streams}  # not of `all`


def from_jsonl(path: Path, default_max_tokens: int) -> Workload:
    """A user's own prompts, a JSON object a line, each with "prompt" (text) or "messages", perhaps "max_tokens"."""
    sessions = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts file {path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except ValueError:
            raise ConfigError(f"{where} is not JSON") from None
        if not isinstance(entry, dict):
            raise ConfigError(f"{where} is not a JSON object")
        max_tokens = entry.get("max_tokens", default_max_tokens)
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise ConfigError(f"{where}: max_tokens is {max_tokens!r}; expected a positive integer")
        messages = entry.get("messages")
        if messages is None and isinstance(entry.get("prompt"), str):
            messages = [_user(entry["prompt"])]
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise ConfigError(f'{where} needs "prompt" (a string) or "messages" (a list of objects)')
        sessions.append(_single(tuple(messages), max_tokens))
    if not sessions:
        raise ConfigError(f"{path} has no prompts")
    return Workload(path.stem, tuple(sessions), 16)


def make_workload(
    name: str,
    seed: int,
    *,
    count: int | None = None,
    concurrency: int | None = None,
    rate: float | None = None,
    max_tokens: int = 128,
) -> Workload:
    """One round's workload: by name, or by the path of a JSONL file. `rate`: Poisson arrivals a second.

    Raises ConfigError for a name that is neither.
    """
    if make := (WORKLOADS | MORE_WORKLOADS).get(name):
        workload = make(seed, count)
    elif name == "json":
        raise ConfigError("workload json needs structured output (response_format), which tokenmill does not have yet")
    elif Path(name).suffix == ".jsonl":
        workload = from_jsonl(Path(name), max_tokens)
        if count:
            sessions = tuple(workload.sessions[i % len(workload.sessions)] for i in range(count))
            workload = Workload(workload.name, sessions, workload.concurrency)
    else:
        raise ConfigError(f"workload {name!r} is not one of {', '.join(WORKLOADS | MORE_WORKLOADS)}, nor a .jsonl file")
    if rate is None:
        return Workload(workload.name, workload.sessions, concurrency or workload.concurrency)
    clock = random.Random(seed)
    arrival, arriving = 0.0, []
    for session in workload.sessions:
        arriving.append(Session(session.turns, arrival))
        arrival += clock.expovariate(rate)
    return Workload(workload.name, tuple(arriving), None)
