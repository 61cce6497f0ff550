"""Networks that have no graph, with the reason in the error, for `test_refusals`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from architectures import One
from torch import Tensor, nn

S = nn.Sequential


def _hooked(module: nn.Sequential, index: int | None, before: bool = False) -> nn.Module:
    part: nn.Module = module if index is None else module[index]
    if before:
        part.register_forward_pre_hook(lambda m, args: (args[0] * torch.arange(4.0),))
    else:
        part.register_forward_hook(lambda m, args, out: out * torch.arange(out.shape[-1]))
    return module


def _patched(module: nn.Sequential) -> nn.Module:
    module[1].forward = lambda x: x * torch.arange(4.0)
    return module


def _sharing(views: Callable[[Tensor], tuple[Tensor, Tensor]]) -> nn.Module:
    """Two parameters that are views of one tensor."""
    first, second = map(nn.Parameter, views(torch.randn(6, 4)))
    module = S(nn.Linear(*first.shape[::-1]), nn.ReLU(), nn.Linear(*second.shape[::-1]))
    module[0].weight, module[2].weight = first, second
    return module


def _aliased(module: nn.Module) -> nn.Module:
    module.alias = module.a.bias.data
    return module


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "control flow by values": (
        lambda: One(lambda m, x: m.a(x) if x.sum() > 0 else x, a=nn.Linear(3, 3)),
        (2, 3),
        r"data-dependent control flow",
    ),
    "neighbouring channels": (
        lambda: S(nn.Conv2d(3, 4, 1), nn.LocalResponseNorm(2)),
        (1, 3, 2, 2),
        r"1 \(LocalResponseNorm\).*neighbouring channels",
    ),
    "pool with places": (
        lambda: One(
            lambda m, x: m.b(m.pool(m.a(x))[0].flatten(1)),
            a=nn.Conv2d(3, 4, 1),
            pool=nn.AdaptiveMaxPool2d(1, return_indices=True),
            b=nn.Linear(4, 2),
        ),
        (2, 3, 2, 2),
        r"pool \(AdaptiveMaxPool2d\).*effect on neurons is known",
    ),
    "order of channels": (
        lambda: One(lambda m, x: m.b(m.a(x).cumsum(1)), a=nn.Linear(3, 4), b=nn.Linear(4, 2)),
        (2, 3),
        r"cumsum.*along the neurons",
    ),
    "flipped channels": (
        lambda: One(lambda m, x: m.b(m.a(x).flip(-1)), a=nn.Linear(3, 4), b=nn.Linear(4, 2)),
        (2, 3),
        r"flip.*along the neurons",
    ),
    "pooling over neurons": (
        lambda: One(lambda m, x: F.max_pool1d(m.a(x).unsqueeze(1), 2), a=nn.Linear(3, 4)),
        (2, 3),
        r"max_pool1d.*along the neurons",
    ),
    "chosen channels": (
        lambda: One(lambda m, x: m.a(x)[:, torch.tensor([2, 0])], a=nn.Linear(3, 4)),
        (2, 3),
        r"getitem.*indices",
    ),
    "bilinear": (
        lambda: One(lambda m, x: m.b(m.a(x), x), a=nn.Linear(3, 4), b=nn.Bilinear(4, 3, 2)),
        (2, 3),
        r"b \(Bilinear\)",
    ),
    "unknown function": (
        lambda: One(lambda m, x: torch.linalg.svdvals(m.a(x)), a=nn.Linear(3, 4)),
        (2, 5, 3),
        r"svdvals.*known",
    ),
    "mixing of positions": (
        lambda: One(lambda m, x: m.b(m.a(x).mT), a=nn.Linear(3, 4), b=nn.Linear(5, 2)),
        (2, 5, 3),
        r"b \(Linear\).*positions there",
    ),
    "several flipped axes": (
        lambda: One(
            lambda m, x: m.b(m.a(x).flip(1, 3).flatten(1)),
            a=nn.Conv2d(3, 4, 1), b=nn.Linear(16, 2),
        ),
        (1, 3, 2, 2),
        r"flip.*along the neurons",
    ),
    "flipped axes in a list": (
        lambda: One(lambda m, x: m.b(m.a(x).flip([0, -1])), a=nn.Linear(3, 4), b=nn.Linear(4, 2)),
        (2, 3),
        r"flip.*along the neurons",
    ),
    "rolled as a whole": (
        lambda: One(lambda m, x: m.b(torch.roll(m.a(x), 2)), a=nn.Linear(3, 4), b=nn.Linear(4, 2)),
        (2, 3),
        r"roll.*along the neurons",
    ),
    "rolled channels": (
        lambda: One(
            lambda m, x: m.b(m.a(x).roll(shifts=(1, 1), dims=(0, 1))),
            a=nn.Linear(3, 4), b=nn.Linear(4, 2),
        ),
        (2, 3),
        r"roll.*along the neurons",
    ),
    "circular padding of channels": (
        lambda: One(
            lambda m, x: m.b(F.pad(m.a(x), (1, 1), mode="circular")),
            a=nn.Linear(3, 4), b=nn.Linear(6, 2),
        ),
        (2, 5, 3),
        r"pad.*along the neurons",
    ),
    "circular padding module": (
        lambda: S(nn.Linear(3, 4), nn.CircularPad1d(1), nn.Linear(6, 2)),
        (2, 5, 3),
        r"1 \(CircularPad1d\).*along the neurons",
    ),
    "replicated channels": (
        lambda: S(nn.Conv2d(3, 4, 1), nn.ReplicationPad3d((0, 0, 0, 0, 1, 1)), nn.Conv2d(6, 2, 1)),
        (1, 3, 2, 2),
        r"1 \(ReplicationPad3d\).*along the neurons",
    ),
    "part of a flattened channel": (
        lambda: One(
            lambda m, x: m.b(m.a(x).flatten(1)[:, 3:8]), a=nn.Conv1d(3, 4, 2), b=nn.Linear(5, 2)
        ),
        (1, 3, 3),
        r"getitem.*cuts through the positions",
    ),
    "flattened in two orders": (
        lambda: One(
            lambda m, x: m.b(m.a(x).flatten(1) + m.c(x).mT.flatten(1)),
            a=nn.Conv1d(3, 4, 2), c=nn.Conv1d(3, 4, 2), b=nn.Linear(12, 2),
        ),
        (1, 3, 4),
        r"add.*positions agree",
    ),
    "neurons beside as many positions": (
        lambda: One(
            lambda m, x: m.b(m.a(x) + m.c(x).mT), a=nn.Linear(3, 4), c=nn.Linear(3, 4),
            b=nn.Linear(4, 2),
        ),
        (2, 4, 3),
        r"add.*neurons and 4 positions along axis",
    ),
    "convolution over points": (
        lambda: S(nn.Linear(3, 5), nn.Conv1d(4, 2, 1)),
        (2, 4, 3),
        r"1 \(Conv1d\).*positions there",
    ),
    "scalar of the input beside a vector": (
        lambda: One(
            lambda m, x: m.a(x) + x.sum() * m.w, a=nn.Linear(3, 4), w=nn.Parameter(torch.randn(4))
        ),
        (2, 3),
        r"mul.*scalar input",
    ),
    "patches by a function": (
        lambda: One(lambda m, x: F.unfold(m.a(x), 2), a=nn.Conv2d(3, 4, 1)),
        (1, 3, 4, 4),
        r"unfold.*nn\.Unfold",
    ),
    "a hook": (
        lambda: _hooked(S(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), 1),
        (2, 3),
        r"1 \(ReLU\).*hook",
    ),
    "a hook before a module": (
        lambda: _hooked(S(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), 2, before=True),
        (2, 3),
        r"2 \(Linear\).*hook",
    ),
    "a hook of the whole": (
        lambda: _hooked(S(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), None),
        (2, 3),
        r"Sequential.*hook",
    ),
    "another forward": (
        lambda: _patched(S(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))),
        (2, 3),
        r"1 \(ReLU\).*forward",
    ),
    "two parameters in one memory": (
        lambda: _sharing(lambda w: (w, w.t())),
        (2, 4),
        r"'0.weight' and '2.weight'.*memory",
    ),
    "overlapping parameters": (
        lambda: _sharing(lambda w: (w[:4], w[2:])),
        (2, 4),
        r"'0.weight' and '2.weight'.*memory",
    ),
    "a parameter's memory under no name": (
        lambda: _aliased(
            One(lambda m, x: m.b(m.a(x)) * m.alias, a=nn.Linear(3, 4), b=nn.Linear(4, 4))
        ),
        (2, 3),
        r"alias.*memory of 'a.bias'",
    ),
    "one row of a weight between free layers": (
        lambda: One(
            lambda m, x: m.c(m.b(m.a(x) * m.b.weight[0])),
            a=nn.Linear(3, 4), b=nn.Linear(4, 5), c=nn.Linear(5, 2),
        ),
        (2, 3),
        r"axis 0 of 'b.weight'",
    ),
    "a constant that is overwritten": (
        lambda: One(
            lambda m, x: m.b((z := torch.zeros(2, 4), z.add_(m.a(x)), z)[2]),
            a=nn.Linear(3, 4), b=nn.Linear(4, 2),
        ),
        (2, 3),
        r"add_.*in place",
    ),
    "radial basis": (
        lambda: One(
            lambda m, x: m.b((x[:, None] - m.centres).square().sum(2)),
            centres=nn.Parameter(torch.randn(5, 3)), b=nn.Linear(5, 2),
        ),
        (2, 3),
        r"sub.*radial basis",
    ),
    "complex weights": (lambda: nn.Linear(3, 4, dtype=torch.complex64), (2, 3), r"'weight' of"),
    "old spectral norm": (
        lambda: S(nn.utils.spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 2)),
        (2, 3),
        r"0 \(Linear\).*parametrisations",
    ),
    "a hook beside an old weight norm": (
        lambda: _hooked(S(nn.Linear(3, 4), nn.utils.weight_norm(nn.Linear(4, 2))), 1),
        (2, 3),
        r"1 \(Linear\).*hook",
    ),
    "no weights": (lambda: S(nn.ReLU()), (2, 3), r"weight between two layers"),
    "wrong example": (lambda: S(nn.Linear(4, 4)), (2, 3), r"that the network accepts"),
}  # fmt: skip
