"""Networks given by name on the command line, whose code may do anything."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import nn

from nfn_graph.converters.errors import ConversionError
from nfn_graph.messages import UserError


def parse_arch(name: str) -> tuple[str, str]:
    """The module and the attribute of `package.module:name`."""
    module, _, attribute = name.partition(":")
    if not attribute or not all(part.isidentifier() for part in module.split(".")):
        raise UserError(f"Expected arch as package.module:name (got '{name}')")
    return module, attribute


@lru_cache(maxsize=8)
def make_arch(name: str) -> nn.Module:
    """The module that `package.module:name` is or returns, on the meta device."""
    module_name, attribute = parse_arch(name)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with running_arch(name, ModuleNotFoundError):
        module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        raise UserError(f"Expected '{attribute}' in '{module_name}' (got no such name)")
    made = getattr(module, attribute)
    if callable(made) and not isinstance(made, nn.Module):
        with running_arch(name), torch.device("meta"):
            made = made()
    if not isinstance(made, nn.Module):
        raise UserError(
            f"Expected '{name}' to be a torch.nn.Module or to return one "
            f"(got {type(made).__name__})"
        )
    return made


@contextmanager
def running_arch(name: str | None, *expected: type[Exception]) -> Iterator[None]:
    """Whatever the code of a network raises becomes an error that says where.

    Args:
        name: The network's name; None if no code of one is run.
        expected: What may be raised for other reasons.
    """
    passed: tuple[type[Exception], ...] = (ConversionError, *expected)
    try:
        yield
    except passed:
        raise
    except (Exception, SystemExit) as error:
        if name is None:
            raise
        raise ConversionError(
            f"Expected '{name}' to be a network that can be followed (got "
            f"{type(error).__name__} at {_place(error)}: {error})"
        ) from error


def _place(error: BaseException) -> str:
    """The last line outside of torch that led to an error."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    foreign = ("<frozen", os.path.dirname(torch.__file__))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(foreign)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}"
