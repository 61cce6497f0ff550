"""Checks that two results are the same: types, keys in their order, and every bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nfn_graph import WeightGraph
from nfn_graph.data import Layout


def assert_same(got: Any, expected: Any, where: str = "") -> None:
    """Checks types, keys with their order, and every bit of the tensors."""
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor) and got.dtype == expected.dtype, where
        assert got.shape == expected.shape, where
        assert equal_bits(got, expected), where
    elif isinstance(expected, Layout):
        assert got == expected, where
        for name in ("within", "carried", "keys", "channels", "before"):
            assert_same(getattr(got, name), getattr(expected, name), f"{where}.{name}")
    elif isinstance(expected, Mapping):
        assert list(got) == list(expected), where
        for key, value in expected.items():
            assert_same(got[key], value, f"{where}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert type(got) is type(expected) and len(got) == len(expected), where
        for i, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    else:
        assert got == expected, where


def assert_same_graph(got: WeightGraph, expected: WeightGraph) -> None:
    """Checks that two graphs have the same content, including the bookkeeping of a batch."""
    assert type(got) is type(expected)
    assert got.node_types == expected.node_types and got.edge_types == expected.edge_types
    for one, other in zip(got.stores, expected.stores, strict=True):
        assert_same(one.to_dict(), other.to_dict(), str(other._key))
    for name in ("_num_graphs", "_slice_dict", "_inc_dict"):
        assert_same(got.__dict__.get(name), expected.__dict__.get(name), name)


def equal_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same down to the bits of their NaNs."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    one, two = (x.detach().contiguous().flatten().view(torch.uint8) for x in (first, second))
    return torch.equal(one, two)


def check_same_graph(graph: WeightGraph, expected: WeightGraph) -> None:
    assert graph.spec == expected.spec
    assert graph.layout.shape == expected.layout.shape
    for name in expected.spec.neuron:
        assert torch.equal(graph[name].x, expected[name].x), name
    for key in expected.spec.weight:
        assert torch.equal(graph[key].edge_attr, expected[key].edge_attr), key
