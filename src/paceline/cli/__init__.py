"""The command line. `main` is the entry point; each command has a file of its own."""

from __future__ import annotations

import logging
import sys

import typer

from paceline.cli import chat, demo, generate, pull
from paceline.cli.common import console
from paceline.errors import UserError

app = typer.Typer(
    name="paceline",
    help="Lossless speculative decoding: the target's exact output, in fewer target passes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("pull")(pull.pull)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("demo")(demo.demo)


def main() -> None:
    """Run a command. A user's mistake is one line and exit code 2; Ctrl-C is 130."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        app()
    except UserError as e:
        console.print(f"error: {e}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        console.print("\ninterrupted", style="yellow")
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output went away
        sys.stderr.close()
        sys.exit(141)
