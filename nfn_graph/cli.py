"""The command line `nfn-graph`.

It imports a folder of the package only when one of its commands is called. A folder adds a command
as a function with typed arguments, which is listed here; tyro turns the arguments into options.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import io
import itertools
import math
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from nfn_graph.memory import keep_memory
from nfn_graph.messages import UserError, is_bug, one_line, reason_of


class Command(NamedTuple):
    """A command: its function, a description in one line, and the table of its subcommands."""

    function: str
    description: str
    table: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of its subcommands, read from its table on demand."""
        try:
            return tuple(_imported(self.table)) if self.table else ()
        except ModuleNotFoundError:
            return ()


def _imported(place: str) -> Any:
    """The object at a place such as `package.module:name`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


# By module, the commands that are functions of the same name, with their descriptions.
_FUNCTIONS = {
    "converters.commands": {
        "inspect": "Show what checkpoint files contain.",
        "convert": "Convert checkpoint files to graphs in a store.",
        "store": "Summarise a store and check its files.",
        "export": "Write the networks of a store to files.",
        "run": "Run the network of a checkpoint file on inputs.",
        "draw": "Draw the network of a checkpoint file.",
    },
    "tasks.zoo.zoo_commands": {"zoo": "Build or import collections of trained networks."},
    "tasks.train": {
        "train": "Train a model on the networks of a zoo.",
        "evaluate": "Evaluate a trained model on other networks.",
        "predict": "Apply a trained model to checkpoint files.",
        "compare": "Compare runs by means and standard errors over seeds.",
    },
    "tasks.edit": {"edit": "Edit the image that an INR stores."},
    "tasks.prune": {
        "prune": "Prune an initialisation before training.",
        "retrain": "Train initialisations with masks and compare them.",
    },
    "tasks.demo": {"demo": "Build a zoo, train models on it and write a report."},
}
_TABLES = {
    "zoo": "nfn_graph.tasks.zoo.zoo_commands:COMMANDS",
    "train": "nfn_graph.tasks.train:TASKS",
}
COMMANDS = {
    name: Command(f"nfn_graph.{module}:{name}", description, _TABLES.get(name, ""))
    for module, functions in _FUNCTIONS.items()
    for name, description in functions.items()
}

_HELP = """\
usage: nfn-graph [-h] [--version [-v]] COMMAND ...

Convert checkpoints to graphs, and train models that read the weights of networks.

commands:
{commands}

examples:
  nfn-graph inspect model.pt
  nfn-graph convert checkpoints/ --out graphs/
  nfn-graph draw model.safetensors -o model.png
  nfn-graph demo

nfn-graph COMMAND --help shows the options of a command."""

# Exit codes other than 0.
PART_FAILED, WRONG_CALL, BUG, INTERRUPTED, CLOSED_PIPE = 1, 2, 70, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, or one of those above."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        rows = (f"  {name:{width}}  {c.description}" for name, c in COMMANDS.items())
        print(_HELP.format(commands="\n".join(rows)))
        return 0 if given else WRONG_CALL
    if given[0] in ("-V", "--version"):
        print("\n".join(_versions(verbose=given[1:] in (["-v"], ["--verbose"]))))
        return 0
    if given[0] not in COMMANDS:
        nearest = _nearest(given[0], COMMANDS)
        if nearest is None:
            parts = {part: f"{name} {part}" for name, c in COMMANDS.items() for part in c.parts}
            nearest = parts.get(_nearest(given[0], parts) or "")
        advice = f". Did you mean 'nfn-graph {nearest}'?" if nearest else ""
        return _fail(f"Expected a command: {', '.join(COMMANDS)} (got '{given[0]}'){advice}")
    try:
        # Only in a process of our own. Commands that read checkpoints free the memory of each.
        if arguments is None and COMMANDS[given[0]].function.startswith("nfn_graph.tasks"):
            keep_memory()
        return _run(given[0], given[1:])
    except KeyboardInterrupt:
        return _fail("Interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has closed it; nothing must be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except FloatingPointError as error:
        # A training run that diverged: the call was valid, but the computation failed.
        return _fail(str(error), PART_FAILED)
    except Exception as error:
        return _fail(reason_of(error), BUG if is_bug(error) else WRONG_CALL)


def _run(name: str, arguments: list[str]) -> int:
    try:
        with _exit_when_interrupted():
            command = _imported(COMMANDS[name].function)
    except ModuleNotFoundError as error:
        room = COMMANDS[name].function.split(".")[1]
        raise ModuleNotFoundError(
            f"Expected the packages that 'nfn-graph {name}' needs (got: {error}). Install them "
            f"with: pip install 'nfn-graph[{room}]'"
        ) from error
    call = _parse(name, command, arguments)
    if call is None:
        return 0
    _check_values(call)
    return int(call())


@contextlib.contextmanager
def _exit_when_interrupted() -> Iterator[None]:
    """Ends the process on Ctrl-C during imports, when there is nothing to clean up yet.

    Some libraries catch every exception of their optional imports. They would swallow a
    KeyboardInterrupt, and the command would go on.
    """

    def leave(number: int, frame: object) -> None:
        _fail("Interrupted")
        os._exit(INTERRUPTED)

    # Only the main thread may set handlers, and a handler that somebody else has set is kept.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _parse(
    name: str, command: Callable[..., int], arguments: list[str]
) -> functools.partial[int] | None:
    """Parses a command and its arguments; prints the help and returns None if it was asked for."""
    import tyro

    # Some commands accept words that stand for several others.
    arguments = getattr(command, "expanded", list)(arguments)

    @functools.wraps(command)
    def bind(*args: Any, **kwargs: Any) -> functools.partial[int]:
        return functools.partial(command, *args, **kwargs)

    # tyro leaves out the examples when it reads a docstring by itself.
    description = (inspect.getdoc(command) or "").partition("\n\nArgs:")[0]

    def parsed(words: list[str]) -> functools.partial[int]:
        return tyro.cli(bind, prog=f"nfn-graph {name}", args=words, description=description)

    parts = COMMANDS[name].parts
    try:
        with contextlib.redirect_stderr(io.StringIO()) as complaint:
            return parsed(arguments)
    except SystemExit as stop:
        if not stop.code:
            if parts and not set(arguments) & set(parts):
                print(_options_of_parts(name, parsed))
            return None
        # Options that check themselves raise errors of ours, which already give the reason.
        reason = getattr(stop.__context__, "__context__", None)
        if isinstance(reason, UserError):
            raise reason from None
    part = [word for word in arguments[:1] if word in parts]
    raise UserError(
        f"Expected the arguments that 'nfn-graph {' '.join([name, *part])} --help' shows (got: "
        f"{_first_section(complaint.getvalue())})"
        f"{_meant(arguments, () if part else parts, _help_of(parsed, part))}"
    )


def _help_of(parse: Callable[[list[str]], object], part: list[str]) -> str:
    """What `--help` prints, without colours."""
    with contextlib.redirect_stdout(io.StringIO()) as page, contextlib.suppress(SystemExit):
        parse([*part, "--help"])
    return _plain(page.getvalue())


def _options_of_parts(name: str, parse: Callable[[list[str]], object]) -> str:
    """The options of all subcommands by name, first those that every subcommand has."""
    # The name of an option begins its line, possibly after a short one: `-o PATH, --output`.
    pattern = re.compile(r"^[│ ] {1,2}(?:-\w[^,]*, )?(--(?!help)[a-z][a-z0-9-]*)", re.MULTILINE)
    options = {p: pattern.findall(_help_of(parse, [p])) for p in COMMANDS[name].parts}
    first, *others = options.values()
    common = [option for option in first if all(option in other for other in others)]
    rows = {"all": common} if common else {}
    rows |= {part: [n for n in names if n not in common] for part, names in options.items()}
    width = max(map(len, rows)) + 4
    lines = [f"options of the subcommands ('nfn-graph {name} SUBCOMMAND --help' explains them):"]
    for row, names in rows.items():
        lines += textwrap.wrap(
            " ".join(names) or "none",
            78,
            initial_indent=f"  {row}".ljust(width),
            subsequent_indent=" " * width,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def _meant(arguments: Sequence[str], parts: Sequence[str], page: str) -> str:
    """Suggests a subcommand, or an option on a help page, for the first word that is unknown."""
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", page))
    for word in (argument.partition("=")[0] for argument in arguments):
        known = options if word.startswith("--") else set(parts)
        nearest = None if word in known else _nearest(word, known)
        if nearest:
            return f". Did you mean {nearest} by {word}?"
    return ""


def _nearest(word: str, known: Iterable[str]) -> str | None:
    """Finds the word with a similar spelling, or with these initials: `lr` for learning-rate."""
    plain = {name.lstrip("-"): name for name in sorted(known)}
    wanted = word.lstrip("-").replace("_", "-").lower()
    initials = [n for n in plain if "".join(p[:1] for p in n.split("-")) == wanted and "-" in n]
    found = [*initials, *difflib.get_close_matches(wanted, plain, 1, 0.7)]
    return plain[found[0]] if found else None


def _check_values(call: functools.partial[int]) -> None:
    """Refuses values that no option can take: infinite numbers, and paths that no system allows."""
    names = inspect.signature(call.func).parameters
    for name, value in _values({**dict(zip(names, call.args, strict=False)), **call.keywords}):
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"Expected {option} to be a finite number (got {value})")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise UserError(f"Expected {option} to be less than 2**63 (got {value})")
        if isinstance(value, (str, os.PathLike)) and "\0" in str(value):
            raise UserError(f"Expected text without zero bytes (got {str(value)!r})")


def _values(named: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Lists every single value with the name of its option."""
    for name, value in named.items():
        if dataclasses.is_dataclass(value):
            yield from _values({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
        elif isinstance(value, tuple):
            yield from ((name, member) for member in value)
        else:
            yield name, value


def _first_section(box: str) -> str:
    """Extracts tyro's message from the box that it draws around it."""
    plain = _plain(box)
    rows = [line.strip("│ ") for line in plain.splitlines() if line.startswith("│")]
    first = itertools.takewhile(lambda row: not row.startswith("──"), rows)
    return re.sub(r"\s*[-─]{4,}\s*", ": ", " ".join(first) or plain)


def _plain(text: str) -> str:
    """Removes the colours from a text."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _fail(message: str, code: int = WRONG_CALL) -> int:
    print(f"nfn-graph: {one_line(message)}", file=sys.stderr)
    return code


def _versions(verbose: bool) -> list[str]:
    """Lists the version of the package and, for bug reports, those of its dependencies."""
    import platform
    from importlib.metadata import PackageNotFoundError, requires, version

    lines = [f"nfn-graph {version('nfn-graph')}"]
    if verbose:
        lines += [f"Python {platform.python_version()}", platform.platform()]
        names = {re.split(r"[^\w-]", line)[0] for line in requires("nfn-graph") or ()}
        for name in sorted(names - {"nfn-graph"}):
            with contextlib.suppress(PackageNotFoundError):
                lines.append(f"{name} {version(name)}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
