"""`python -m tokenmill` is the command."""

from .cli.main import main

main(prog_name="tokenmill")
