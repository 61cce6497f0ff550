"""The command line `nfn-graph`.

It stands above the rooms and imports one of them only when a command of it is called. A room
adds a command as a function with typed arguments, named here; tyro makes options of them.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """A subcommand: where its function is, and what it does in one line."""

    function: str
    description: str


COMMANDS = {
    "inspect": Command(
        "nfn_graph.converters.commands:inspect", "Show what checkpoint files hold, as a table."
    ),
    "convert": Command(
        "nfn_graph.converters.commands:convert", "Convert checkpoint files to graphs, in parallel."
    ),
    "draw": Command("nfn_graph.converters.commands:draw", "Draw the network of a checkpoint file."),
    "zoo": Command(
        "nfn_graph.tasks.zoo.commands:zoo", "Build collections of trained networks; draw INRs."
    ),
}

# What a command may raise because of its input; anything else is a mistake of ours.
_EXPECTED = (OSError, ValueError, TypeError, ImportError, MemoryError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, 1 if a part failed, 2 for an error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(_help())
        return 0 if given else 2
    if given[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"nfn-graph {version('nfn-graph')}")
        return 0
    if given[0] not in COMMANDS:
        return _fail(f"Expected a command: {', '.join(COMMANDS)} (got '{given[0]}')")
    try:
        return _run(given[0], given[1:])
    except KeyboardInterrupt:
        return _fail("Interrupted", code=130)
    except BrokenPipeError:
        # The reader of our output has closed it; nothing must be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except _EXPECTED as error:
        return _fail(str(error) or type(error).__name__)


def _run(name: str, arguments: list[str]) -> int:
    try:
        import tyro
    except ImportError as error:
        raise ModuleNotFoundError(
            f"Expected the package 'tyro' to run the command line (got: {error}). Install it "
            f"with: pip install 'nfn-graph[converters]'"
        ) from error
    module, _, function = COMMANDS[name].function.partition(":")
    command = getattr(importlib.import_module(module), function)
    return int(
        tyro.cli(
            command,
            prog=f"nfn-graph {name}",
            args=arguments,
            # tyro's own reading of the docstring would leave out the examples.
            description=(inspect.getdoc(command) or "").partition("\n\nArgs:")[0],
        )
    )


def _fail(message: str, code: int = 2) -> int:
    print(f"nfn-graph: {' '.join(message.split())}", file=sys.stderr)
    return code


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = [f"  {name.ljust(width)}  {c.description}" for name, c in COMMANDS.items()]
    return "\n".join(
        [
            "usage: nfn-graph [-h] [--version] COMMAND ...",
            "",
            "Networks as graphs: look at checkpoints, convert and draw them.",
            "",
            "commands:",
            *commands,
            "",
            "examples:",
            "  nfn-graph inspect model.pt",
            "  nfn-graph convert checkpoints/ --out graphs/",
            "  nfn-graph draw model.safetensors -o model.png",
            "",
            "nfn-graph COMMAND --help shows the options of a command.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
