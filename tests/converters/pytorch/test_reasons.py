"""Refusals give the true reason, and no advice that would not help."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import One
from torch import nn

from nfn_graph.converters import ConversionError, from_module
from nfn_graph.converters.pytorch.handling import HANDLERS


def test_a_bug_of_ours_is_not_said_to_be_one_of_the_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(w: Any, input: Any, *_: Any, **__: Any) -> Any:
        return {}["missing"]

    monkeypatch.setitem(HANDLERS, "flatten", broken)
    module = nn.Sequential(nn.Conv1d(3, 4, 1), nn.Flatten(), nn.Linear(20, 2))
    with pytest.raises(RuntimeError, match=r"a bug in nfn-graph: 'flatten' led to KeyError"):
        from_module(module)


def test_arguments_that_are_not_known_are_named() -> None:
    module = One(lambda m, x: m.b(m.a(x).flatten(1, 2, 3)), a=nn.Conv1d(3, 4, 1), b=nn.Linear(4, 2))
    with pytest.raises(ConversionError, match=r"arguments of 'flatten'.*too many positional"):
        from_module(module)


def test_sizes_that_depend_on_the_input_ask_for_an_example() -> None:
    module = One(
        lambda m, x: m.b(m.a(x).chunk(x.shape[1], 1)[0]), a=nn.Linear(3, 6), b=nn.Linear(2, 2)
    )
    with pytest.raises(ConversionError, match=r"known sizes.*'chunk'.*example_input"):
        from_module(module)
    assert from_module(module, torch.rand(4, 3)).spec.neuron["hidden1"]


def test_bounds_that_are_tensors_are_refused() -> None:
    module = One(lambda m, x: m.a(x)[:, : x.argmax()], a=nn.Linear(3, 6))
    with pytest.raises(ConversionError, match=r"bounds of a slice \(got a tensor\)"):
        from_module(module)


def test_stored_tensors_alone_are_not_stacked() -> None:
    vector = nn.Parameter(torch.rand(6))
    module = One(lambda m, x: m.a(x) + torch.stack([m.c, m.c]), a=nn.Linear(3, 6), c=vector)
    with pytest.raises(ConversionError, match=r"stack.*tensors of the checkpoint"):
        from_module(module)
