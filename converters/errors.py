"""The error class of the converters, option names in messages, and missing packages."""

from __future__ import annotations

import importlib
import re
from typing import Any

from nfn_graph.messages import UserError

# Options that take a value, as messages of Python functions write them.
_VALUED = re.compile(r"\b(flatten|orientation|key|safe_globals)=('[^']*'|\[[^]]*\])")
# The lookarounds exclude parts of a path or of another name.
_ARCH = re.compile(
    r"(?<![\w./'-])arch(=\.\.\.)?(, on the meta device if it is large)?(?![\w/'-]|\.\w)"
)
_HEADS = re.compile(r"\bheads=\.\.\.")
_EXAMPLE = re.compile(r"(?<![\w./'-])example_input(=\.\.\.)?(?![\w/'-]|\.\w)")


class ConversionError(UserError):
    """Raised if a file, state dict or network has no graph. The message says why and what to do.

    Example:
        >>> import torch
        >>> from nfn_graph.converters import ConversionError, from_state_dict
        >>> try:
        ...     from_state_dict({"a.weight": torch.zeros(3, 2), "b.weight": torch.zeros(5, 4)})
        ... except ConversionError as error:
        ...     print("refused")
        refused
    """


def in_command_line(message: str) -> str:
    """Replaces Python options in a message by those of the command: `--flatten channels_first`.

    Messages write options that take a text with their value (`flatten='channels_first'`), and other
    options by name only (`arch`, `an example_input`).
    """
    message = _ARCH.sub("--arch", _VALUED.sub(_as_option, message))
    return _EXAMPLE.sub("--input-shape", _HEADS.sub("--heads", message))


def _as_option(match: re.Match[str]) -> str:
    values = match[2].strip("[]").replace("'", "").replace(",", "")
    return f"--{match[1].replace('_', '-')} {values}"


def require(package: str, purpose: str, extra: str = "converters") -> Any:
    """Imports an optional package, or raises an error that says how to install it.

    Args:
        package: The module to import.
        purpose: The reason why it is needed, such as "to read .safetensors files".
        extra: The extra of nfn-graph that installs it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        top = package.split(".")[0]
        raise ModuleNotFoundError(
            f"Expected the package '{top}' {purpose} (got: {error}). "
            f"Install it with: pip install 'nfn-graph[{extra}]'",
            name=top,
        ) from error
