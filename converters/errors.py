"""The one error of the converters, and what is said of errors of any kind."""

from __future__ import annotations

import os
from pathlib import Path

# Whether to show where a mistake of ours is, as for all commands.
_TRACEBACK = "NFN_GRAPH_TRACEBACK"


class ConversionError(ValueError):
    """A file, state dict or network that has no graph, with the reason and what to do."""


def reason_of(error: Exception) -> str:
    """Why a file failed, in one line; a mistake of ours is called that."""
    if isinstance(error, (OSError, ValueError, TypeError, ImportError, MemoryError)):
        return one_line(error)
    if os.environ.get(_TRACEBACK):
        raise error
    return one_line(
        f"Expected no mistake in nfn-graph (got {type(error).__name__}: {error}). Set "
        f"{_TRACEBACK}=1 to see where"
    )


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
