"""The choice of the kernels that layers use, for a block of code.

=================  ====================================================================
`"fused"`          the default: few and large steps on `torch.embedding_bag`
`"plain"`          the equations in `index_add` and `index_select`; also what
                   `torch.compile` and the transforms of `torch.func` get in any case
`"torch-scatter"`  the equations with the package of that name for the scatters
=================  ====================================================================
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

import torch
from torch.autograd import forward_ad

from nfn_graph.messages import UserError

Backend = Literal["fused", "plain", "torch-scatter"]

_BACKEND: ContextVar[Backend] = ContextVar("nfn_graph_backend", default="fused")


@contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """Uses these kernels inside a `with` block, only in this thread or task.

    Args:
        name: The backend.

    Example:
        >>> from nfn_graph import use_backend
        >>> from nfn_graph.ops import current_backend
        >>> with use_backend("plain"):
        ...     current_backend()
        'plain'
    """
    if name not in get_args(Backend):
        raise UserError(f"Expected a backend of {list(get_args(Backend))} (got {name!r})")
    if name == "torch-scatter" and importlib.util.find_spec("torch_scatter") is None:
        raise ModuleNotFoundError(
            "Expected the package torch-scatter (got none). Install it with "
            "`pip install --no-build-isolation 'nfn-graph[scatter]'`."
        )
    token = _BACKEND.set(name)
    try:
        yield
    finally:
        _BACKEND.reset(token)


def current_backend() -> Backend:
    """The backend in use.

    Example:
        >>> from nfn_graph.ops import current_backend
        >>> current_backend()
        'fused'
    """
    if torch.compiler.is_compiling():
        return "plain"  # The compiler fuses by itself.
    backend = _BACKEND.get()
    if backend == "fused" and is_transformed():
        return "plain"  # Every transform supports the plain operations.
    return backend


def is_transformed() -> bool:
    """Whether a transform of `torch.func` or forward-mode differentiation is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
