"""Which kernels the layers use, chosen for a block of code.

=================  ====================================================================
`"torch"`          the default: fused, on `torch.embedding_bag`
`"plain"`          `index_add` and `index_select` only: differentiable any number of
                   times; what `torch.compile` and `torch.func.vmap` get in any case
`"torch-scatter"`  the package of that name, in the place of `index_add`
=================  ====================================================================
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

import torch

Backend = Literal["torch", "plain", "torch-scatter"]

_BACKEND: ContextVar[Backend] = ContextVar("nfn_graph_backend", default="torch")


@contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """Uses these kernels inside a `with` block, in this thread or task alone.

    Args:
        name: The backend.
    """
    if name not in get_args(Backend):
        raise ValueError(f"Expected a backend of {list(get_args(Backend))} (got {name!r})")
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
    """The backend in use; the compiler fuses the plain operations by itself."""
    return "plain" if torch.compiler.is_compiling() else _BACKEND.get()
