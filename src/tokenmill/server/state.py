"""What the routes share: the engine's client, the tokenizer, the model's names, the metrics.

Texts are tokenised here: short ones at once, long ones in a small thread pool, so that the event loop never stalls.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request

from ..config import ServerConfig
from ..core import SamplingParams
from ..engine.messages import AddRequest
from ..errors import ConfigError, EngineUnavailable, InvalidRequest, ModelNotFound, Overloaded
from .body import Bodies
from .client import EngineClient
from .metrics import Metrics

T = TypeVar("T")
MAX_IN_POOL = 128  # texts that may wait for it
LONG_TEXT = 4000  # characters; below it tokenising takes under 2 ms


def read_chat_template(path: str | None) -> str | None:
    """The text of --chat-template. Raises ConfigError."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template {path!r} cannot be read: {error}") from None


class Serving:
    """One server's state. `tokenizer` and `names` are set when the model's files are open."""

    def __init__(self, engine: EngineClient, config: ServerConfig, names: Sequence[str]):
        self.engine = engine
        self.config = config
        self.names = tuple(names)
        self.chat_template = read_chat_template(config.chat_template)
        self.tokenizer: Any = None
        self.metrics = Metrics()
        self.created = int(time.time())
        self.bodies = Bodies(config)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="tokenise")
        self._num_in_pool = 0
        self._numbers = itertools.count(1)
        self._run = secrets.token_hex(4)  # ids of one run of the server never equal another's

    def check_ready(self) -> None:
        """Raises EngineUnavailable until the engine and the tokenizer are there."""
        self.engine.check_ready()
        if self.tokenizer is None:
            raise EngineUnavailable("the tokenizer is loading")

    def check_model(self, requested: str | None) -> str:
        """The name to answer with. Raises ModelNotFound, InvalidRequest."""
        if requested is None:
            raise InvalidRequest(f"model is required; this server has {', '.join(self.names)}", param="model")
        if requested not in self.names:
            raise ModelNotFound(
                f"there is no model {requested[:200]!r}; this server has {', '.join(self.names)}", param="model"
            )
        return requested

    @property
    def fingerprint(self) -> str:
        digest = self.engine.info.model_digest if self.engine.info else ""
        return f"fp_{digest[:12]}"

    def new_id(self) -> str:
        """Unique in this run and before; the base of a request's public id and of its ids in the engine."""
        return f"{self._run}{next(self._numbers):08x}"

    async def in_pool(self, size: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run here when `size` (characters) is small, else in the pool. Raises Overloaded where that has too much."""
        if size < LONG_TEXT:
            return function(*args, **kwargs)
        if self._num_in_pool >= MAX_IN_POOL:
            raise Overloaded("too many long texts are being tokenised")
        self._num_in_pool += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))
        finally:
            self._num_in_pool -= 1

    def make_add(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, *, param: str
    ) -> AddRequest:
        """A validated request for the engine. Raises InvalidRequest; errors of the prompt name `param`."""
        from ..text.request import make_request

        info = self.engine.info
        assert info is not None
        return make_request(
            self.tokenizer,
            prompt_token_ids,
            params,
            request_id=request_id,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            max_n=self.config.max_n,
            namespace=info.model_digest,
            param=param,
        )

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def serving_of(request: Request) -> Serving:
    return request.app.state.serving
