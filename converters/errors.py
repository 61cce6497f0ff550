"""The one error of the converters, and what is said of errors of any kind."""

from __future__ import annotations

import os

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
    line = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
