"""Gradient steps of many networks at once, each with its own optimiser and step size.

The formulas and constants are those of `torch.optim.SGD`, `Adam` and `RMSprop`. All parameters
of a network lie in one row of a matrix: for small networks the number of operations costs more
than their size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

# Plain gradient descent needs larger steps than the optimisers that normalise them.
SGD_FACTOR = 10.0

Parameters = dict[str, Tensor]
Optimiser = Literal["sgd", "adam", "rmsprop"]
_BETA1, _BETA2, _ALPHA, _EPSILON = 0.9, 0.999, 0.99, 1e-8


def stack(networks: Sequence[Mapping[str, Tensor]]) -> Parameters:
    """The parameters of networks of one shape along a first axis."""
    return {key: torch.stack([n[key] for n in networks]) for key in networks[0]}


class BatchedOptimiser:
    """The parameters of `N` networks and the state of their optimisers.

    Args:
        parameters: Stacked parameters `[N, ...]`, by key; they are copied.
        kinds: The optimiser of each network; those of one kind must be neighbours.
        learning_rates: `[N]`.
        l2: `[N]`, the penalty on the sum of squared weights (not biases).
        masks: The factors of the gradients, by key, for networks that keep some of their weights
            at zero.

    Attributes:
        parameters: The current parameters, views that :meth:`step` changes.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        kinds: Sequence[Optimiser],
        learning_rates: Tensor,
        l2: Tensor | None = None,
        masks: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._shapes = {key: tuple(x.shape[1:]) for key, x in parameters.items()}
        self._flat = torch.cat([x.detach().flatten(1) for x in parameters.values()], 1)
        self._first = torch.zeros_like(self._flat)
        self._second = torch.zeros_like(self._flat)
        self._rates = learning_rates.view(-1, 1)
        self._decay: Tensor | None = None
        self._mask: Tensor | None = None
        if l2 is not None:
            is_weight = {k: torch.full_like(x, k.endswith("weight")) for k, x in parameters.items()}
            self._decay = self._matrix(is_weight) * 2 * l2.view(-1, 1)
        if masks:
            kept = {k: masks.get(k, torch.ones_like(x)) for k, x in parameters.items()}
            self._mask = self._matrix(kept)
            self._flat = self._flat * self._mask
        self._num_steps = 0
        self._begin(kinds)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        """Changes the parameters; `gradients` come in the order of the parameters."""
        self._num_steps += 1
        flat = torch.cat([g.flatten(1) for g in gradients], 1)
        if self._decay is not None:
            flat.addcmul_(self._flat, self._decay)
        if self._mask is not None:
            flat.mul_(self._mask)
        states = (self._flat, flat, self._first, self._second, self._rates)
        for kind, rows in self._spans:
            self._step(kind, *(x[rows] for x in states))

    def keep(self, rows: Tensor, kinds: Sequence[Optimiser]) -> None:
        """Continues with some of the networks."""
        self._flat, self._first, self._second, self._rates = (
            x[rows] for x in (self._flat, self._first, self._second, self._rates)
        )
        self._decay = None if self._decay is None else self._decay[rows]
        self._mask = None if self._mask is None else self._mask[rows]
        self._begin(kinds)

    def _begin(self, kinds: Sequence[Optimiser]) -> None:
        self._spans = _spans(kinds)
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        parts = self._flat.split(sizes, 1)
        self.parameters = {
            key: part.view(-1, *shape).detach().requires_grad_()
            for (key, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    def _matrix(self, values: Mapping[str, Tensor]) -> Tensor:
        found = torch.cat([values[key].flatten(1) for key in self._shapes], 1)
        return found.to(self._flat.device, self._flat.dtype)

    def _step(
        self, kind: Optimiser, p: Tensor, g: Tensor, m: Tensor, v: Tensor, rate: Tensor
    ) -> None:
        if kind == "sgd":
            p.sub_(g.mul_(rate))
        elif kind == "rmsprop":
            v.mul_(_ALPHA).addcmul_(g, g, value=1 - _ALPHA)
            p.addcdiv_(g.mul_(rate), v.sqrt().add_(_EPSILON), value=-1)
        else:
            m.lerp_(g, 1 - _BETA1)
            v.mul_(_BETA2).addcmul_(g, g, value=1 - _BETA2)
            scale = (1 - _BETA2**self._num_steps) ** 0.5
            size = rate / (1 - _BETA1**self._num_steps)
            p.addcdiv_(m * size, v.sqrt().div_(scale).add_(_EPSILON), value=-1)


def _spans(kinds: Sequence[Optimiser]) -> list[tuple[Optimiser, slice]]:
    """Runs of one optimiser, in order."""
    spans: list[tuple[Optimiser, slice]] = []
    start = 0
    for at in range(1, len(kinds) + 1):
        if at == len(kinds) or kinds[at] != kinds[start]:
            spans.append((kinds[start], slice(start, at)))
            start = at
    return spans
