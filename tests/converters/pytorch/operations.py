"""Operations between two layers, with the layers that stay free: a table for `test_followed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from architectures import One, Two
from torch import Tensor, nn

S = nn.Sequential


class Case(NamedTuple):
    """A network, the shapes of its inputs, and the sizes of the layers that may be permuted."""

    build: Callable[[], nn.Module]
    inputs: tuple[Any, ...]
    free: tuple[int, ...]

    def module(self) -> nn.Module:
        """The network in float64; no parameter or statistic is special."""
        module = self.build().double().eval()
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor += 0.2 * torch.rand_like(tensor)
        return module

    def tensors(self) -> tuple[Tensor, ...]:
        """Random inputs, or the indices that are given."""
        return tuple(
            x if isinstance(x, Tensor) else torch.randn(x, dtype=torch.float64) for x in self.inputs
        )


def mlp(between: Callable[..., Any], hidden: int = 8, after: int = 8, **more: Any) -> nn.Module:
    """`b(between(m, a(x)))`."""
    return One(
        lambda m, x: m.b(between(m, m.a(x))),
        a=nn.Linear(3, hidden), b=nn.Linear(after, 2), **more,
    )  # fmt: skip


def cnn(between: Callable[..., Any], after: int = 8, **more: Any) -> nn.Module:
    """The same with a convolution of 8 channels."""
    return One(
        lambda m, x: m.b(between(m, m.a(x))), a=nn.Conv1d(3, 8, 3), b=nn.Linear(after, 2), **more
    )


def with_buffer(module: nn.Module, **buffers: Tensor) -> nn.Module:
    """A module with tensors that its state dict does not hold."""
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer, persistent=False)
    return module


class Pair(NamedTuple):
    """Returns two outputs by name."""

    first: Tensor
    second: Tensor


def overwritten(h: Tensor) -> Tensor:
    """An activation that sets the first neuron to zero."""
    h[:, 0] = 0.0
    return h


MATRICES = torch.rand(8, 7, 1, dtype=torch.float64)
INDICES = torch.tensor([[1, 2, 0, 5], [3, 3, 1, 6]])
POINTS = ((2, 5, 3),)
FLAT = ((4, 3),)
SIGNAL = ((2, 3, 9),)


def two(run: Callable[..., Any], after: int = 8, **more: Any) -> nn.Module:
    """Two layers of 8 neurons, something between them, and a last layer."""
    return One(
        lambda m, x: m.b(run(m, m.a(x), m.c(x))),
        a=nn.Linear(3, 8), c=nn.Linear(3, 8), b=nn.Linear(after, 2), **more,
    )  # fmt: skip


def decoder(between: nn.Module) -> nn.Module:
    """A linear layer, 6 channels of 4 x 4 positions, something along these, a convolution."""
    return S(
        nn.Linear(3, 96), nn.Unflatten(1, (6, 4, 4)), between,
        nn.Conv2d(6, 4, 2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 2),
    )  # fmt: skip


FOLLOWED: dict[str, Case] = {
    # These depend on the order of the neurons, so the neurons are fixed.
    "a constant along the neurons": Case(
        lambda: mlp(lambda m, h: h * torch.arange(8.0).double()), FLAT, ()
    ),
    "layer norm with constants": Case(
        lambda: with_buffer(
            mlp(lambda m, h: F.layer_norm(h, (8,), m.scale)), scale=torch.rand(8).double()
        ),
        FLAT, (),
    ),
    "rms norm with constants": Case(
        lambda: with_buffer(
            mlp(lambda m, h: F.rms_norm(h, (8,), m.scale)), scale=torch.rand(8).double()
        ),
        FLAT, (),
    ),
    "a bias that is no parameter": Case(
        lambda: with_buffer(
            One(
                lambda m, x: m.b(F.linear(x, m.a.weight, m.shift).relu()),
                a=nn.Linear(3, 8, bias=False), b=nn.Linear(8, 2),
            ),
            shift=torch.rand(8).double(),
        ),
        FLAT, (),
    ),
    "the places of the largest neurons": Case(
        lambda: mlp(lambda m, h: F.one_hot(h.argmax(1), 8).double()), FLAT, ()
    ),
    "the place of a maximum over neurons": Case(
        lambda: mlp(lambda m, h: h * h.max(1, keepdim=True)[1]), FLAT, ()
    ),
    "the places of sorted neurons as an output": Case(
        lambda: One(
            lambda m, x: (m.b(h := m.a(x)), h.argsort(1)), a=nn.Linear(3, 8), b=nn.Linear(8, 2)
        ),
        FLAT, (),
    ),
    "the place of the largest of all": Case(
        lambda: One(
            lambda m, x: m.b(h := m.a(x)) * (h.argmax() * x[:, :1]),
            a=nn.Linear(3, 8), b=nn.Linear(8, 2),
        ),
        FLAT, (),
    ),
    "a constant along heads": Case(
        lambda: mlp(lambda m, h: (h.view(-1, 2, 4) * torch.arange(4.0).double()).flatten(1)),
        FLAT, (2,),
    ),
    "the place of the largest bias": Case(
        lambda: One(
            lambda m, x: m.b(m.a(x)) * m.a.bias.argmax(), a=nn.Linear(3, 8), b=nn.Linear(8, 2)
        ),
        FLAT, (),
    ),
    "a weight as an output": Case(
        lambda: One(
            lambda m, x: (m.b(m.a(x).relu()), m.b.weight), a=nn.Linear(3, 8), b=nn.Linear(8, 2)
        ),
        FLAT, (),
    ),
    "part of a weight as an output": Case(
        lambda: One(
            lambda m, x: {"y": m.c(m.b(m.a(x)).relu()), "norm": m.b.weight.square().sum(1)},
            a=nn.Linear(3, 8), b=nn.Linear(8, 4), c=nn.Linear(4, 2),
        ),
        FLAT, (8,),
    ),
    # These do not depend on the order, because the function is symmetric.
    "the size of a weight as an output": Case(
        lambda: One(
            lambda m, x: (m.b(m.a(x).relu()), m.b.weight.square().sum()),
            a=nn.Linear(3, 8), b=nn.Linear(8, 2),
        ),
        FLAT, (8,),
    ),
    "maximum over positions": Case(lambda: cnn(lambda m, h: h.max(dim=2)[0]), SIGNAL, (8,)),
    "values of a maximum": Case(lambda: cnn(lambda m, h: h.max(dim=2).values), SIGNAL, (8,)),
    "places of a maximum over positions": Case(
        lambda: cnn(lambda m, h: h.max(2)[0] * h.max(2).indices + h.argmin(2)), SIGNAL, (8,)
    ),
    "median over positions": Case(lambda: cnn(lambda m, h: h.median(-1)[0]), SIGNAL, (8,)),
    "largest over positions": Case(
        lambda: cnn(lambda m, h: h.topk(3, dim=2)[0].flatten(1), 24), SIGNAL, (8,)
    ),
    "places of the largest over positions": Case(
        lambda: cnn(lambda m, h: h.topk(3).indices.double().flatten(1), 24), SIGNAL, (8,)
    ),
    "third over positions": Case(
        lambda: cnn(lambda m, h: h.kthvalue(3, 2).values), SIGNAL, (8,)
    ),
    "sorted positions": Case(
        lambda: cnn(lambda m, h: h.sort(2)[0][..., 0] * h.sort(2)[1][..., 1]), SIGNAL, (8,)
    ),
    "maximum over neurons": Case(
        lambda: mlp(lambda m, h: h - h.max(1, keepdim=True)[0]), FLAT, (8,)
    ),
    "largest neurons": Case(lambda: mlp(lambda m, h: h.topk(3, 1)[0], after=3), FLAT, (8,)),
    "norm over neurons": Case(
        lambda: mlp(lambda m, h: h / h.norm(2, 1, keepdim=True) + h.norm(2, 1)[:, None]), FLAT, (8,)
    ),
    "norm over positions": Case(
        lambda: cnn(lambda m, h: h.norm(2, 2) + torch.linalg.norm(h, dim=2)), SIGNAL, (8,)
    ),
    "vector norm over neurons": Case(
        lambda: mlp(lambda m, h: h / torch.linalg.norm(h, None, 1, True)), FLAT, (8,)
    ),
    "deviation over positions": Case(lambda: cnn(lambda m, h: h.std(2, True)), SIGNAL, (8,)),
    "mean that keeps axes": Case(
        lambda: cnn(lambda m, h: (h - h.mean(axis=2, keepdims=True)).amax(2)), SIGNAL, (8,)
    ),
    "flipped and rolled positions": Case(
        lambda: cnn(lambda m, h: h.flip(2).roll(1, 2).roll((1,), (-1,)).flatten(1), 56),
        SIGNAL, (8,),
    ),
    "circular padding of positions": Case(
        lambda: cnn(lambda m, h: F.pad(h, (1, 1), mode="circular").flatten(1), 72), SIGNAL, (8,)
    ),
    "reflected positions": Case(
        lambda: S(
            nn.Conv1d(3, 8, 3), nn.ReflectionPad1d(1), nn.CircularPad1d((0, 1)),
            nn.ReplicationPad1d(1), nn.Conv1d(8, 2, 3),
        ),
        SIGNAL, (8,),
    ),
    "largest in a window": Case(
        lambda: S(nn.Conv1d(3, 8, 3), nn.AdaptiveMaxPool1d(2), nn.Flatten(), nn.Linear(16, 2)),
        SIGNAL, (8,),
    ),
    "places in a window": Case(
        lambda: cnn(
            lambda m, h: F.max_pool1d(h, 7, return_indices=True)[1].flatten(1).double()
        ),
        SIGNAL, (8,),
    ),
    # Operations that tie layers, and operations that do not.
    "cast to the type of another": Case(
        lambda: two(lambda m, h, k: torch.cat([h.type_as(k), k.to(h)], 1), 16), FLAT, (8, 8)
    ),
    "added heads": Case(
        lambda: two(
            lambda m, h, k: (h.view(h.shape[0], 4, 2) + k.view(k.shape[0], 4, 2)).flatten(1)
        ),
        FLAT, (8,),
    ),
    "scaled heads": Case(
        lambda: mlp(
            lambda m, h: (h.view(-1, 2, 4) * m.w).flatten(1), w=nn.Parameter(torch.randn(2, 1))
        ),
        FLAT, (2, 8),
    ),
    "scaled parts of heads": Case(
        lambda: mlp(
            lambda m, h: (h.view(-1, 2, 4) * m.w).flatten(1), w=nn.Parameter(torch.randn(4))
        ),
        FLAT, (4, 2, 8),
    ),
    "layer norms of heads": Case(
        lambda: mlp(lambda m, h: m.n(h.view(-1, 4, 2)).flatten(1), n=nn.LayerNorm(2)),
        FLAT, (2, 4, 8),
    ),
    "group norms of heads": Case(
        lambda: mlp(lambda m, h: F.group_norm(h.view(-1, 4, 2), 4).flatten(1)), FLAT, (4, 8)
    ),
    "softmax over the heads": Case(
        lambda: mlp(lambda m, h: h.view(-1, 4, 2).softmax(1).flatten(1)), FLAT, (4, 2, 8)
    ),
    "recurrence over heads": Case(
        lambda: mlp(
            lambda m, h: m.rnn(h.view(-1, 4, 2) * m.w)[0].flatten(1),
            w=nn.Parameter(torch.randn(4, 1)), rnn=nn.GRU(2, 2, batch_first=True),
        ),
        FLAT, (2, 2),
    ),
    "a part of learned positions": Case(
        lambda: One(
            lambda m, x: m.b((m.a(x) + m.p[:, :5]).relu().mean(1)),
            a=nn.Linear(3, 8), b=nn.Linear(8, 2), p=nn.Parameter(torch.randn(1, 7, 8)),
        ),
        ((2, 5, 3),), (8,),
    ),
    "softmax inside heads": Case(
        lambda: mlp(lambda m, h: h.view(-1, 4, 2).softmax(2).flatten(1)), FLAT, (4, 8)
    ),
    "every second neuron": Case(
        lambda: mlp(lambda m, h: h[:, ::2], after=4), FLAT, (4,)
    ),
    "outer product": Case(
        lambda: mlp(lambda m, h: (h[:, :, None] * h[:, None]).flatten(1), after=64), FLAT, ()
    ),
    "outer product of two layers": Case(
        lambda: mlp(
            lambda m, h: (h[:, :, None] * m.c(h)[:, None]).flatten(1), after=32, c=nn.Linear(8, 4)
        ),
        FLAT, (8, 4, 32),
    ),
    "shuffled channels": Case(
        lambda: mlp(lambda m, h: h.view(-1, 4, 2).mT.flatten(1)), FLAT, (2, 4, 8, 8)
    ),
    "normalised heads": Case(
        lambda: mlp(lambda m, h: m.n(h.view(-1, 2, 4)).flatten(1), n=nn.BatchNorm1d(2)),
        FLAT, (2,),
    ),
    "chunks of unequal size": Case(
        lambda: mlp(
            lambda m, h: torch.cat([h.chunk(3, 1)[0] + h.chunk(3, 1)[1], h.chunk(3, 1)[2]], 1),
            after=5,
        ),
        FLAT, (3, 2),
    ),
    "scalars of one parameter": Case(
        lambda: two(
            lambda m, h, k: m.w[0] * h + m.w[1] * k, w=nn.Parameter(torch.randn(2))
        ),
        FLAT, (8,),
    ),
    "rows of one parameter": Case(
        lambda: two(
            lambda m, h, k: m.w[0] * h + m.w[1] * k, w=nn.Parameter(torch.randn(2, 8))
        ),
        FLAT, (8,),
    ),
    "a weight as a vector, then as a matrix": Case(
        lambda: One(
            lambda m, x: m.b(m.a(x) * m.w.norm(dim=1) + F.linear(x, m.w)),
            a=nn.Linear(3, 8), b=nn.Linear(8, 2), w=nn.Parameter(torch.randn(8, 3)),
        ),
        FLAT, (8,),
    ),
    "a weight as two vectors": Case(
        lambda: One(
            lambda m, x: m.c(m.b(m.a(x) * m.w.sum(0)).relu() * m.w.sum(1)),
            a=nn.Linear(3, 8), b=nn.Linear(8, 5), c=nn.Linear(5, 2),
            w=nn.Parameter(torch.randn(5, 8)),
        ),
        FLAT, (8, 5),
    ),
    "a product that an operation makes in place": Case(
        lambda: two(lambda m, h, k: (h.mul_(k), h)[1]), FLAT, (8,)
    ),
    "an expanded weight": Case(
        lambda: mlp(lambda m, h: h * m.w.expand(4, 8), w=nn.Parameter(torch.randn(1, 8))),
        FLAT, (8,),
    ),
    "a slice that is overwritten": Case(lambda: mlp(lambda m, h: overwritten(h)), FLAT, (1, 7)),
    "matrices that differ between channels": Case(
        lambda: cnn(lambda m, h: (h.unsqueeze(2) @ MATRICES).flatten(1)), SIGNAL, ()
    ),
    "an axis that is added in place": Case(
        lambda: mlp(lambda m, h: (h.unsqueeze_(1), h)[1].mean(1)), FLAT, (8,)
    ),
    "constant matrix along positions": Case(
        lambda: One(
            lambda m, x: m.b((torch.ones(4, 5).double() @ m.a(x)).sum(1)),
            a=nn.Linear(3, 8), b=nn.Linear(8, 2),
        ),
        POINTS, (8,),
    ),
    "constant vector along positions": Case(
        lambda: cnn(lambda m, h: h @ torch.arange(7.0).double()), SIGNAL, (8,)
    ),
    "embedding": Case(
        lambda: One(
            lambda m, x: m.b(m.e(x).mean(1)), e=nn.Embedding(7, 8), b=nn.Linear(8, 2)
        ),
        (INDICES,), (8,),
    ),
    "modules called by keyword": Case(
        lambda: One(
            lambda m, x: m.b(input=m.act(input=m.a(input=x))),
            a=nn.Linear(3, 8), act=nn.ReLU(), b=nn.Linear(8, 2),
        ),
        FLAT, (8,),
    ),
    "an output size": Case(
        lambda: One(
            lambda m, x: m.b(m.a(x, output_size=[20]).relu()),
            a=nn.ConvTranspose1d(3, 8, 3, 2), b=nn.Conv1d(8, 2, 3),
        ),
        SIGNAL, (8,),
    ),
    "smallest and largest": Case(
        lambda: cnn(lambda m, h: torch.aminmax(h, dim=2)[0] * torch.aminmax(h, dim=2)[1]),
        SIGNAL, (8,),
    ),
    "named outputs": Case(
        lambda: One(
            lambda m, x: Pair(m.b(h := m.a(x)), m.c(h)),
            a=nn.Linear(3, 8), b=nn.Linear(8, 2), c=nn.Linear(8, 1),
        ),
        FLAT, (8,),
    ),
    # Reshapes that show where channels are when other axes are mixed.
    **{
        f"unflattened, then {name}": Case(lambda m=module: decoder(m), FLAT, (6, 4))
        for name, module in {
            "upsampled": nn.Upsample(scale_factor=2),
            "pooled": nn.MaxPool2d(2),
            "pooled to a size": nn.AdaptiveAvgPool2d(2),
            "padded": nn.ZeroPad2d(1),
            "padded by reflection": nn.ReflectionPad2d(1),
            "normed": nn.InstanceNorm2d(6),
            "normed with parameters": nn.InstanceNorm2d(6, affine=True),
            "normed without parameters": nn.BatchNorm2d(6, affine=False),
            "resized": One(lambda m, x: F.interpolate(x, size=(5, 3), mode="bilinear")),
            "resized twice": S(nn.AvgPool2d(2), One(lambda m, x: F.interpolate(x, (3, 3)))),
            "padded by a function": One(lambda m, x: F.pad(x, (1, 0, 1, 1))),
            "flipped": One(lambda m, x: x.flip(2, 3)),
            "divided by a mean": One(lambda m, x: x / x.mean((2, 3), keepdim=True).exp()),
        }.items()
    },
    "unflattened, then averaged": Case(
        lambda: mlp(lambda m, h: h.unflatten(1, (2, 2, 2)).mean((2, 3)), after=2), FLAT, (2, 4, 8)
    ),
    "unflattened, then averaged as a whole": Case(
        lambda: mlp(lambda m, h: h * h.unflatten(1, (2, 2, 2)).mean((1, 2, 3))[:, None]),
        FLAT, (8,),
    ),
    "one channel, unflattened and upsampled": Case(
        lambda: One(
            lambda m, x: m.c(m.b(m.up(m.a(x).view(-1, 1, 3, 4)).relu())).flatten(1),
            a=nn.Linear(3, 12), up=nn.Upsample(scale_factor=2),
            b=nn.Conv2d(1, 4, 3), c=nn.Conv2d(4, 2, 1),
        ),
        FLAT, (1, 4),
    ),
    "one channel of a signal": Case(
        lambda: One(
            lambda m, x: m.c(m.b(m.a(x).relu().unflatten(1, (1, 8)))).flatten(1),
            a=nn.Linear(3, 8), b=nn.Conv1d(1, 4, 3), c=nn.Conv1d(4, 2, 1),
        ),
        FLAT, (1, 4),
    ),
    "one channel of a signal, upsampled by a convolution": Case(
        lambda: One(
            lambda m, x: m.c(m.b(m.a(x).relu()[:, None]).relu()).flatten(1),
            a=nn.Linear(3, 8), b=nn.ConvTranspose1d(1, 4, 3), c=nn.Conv1d(4, 2, 3),
        ),
        FLAT, (1, 4),
    ),
    "a layer norm over one channel of an input": Case(
        lambda: S(nn.LayerNorm([1, 9]), nn.Conv1d(1, 8, 3), nn.ReLU(), nn.Conv1d(8, 2, 1)),
        ((2, 1, 9),), (8,),
    ),
    "a layer norm over one channel between convolutions": Case(
        lambda: S(nn.Conv1d(3, 1, 3), nn.LayerNorm([1, 7]), nn.Conv1d(1, 8, 3), nn.Conv1d(8, 2, 1)),
        SIGNAL, (1, 8),
    ),
    "a mean of each head": Case(
        lambda: mlp(lambda m, h: h.view(-1, 4, 2).mean(2), after=4), FLAT, (4, 8)
    ),
    "the largest of each head": Case(
        lambda: mlp(lambda m, h: h.view(-1, 4, 2).topk(1, 2)[0].flatten(1), after=4), FLAT, (4, 8)
    ),
    "statistics of each head": Case(
        lambda: mlp(lambda m, h: m.norm(h.view(-1, 4, 2)).flatten(1), norm=nn.InstanceNorm1d(4)),
        FLAT, (4,),
    ),
    "a matrix before a vector": Case(
        lambda: One(
            lambda m, x: m.v @ (m.w @ x + m.c).relu(),
            w=nn.Parameter(torch.rand(8, 3)), v=nn.Parameter(torch.rand(2, 8)),
            c=nn.Parameter(torch.rand(8)),
        ),
        ((3,),), (8,),
    ),
    "a vector behind the features": Case(
        lambda: mlp(lambda m, h: h * (h @ m.v)[:, None].exp(), v=nn.Parameter(torch.rand(8))),
        FLAT, (8,),
    ),
    "a vector before a vector": Case(
        lambda: One(
            lambda m, x: m.v @ (m.w @ x).relu(),
            w=nn.Parameter(torch.rand(8, 3)), v=nn.Parameter(torch.rand(8)),
        ),
        ((3,),), (8,),
    ),
    "a matrix before columns": Case(
        lambda: One(
            lambda m, x: m.v @ (m.w @ x + m.c[:, None]).relu(),
            w=nn.Parameter(torch.rand(8, 3)), v=nn.Parameter(torch.rand(2, 8)),
            c=nn.Parameter(torch.rand(8)),
        ),
        ((3, 4),), (8,),
    ),
    # Stored tensors next to activations.
    "a class token before the others": Case(
        lambda: mlp(
            lambda m, h: torch.cat([m.token.expand(h.shape[0], -1, -1), h], 1)[:, 0] + h.mean(1),
            token=nn.Parameter(torch.rand(1, 1, 8)),
        ),
        POINTS, (8,),
    ),
    "a stored context beside the features": Case(
        lambda: mlp(
            lambda m, h: torch.cat([h, m.context.expand(h.shape[0], 4)], 1),
            after=12, context=nn.Parameter(torch.rand(4)),
        ),
        FLAT, (8, 4),
    ),
    "deviations beside the outputs": Case(
        lambda: One(
            lambda m, x: torch.cat([m.b(m.a(x).relu()), m.log_std.expand(x.shape[0], 2)], 1),
            a=nn.Linear(3, 8), b=nn.Linear(8, 2), log_std=nn.Parameter(torch.rand(2)),
        ),
        FLAT, (8,),
    ),
}  # fmt: skip

#: Right with an example and refused without one, because the number of axes decides.
UNCLEAR: dict[str, Case] = {
    "mean of an embedding": FOLLOWED["embedding"],
    "first of an embedding": Case(
        lambda: One(lambda m, x: m.b(m.e(x)[:, 0]), e=nn.Embedding(7, 8), b=nn.Linear(8, 2)),
        (INDICES,), (8,),
    ),
    "embedding, then its axes": Case(
        lambda: One(
            lambda m, x: m.b(m.e(x).unsqueeze(1).mean(2).squeeze(1)),
            e=nn.Embedding(7, 8), b=nn.Linear(8, 2),
        ),
        (INDICES,), (8,),
    ),
    "embedding by a function": Case(
        lambda: One(
            lambda m, x: m.b(F.embedding(x, m.e).relu().sum(dim=1)),
            e=nn.Parameter(torch.randn(7, 8)), b=nn.Linear(8, 2),
        ),
        (INDICES,), (8,),
    ),
    "as many tokens as features, in a norm": Case(
        lambda: S(nn.Embedding(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), (INDICES,), (4,)
    ),
    "points exchanged with the batch": Case(
        lambda: mlp(lambda m, h: h.transpose(0, 1).mean(0)), POINTS, (8,)
    ),
    "an axis behind the features": Case(
        lambda: mlp(lambda m, h: h.unsqueeze(2).squeeze(-1)), POINTS, (8,)
    ),
    "neurons beside as many points": Case(
        lambda: two(lambda m, h, k: h + k[:, :1]), ((2, 8, 3),), (8,)
    ),
    "points beside one vector": Case(
        lambda: Two(
            lambda m, x, z: m.b((m.a(x).mean(2) + m.c(z)).mean(1)),
            a=nn.Conv1d(3, 8, 3), c=nn.Linear(3, 8), b=nn.Linear(8, 2),
        ),
        ((2, 3, 9), (5, 2, 3)), (8,),
    ),
    "points behind the features": Case(
        lambda: mlp(lambda m, h: h.mT.mean(1), after=5), POINTS, (8,)
    ),
    "features beside tokens": Case(
        lambda: Two(
            lambda m, x, z: m.b(torch.cat([m.a(x), m.e(z)], -1)),
            a=nn.Linear(3, 8), e=nn.Embedding(7, 8), b=nn.Linear(16, 2),
        ),
        ((2, 4, 3), INDICES), (8, 8),
    ),
    "exchanged points": Case(
        lambda: mlp(lambda m, h: torch.cat([h[:, 4:], h[:, :4]], 1)), ((2, 8, 3),), (8,)
    ),
    "concatenated points": Case(
        lambda: two(lambda m, h, k: torch.cat([h, k], 1)), POINTS, (8,)
    ),
    "as many points as the code asks for": Case(
        lambda: mlp(lambda m, h: h.view(-1, h.shape[1], 8)), POINTS, (8,)
    ),
}  # fmt: skip
