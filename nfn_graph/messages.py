"""Messages to the user: the error for invalid input, and text that is safe for a terminal."""

from __future__ import annotations

import traceback
from pathlib import Path


class UserError(ValueError):
    """An error in the user's input: the message says what was expected and what was found.

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


# Errors of the system, which our checks cannot rule out.
_OF_THE_SYSTEM = (OSError, ImportError, MemoryError)


def is_bug(error: Exception) -> bool:
    """Whether an error is neither the user's nor the system's."""
    return not isinstance(error, (UserError, *_OF_THE_SYSTEM)) and not _is_want_of_memory(error)


def reason_of(error: Exception) -> str:
    """The reason of a failure in one line; prints the traceback of a bug in this package first."""
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
    """Whether torch ran out of memory, which it reports as a `RuntimeError`."""
    return isinstance(error, RuntimeError) and "allocate" in str(error)


def exit_code(done: int, failed: int) -> int:
    """The exit code of a command that processes many items: 1 if some failed, 2 if all failed."""
    return 0 if not failed else 1 if done else 2


def one_line(error: BaseException | str) -> str:
    """The message of an error, without line breaks and control characters."""
    return printable(" ".join(str(error).split()) or type(error).__name__)


def located(path: Path | str, reason: str) -> str:
    """A reason in one line that includes the name of its file."""
    file, line = one_line(str(path)), one_line(reason)
    return line if file in line else f"{file}: {line}"


def printable(text: str) -> str:
    """Replaces control characters, which a terminal would obey, by their escape sequences."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
