"""Networks that `from_module` refuses, with the name of the module and the reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from refused import REFUSED
from torch import Tensor, nn

from nfn_graph.converters import ConversionError, from_module


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("build", "shape", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_has_no_graph_is_refused(
    build: Callable[[], nn.Module], shape: tuple[int, ...], reason: str
) -> None:
    module = build()
    dtype = next(module.parameters(), torch.empty(0)).dtype
    with pytest.raises(ConversionError, match=f"(?s){reason}"):
        from_module(module, torch.randn(shape, dtype=dtype))


class Moved(nn.Module):
    """A layer that moves the rows of its weight before it uses them."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.move = nn.Linear(3, 4), nn.Linear(4, 2), move

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(x, self.move(self.first.weight)).relu())


@pytest.mark.parametrize(
    "move", [lambda w: w.cumsum(0), lambda w: w.flip(0), lambda w: w.sort(0)[0]]
)
def test_weights_whose_rows_are_moved_are_refused(move: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ConversionError, match="whose entries stay in place"):
        from_module(Moved(move), torch.randn(1, 3))
