"""Operations made of others: equations, similarities, shuffled positions, computed weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import One
from operations import FLAT, POINTS, SIGNAL, Case, cnn, mlp, two
from permuting import assert_symmetric, free_sizes
from torch import Tensor, nn

from nfn_graph.converters import ConversionError, from_module, to_state_dict
from nfn_graph.converters.pytorch import tracing

S = nn.Sequential


def equation(text: str, *shape: int) -> nn.Module:
    """A layer, an einsum with a stored tensor after it, and a last layer."""
    return mlp(lambda m, h: torch.einsum(text, h, m.w), w=nn.Parameter(torch.randn(shape)))


def old_norm(module: nn.Module, **kwargs: Any) -> nn.Module:
    """The weight norm that is a hook."""
    return nn.utils.weight_norm(module, **kwargs)


COMPOSITE: dict[str, Case] = {
    "einsum as a linear map": Case(lambda: equation("bi,oi->bo", 8, 8), FLAT, (8, 8)),
    "einsum as a product": Case(lambda: equation("b i, i o -> b o", 8, 8), FLAT, (8, 8)),
    "einsum of points": Case(lambda: equation("bni,oi->bno", 8, 8), POINTS, (8, 8)),
    "einsum of any axes": Case(lambda: equation("...i,io->...o", 8, 8), POINTS, (8, 8)),
    "einsum that moves axes": Case(
        lambda: mlp(
            lambda m, h: torch.einsum("oi,bni->bon", m.w, h).mT, w=nn.Parameter(torch.randn(8, 8))
        ),
        POINTS, (8, 8),
    ),
    "einsum along the channels": Case(
        lambda: cnn(
            lambda m, h: torch.einsum("bcl,cd->bdl", h, m.w).mean(2),
            w=nn.Parameter(torch.randn(8, 8)),
        ),
        SIGNAL, (8, 8),
    ),
    "einsum as a scale": Case(lambda: equation("...i,i->...i", 8), POINTS, (8,)),
    "einsum as a scale of channels": Case(
        lambda: cnn(
            lambda m, h: torch.einsum("bcl,c->bcl", h, m.w).mean(2),
            w=nn.Parameter(torch.randn(8)),
        ),
        SIGNAL, (8,),
    ),
    "einsum of the input": Case(
        lambda: One(
            lambda m, x: m.b(torch.einsum("bi,io->bo", x, m.w).relu()),
            w=nn.Parameter(torch.randn(3, 8)), b=nn.Linear(8, 2),
        ),
        FLAT, (8,),
    ),
    "variance and mean over positions": Case(
        lambda: cnn(lambda m, h: torch.cat(torch.var_mean(h, 2), 1), 16), SIGNAL, (8,)
    ),
    "a layer norm by hand": Case(
        lambda: mlp(
            lambda m, h: (h - (s := torch.var_mean(h, -1, keepdim=True))[1]) / (s[0] + 1).sqrt()
        ),
        POINTS, (8,),
    ),
    "similarity over positions": Case(
        lambda: One(
            lambda m, x: m.b(F.cosine_similarity(m.a(x), m.c(x), dim=2)),
            a=nn.Conv1d(3, 8, 3), c=nn.Conv1d(3, 8, 3), b=nn.Linear(8, 2),
        ),
        SIGNAL, (8,),
    ),
    "similarity over neurons": Case(
        lambda: two(lambda m, h, k: h * F.cosine_similarity(h, k, -1)[..., None]), POINTS, (8,)
    ),
    "pixel unshuffle": Case(
        lambda: One(
            lambda m, x: m.b(m.down(m.a(x)).relu()),
            a=nn.Conv2d(3, 4, 1), down=nn.PixelUnshuffle(2), b=nn.Conv2d(16, 2, 1),
        ),
        ((1, 3, 4, 4),), (4,),
    ),
    "there and back": Case(
        lambda: One(
            lambda m, x: m.b(F.pixel_shuffle(F.pixel_unshuffle(m.a(x), 2), 2)),
            a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(4, 2, 1),
        ),
        ((1, 3, 4, 4),), (4,),
    ),
    "old weight norm": Case(
        lambda: S(old_norm(nn.Linear(3, 8)), nn.ReLU(), old_norm(nn.Linear(8, 2))), FLAT, (8,)
    ),
    "old weight norm as a whole": Case(
        lambda: S(old_norm(nn.Linear(3, 8), dim=None), nn.ReLU(), nn.Linear(8, 2)), FLAT, (8,)
    ),
    "old weight norm of a convolution": Case(
        lambda: S(old_norm(nn.Conv1d(3, 8, 3)), nn.ReLU(), old_norm(nn.ConvTranspose1d(8, 2, 3))),
        SIGNAL, (8,),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", COMPOSITE.values(), ids=COMPOSITE.keys())
def test_operations_made_of_others_are_followed(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, inputs = case.module(), case.tensors()
    graph = from_module(module, inputs, verify=True)
    assert free_sizes(graph) == case.free
    assert_symmetric(graph, module, inputs)

    def fail(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(tracing, "_symbolic_trace", fail)
    assert from_module(module, inputs).layout == graph.layout


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_both_tensors_of_an_old_weight_norm_are_stored() -> None:
    module = COMPOSITE["old weight norm"].module()
    graph = from_module(module)
    assert not graph.layout.carried
    assert list(to_state_dict(graph)) == list(module.state_dict())


@pytest.mark.parametrize(
    ("text", "shape"),
    [("bi,oi->o", (8, 8)), ("bi,oij->bo", (8, 8, 8)), ("bi,ii->bi", (8, 8)), ("bi,oi", (8, 8))],
)
def test_other_equations_are_refused(text: str, shape: tuple[int, ...]) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return torch.einsum(text, m.a(x), m.w)

    module = One(run, a=nn.Linear(3, 8), w=nn.Parameter(torch.randn(shape)))
    with pytest.raises(ConversionError, match=r"einsum.*(equation|stored tensor)"):
        from_module(module, torch.randn(4, 3))
