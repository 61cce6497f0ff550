"""What a person is told: the error for their own mistakes, and text that a terminal can show."""

from __future__ import annotations

import traceback
from pathlib import Path


class UserError(ValueError):
    """A mistake in what the user gave: the message says what was expected and what was found.

    Commands print it in one line and exit with code 2. Every other exception, apart from those
    of the system (no such file, no memory, no such package), is a bug in this package, and
    commands show it with its traceback.

    Example:
        >>> from nfn_graph import NetworkSpec, UserError
        >>> try:
        ...     NetworkSpec.chain(0)
        ... except UserError as error:
        ...     print(error)
        Expected num_layers to be an integer of at least 1 (got 0)
    """


# Errors of the system, which no check of ours can rule out.
_OF_THE_SYSTEM = (OSError, ImportError, MemoryError)


def is_bug(error: Exception) -> bool:
    """Whether an error is neither the user's nor the system's."""
    return not isinstance(error, (UserError, *_OF_THE_SYSTEM)) and not _is_want_of_memory(error)


def reason_of(error: Exception) -> str:
    """Why something failed, in one line; of a bug in this package, the traceback is shown first."""
    if is_bug(error):
        traceback.print_exception(error)
        return one_line(
            f"This looks like a bug in nfn-graph: {type(error).__name__} {error}. Please report "
            f"it with the traceback above."
        )
    if _is_want_of_memory(error):
        first = str(error).partition("\n")[0]
        return one_line(f"Expected a computation that fits into memory (got: {first})")
    return one_line(error)


def _is_want_of_memory(error: Exception) -> bool:
    """Torch says so with a `RuntimeError`."""
    return isinstance(error, RuntimeError) and "allocate" in str(error)


def exit_code(done: int, failed: int) -> int:
    """The exit code of a command that goes through many: 1 if some failed, 2 if all of them."""
    return 0 if not failed else 1 if done else 2


def one_line(error: BaseException | str) -> str:
    """What an error says, without line breaks and other signs that a terminal would obey."""
    return printable(" ".join(str(error).split()) or type(error).__name__)


def located(path: Path | str, reason: str) -> str:
    """A reason in one line that names its file."""
    file, line = one_line(str(path)), one_line(reason)
    return line if file in line else f"{file}: {line}"


def printable(text: str) -> str:
    """Text of a file or a name, without signs that a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
