"""The one error of the converters, and what is said of errors of any kind."""

from __future__ import annotations

import os
import re
from pathlib import Path

# Whether to show where a mistake of ours is, as for all commands.
_TRACEBACK = "NFN_GRAPH_TRACEBACK"

# How messages of Python functions name options.
_VALUED = re.compile(r"\b(flatten|orientation|key|safe_globals)=('[^']*'|\[[^]]*\])")
# Not as a part of a path or of another name.
_ARCH = re.compile(
    r"(?<![\w./'-])arch(=\.\.\.)?(, on the meta device if it is large)?(?![\w/'-]|\.\w)"
)
_EXAMPLE = re.compile(r"(?<![\w./'-])example_input(=\.\.\.)?(?![\w/'-]|\.\w)")


class ConversionError(ValueError):
    """A file, state dict or network that has no graph, with the reason and what to do.

    Example:
        >>> import torch
        >>> from nfn_graph.converters import ConversionError, from_state_dict
        >>> try:
        ...     from_state_dict({"a.weight": torch.zeros(3, 2), "b.weight": torch.zeros(5, 4)})
        ... except ConversionError as error:
        ...     print("refused")
        refused
    """


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


def in_command_line(message: str) -> str:
    """A message that names options as commands have them: `--flatten channels_first`.

    Messages name options that take a text with it (`flatten='channels_first'`), and others alone
    (`arch`, `an example_input`).
    """
    message = _ARCH.sub("--arch", _VALUED.sub(_as_option, message))
    return _EXAMPLE.sub("--input-shape", message)


def _as_option(match: re.Match[str]) -> str:
    values = match[2].strip("[]").replace("'", "").replace(",", "")
    return f"--{match[1].replace('_', '-')} {values}"


def located(path: Path | str, reason: str) -> str:
    """A reason in one line that names its file."""
    file, line = one_line(str(path)), one_line(reason)
    return line if file in line else f"{file}: {line}"


def printable(text: str) -> str:
    """Text of a file or a name, without signs that a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
