"""What a caller sees of a running request: TokenDelta in, text and finish reasons out.

RequestState holds one request's choices. process() turns each TokenDelta of the engine into a ChoiceDelta: text that is
safe to show (whole characters, no half stop string), token ids, logprobs, and at the end why it stopped.

Counting: a choice's tokens are those really generated up to and including the one that ended it - the end token, or
the one that completed the stop string - however far the engine ran on before it heard of it. Deltas that arrive for a
choice after it ended are ignored.

Knows nothing of HTTP or of how the engine runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from ..core import FinishReason, TokenLogprobs, Usage
from ..engine.messages import AbortRequest, AddRequest, TokenDelta
from .detokenizer import Detokenizer
from .stop import StopMatcher
from .tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class Candidate:
    """One token as the logprobs of an API show it. text has U+FFFD where bytes are only part of a character."""

    token_id: int
    text: str
    bytes: bytes
    logprob: float


@dataclass(slots=True, frozen=True)
class Logprob(Candidate):
    """The token at one position; text_offset: characters of the text before it."""

    rank: int = 1  # 1 = the most likely
    text_offset: int = 0
    top: tuple[Candidate, ...] = ()


class ChoiceDelta(msgspec.Struct):
    """What one TokenDelta added to one choice."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[Logprob] | None = None  # one for each of token_ids, when asked for
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string or stop token id; None for the model's own end token
    error: str | None = None
    abort: AbortRequest | None = None  # to be sent to the engine: a stop string matched, and it does not know


@dataclass(slots=True)
class ChoiceState:
    """All of one choice so far."""

    index: int
    detokenizer: Detokenizer
    matcher: StopMatcher
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_decoded: int = 0  # characters detokenised, also those held back
    waiting: list[tuple[int, Logprob | None, int]] = field(
        default_factory=list
    )  # (token, logprob, num_decoded after it)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestState:
    """One request of params.n choices. Not thread-safe: one owner."""

    __slots__ = (
        "_ends",
        "_plain",
        "choices",
        "first_scheduled_time",
        "num_cached_tokens",
        "params",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "tokenizer",
    )

    def __init__(self, add: AddRequest, tokenizer: Tokenizer):
        self.request_id = add.request_id
        self.prompt_token_ids = add.prompt_token_ids
        self.params = params = add.params
        self.tokenizer = tokenizer
        self.num_cached_tokens = 0
        self.first_scheduled_time = 0.0  # time.monotonic()
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self._plain = params.logprobs is params.prompt_logprobs is None and not params.stop_strings
        self._ends = frozenset(add.eos_token_ids) | frozenset(params.stop_token_ids or ())
        last = add.prompt_token_ids[-1] if add.prompt_token_ids else None
        self.choices = [
            ChoiceState(
                index=i,
                detokenizer=Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens, after=last),
                matcher=StopMatcher(params.stop_strings, include_stop=params.include_stop_str_in_output),
                logprobs=None if params.logprobs is None else [],
            )
            for i in range(params.n)
        ]

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    @property
    def usage(self) -> Usage:
        """Over all choices; the prompt counts once."""
        return Usage(
            prompt_tokens=len(self.prompt_token_ids),
            completion_tokens=sum(len(choice.token_ids) for choice in self.choices),
            cached_tokens=self.num_cached_tokens,
        )

    def process(self, delta: TokenDelta) -> ChoiceDelta | None:
        """None where there is nothing new to show. Deltas of a choice must come in the engine's order."""
        choice = self.choices[delta.index]
        if self._plain and choice.token_ids and choice.finish_reason is None and delta.finish_reason is None:
            return self._pass(choice, delta.token_ids)
        if delta.prompt_logprobs and self.prompt_logprobs is not None:
            self.prompt_logprobs.extend(delta.prompt_logprobs)
        if choice.finished:
            return None
        if delta.index == 0:  # its siblings find the prompt that it has just computed: no hit of the cache
            self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        self.first_scheduled_time = self.first_scheduled_time or delta.first_scheduled_time
        out = ChoiceDelta(delta.index, logprobs=None if choice.logprobs is None else [])
        matcher = choice.matcher
        text: list[str] = []
        last = len(delta.token_ids) - 1
        for i, token_id in enumerate(delta.token_ids):
            ends = i == last and delta.finish_reason is FinishReason.STOP and token_id in self._ends
            text.append(self._take(choice, token_id, delta.logprobs[i] if delta.logprobs else None, hidden=ends))
            if matcher.match is not None:
                break
            if not (choice.waiting and matcher.complete_but_waiting):
                self._release(choice, out, len(choice.waiting))
        if matcher.match is None and delta.finish_reason is not None:
            rest = choice.detokenizer.flush()
            text += [matcher.push(rest), matcher.flush()]
        if matcher.match is not None:
            self._end_at_stop_string(choice, out, engine_runs=delta.finish_reason is None)
        elif delta.finish_reason is not None:
            self._release(choice, out, len(choice.waiting))
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = delta.stop_reason
            choice.error = delta.error
        out.text = "".join(text)
        choice.text += out.text
        out.finish_reason, out.stop_reason, out.error = choice.finish_reason, choice.stop_reason, choice.error
        return out if out.text or out.token_ids or out.finish_reason is not None else None

    @staticmethod
    def _pass(choice: ChoiceState, token_ids: list[int]) -> ChoiceDelta | None:
        """process() of tokens that begin and end nothing, with no stop string to look for and nothing to describe: the
        same in a tenth of the time."""
        push = choice.detokenizer.push
        text = push(token_ids[0]) if len(token_ids) == 1 else "".join([push(token_id) for token_id in token_ids])
        choice.text += text
        choice.token_ids += token_ids
        return ChoiceDelta(choice.index, text, token_ids) if token_ids else None

    def _take(self, choice: ChoiceState, token_id: int, logprobs: TokenLogprobs | None, hidden: bool) -> str:
        """Detokenise one token into choice.waiting; -> text safe to show. The token that ends a reply is not shown,
        unless the caller asked for what it stopped at."""
        described = None
        if choice.logprobs is not None and logprobs is not None:
            described = describe(self.tokenizer, logprobs, choice.num_decoded)
        if hidden and not self.params.include_stop_str_in_output:
            piece = ""
        else:
            piece = choice.detokenizer.push(token_id)
        choice.num_decoded += len(piece)
        choice.waiting.append((token_id, described, choice.num_decoded))
        if len(choice.token_ids) + len(choice.waiting) <= self.params.min_tokens:
            return choice.matcher.pass_through(piece)
        return choice.matcher.push(piece)

    def _end_at_stop_string(self, choice: ChoiceState, out: ChoiceDelta, engine_runs: bool) -> None:
        match = choice.matcher.match
        assert match is not None
        enough = next((n for n, (_, _, end) in enumerate(choice.waiting, 1) if end >= match.end), len(choice.waiting))
        self._release(choice, out, enough)
        choice.waiting.clear()
        choice.finish_reason = FinishReason.STOP
        choice.stop_reason = match.stop
        if engine_runs:
            out.abort = AbortRequest(self.request_id, choice.index, FinishReason.STOP)

    @staticmethod
    def _release(choice: ChoiceState, out: ChoiceDelta, count: int) -> None:
        for token_id, logprob, _ in choice.waiting[:count]:
            choice.token_ids.append(token_id)
            out.token_ids.append(token_id)
            if choice.logprobs is not None and out.logprobs is not None and logprob is not None:
                choice.logprobs.append(logprob)
                out.logprobs.append(logprob)
        del choice.waiting[:count]

    def describe_prompt(self) -> list[Logprob | None]:
        """The prompt's logprobs by position, the first None; text_offset counts from the start of the prompt's text."""
        offset = 0
        described: list[Logprob | None] = []
        detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=False)
        for token_id, logprobs in zip(self.prompt_token_ids, self.prompt_logprobs or ()):
            described.append(None if logprobs is None else describe(self.tokenizer, logprobs, offset))
            offset += len(detokenizer.push(token_id))
        return described


def describe(tokenizer: Tokenizer, logprobs: TokenLogprobs, text_offset: int = 0) -> Logprob:
    """A position's logprobs with the text and bytes of each token."""

    def text_of(token_id: int) -> tuple[int, str, bytes]:
        data = tokenizer.token_bytes(token_id)
        return token_id, data.decode("utf-8", "replace"), data

    return Logprob(
        *text_of(logprobs.token_id),
        logprobs.logprob,
        logprobs.rank,
        text_offset,
        tuple(
            Candidate(*text_of(token_id), logprob)
            for token_id, logprob in zip(logprobs.top_token_ids, logprobs.top_logprobs)
        ),
    )
