"""The command line. `main` is the entry point; each command has a file of its own."""

from __future__ import annotations

import logging
import sys
from typing import NoReturn

import typer

from paceline.cli import (
    advise,
    bench,
    chat,
    demo,
    generate,
    peers,
    prove,
    pull,
    report,
    train,
)
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
app.command("bench")(bench.bench)
app.command("report")(report.report)
app.command("peers")(peers.peers)
app.command("prove")(prove.prove)
app.command("advise")(advise.advise)
app.add_typer(train.app)

# Typer brings a click of its own (older ones the separate package): found by its name.
_USAGE_ERRORS = tuple(c for c in typer.BadParameter.__mro__ if c.__name__ == "UsageError")


def main() -> None:
    """Run a command. A user's mistake is one line and exit code 2; Ctrl-C is 130."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except UserError as e:
        _fail(str(e))
    except _USAGE_ERRORS as e:  # unknown flags, bad types
        message = e.format_message()
        _fail(f"{message} (see --help)" if message else None)
    except (KeyboardInterrupt, typer.Abort):
        console.print("\ninterrupted", style="yellow")
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output went away
        sys.stderr.close()
        sys.exit(141)


def _fail(message: str | None) -> NoReturn:
    """Exit code 2, with one line (None: help has been shown instead)."""
    if message is not None:
        line = f"error: {message}"
        console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(2)
