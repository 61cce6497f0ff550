"""What takes one network refuses a batch, and says what to take of it."""

from __future__ import annotations

from typing import Any

from torch import nn

from nfn_graph import WeightGraph
from nfn_graph.data import Layout
from nfn_graph.messages import UserError


def layout_of(graph: WeightGraph) -> Layout:
    """The layout of one network."""
    if not isinstance(graph, WeightGraph):
        raise TypeError(f"Expected a WeightGraph (got {type(graph).__name__})")
    layouts = graph.layouts
    if len(layouts) != 1 or graph.layout is not layouts[0]:
        raise UserError("Expected one network (got a batch; take batch[i] of it)")
    return layouts[0]


def check_module(module: Any, what: str) -> None:
    """Raises unless the user gave a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"Expected a torch.nn.Module as {what} (got {type(module).__name__})")
