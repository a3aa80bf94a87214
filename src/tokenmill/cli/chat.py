"""`tokenmill chat`: a conversation in the terminal, or with lines piped in, each a turn.

The engine runs in this process. Ctrl-C stops the reply and keeps what was said; the conversation goes on.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from typing import Any

import click

from ..config import EngineConfig
from ..core import SamplingParams
from ..errors import ConfigError, ContextLengthExceeded, TokenmillError
from .options import given, options_of, sampling_from
from .progress import download_progress

DEFAULTS = {"temperature": 0.7, "max_tokens": None}  # to the context's edge
HELP = "/reset starts anew, /system TEXT sets the system message, /exit or Ctrl-D leaves; Ctrl-C stops a reply"


@click.command()
@click.argument("model", required=False)
@click.option("--system", help="System message.")
@options_of(SamplingParams, skip=("n", "logprobs", "prompt_logprobs"), defaults=DEFAULTS)
@options_of(EngineConfig, skip=("model", "seed"))
def chat(model: str | None, system: str | None, **values: Any) -> None:
    """Talk to MODEL. Lines piped in are turns; the replies go to stdout."""
    params = sampling_from(values, **DEFAULTS)
    settings = given(EngineConfig, {k: v for k, v in values.items() if k != "seed"})
    from ..llm import AsyncLLM

    with download_progress() as progress:
        llm = AsyncLLM(model, progress=progress, **settings)
    try:
        if llm.tokenizer.chat_template is None:
            raise ConfigError(
                f"{llm.config.model} has no chat template, so it completes text: use `tokenmill generate`"
            )
        Conversation(llm, params, system).run()
    finally:
        llm.close()


class Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(self, llm: Any, params: SamplingParams, system: str | None):
        from rich.console import Console

        self.llm, self.params = llm, params
        self.interactive = sys.stdin.isatty()
        self.console = Console(stderr=True, highlight=False)
        self.messages: list[dict[str, str]] = []
        self.set_system(system)

    def set_system(self, system: str | None) -> None:
        self.system = [] if system is None else [{"role": "system", "content": system}]
        self.messages.clear()

    def note(self, text: str) -> None:
        if self.interactive:
            self.console.print(text, style="dim", markup=False)

    def run(self) -> None:
        if self.interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  line editing and history for input()
        self.note(f"{self.llm.config.model}, context {self.llm.max_model_len} tokens. {HELP}.")
        with asyncio.Runner() as runner:
            while (line := self.read()) is not None:
                if line.startswith("/") and self.interactive:
                    if not self.command(line):
                        return
                elif line.strip():
                    self.turn(runner, line)

    def read(self) -> str | None:
        """The next line; None at the end."""
        while True:
            try:
                if self.interactive:
                    return input("\x01\x1b[1;36m\x02you\x01\x1b[0m\x02 ")
                line = sys.stdin.readline()
                return line.rstrip("\n") if line else None
            except EOFError:
                click.echo(err=True)
                return None
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                click.echo(err=True)
                self.note("Ctrl-D or /exit leaves")

    def command(self, line: str) -> bool:
        """False to leave."""
        word, _, rest = line.partition(" ")
        if word in ("/exit", "/quit"):
            return False
        if word == "/reset":
            self.messages.clear()
            self.note("a new conversation")
        elif word == "/system":
            self.set_system(rest or None)
            self.note("a new conversation with this system message")
        else:
            self.note(HELP)
        return True

    def turn(self, runner: asyncio.Runner, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        said: list[str] = []
        try:
            runner.run(self.reply(said))
        except KeyboardInterrupt:
            click.echo()
            self.note("stopped")
            if not self.interactive:
                raise
        except TokenmillError as error:
            self.messages.pop()
            if not self.interactive:
                raise
            self.console.print(error.message, style="red", markup=False)
            return
        self.messages.append({"role": "assistant", "content": "".join(said)})

    async def reply(self, said: list[str]) -> None:
        from ..outputs import RequestOutputKind

        started = time.monotonic()
        first = None
        count = 0
        async for output in self.stream(RequestOutputKind.DELTA):
            (choice,) = output.outputs
            first = first or time.monotonic()
            count += len(choice.token_ids)
            said.append(choice.text)
            click.echo(choice.text, nl=False)
            sys.stdout.flush()
            if choice.error is not None:
                raise TokenmillError(choice.error)
        click.echo()
        if first is not None and count > 1:
            rate = (count - 1) / max(time.monotonic() - first, 1e-9)
            self.note(f"{count} tokens, first after {first - started:.2f} s, then {rate:.0f} tokens/s")

    def stream(self, kind: Any) -> Any:
        """Ask for the reply; the oldest turns go where the conversation has outgrown the context."""
        while True:
            try:
                return self.llm.chat([*self.system, *self.messages], self.params, output_kind=kind)
            except ContextLengthExceeded:
                if len(self.messages) < 3:
                    raise
                del self.messages[:2]
                self.note("the conversation is longer than the context: its oldest turn was left out")
