"""Fitting many SIRENs as one batched computation, each exactly as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nfn_graph.tasks.zoo.optimisers import BatchedOptimiser
from nfn_graph.tasks.zoo.parameters import Parameters, stack
from nfn_graph.tasks.zoo.seeds import generator_of
from nfn_graph.tasks.zoo.siren import SirenShape, initialise_siren, siren_forward

_REPORT_EVERY = 20


class FitTargets(NamedTuple):
    """What networks are fitted to.

    Attributes:
        coordinates: `[inputs, points]` for all networks, or `[N, inputs, points]`.
        values: `[N, outputs, points]`.
    """

    coordinates: Tensor
    values: Tensor


class FitSettings(NamedTuple):
    """How networks are fitted.

    Attributes:
        w0: The frequency factor.
        offset: What is added to the outputs.
        steps: Steps of Adam.
        learning_rate: Of Adam.
        points: Points per step, the same for all networks; 0 for all of them.
        seed: What those points are drawn from.
    """

    w0: float
    offset: float
    steps: int
    learning_rate: float
    points: int
    seed: int


class Fits(NamedTuple):
    """Stacked parameters, and the mean squared error of every network over all points."""

    parameters: Parameters
    errors: Tensor


def fit_sirens(
    shape: SirenShape,
    seeds: Sequence[int],
    targets: FitTargets,
    settings: FitSettings,
    on_steps: Callable[[int], None] = lambda steps: None,
) -> Fits:
    """Fits one network per seed to its target by the mean squared error.

    Args:
        shape: Of all networks.
        seeds: What the initial weights of each are drawn from.
        targets: What they are fitted to.
        settings: How.
        on_steps: Called with the number of steps made, summed over networks.
    """
    like = targets.values
    fresh = [initialise_siren(shape, settings.w0, generator_of(s, "initial")) for s in seeds]
    stacked = {key: x.to(like.device, like.dtype) for key, x in stack(fresh).items()}
    rates = like.new_full((len(seeds),), settings.learning_rate)
    optimiser = BatchedOptimiser(stacked, ["adam"] * len(seeds), rates)
    parameters = optimiser.parameters
    draws = generator_of(settings.seed, "points")
    outputs, points = like.shape[1:]
    for step in range(settings.steps):
        coordinates, values = targets
        if 0 < settings.points < points:
            chosen = torch.randint(points, (settings.points,), generator=draws).to(like.device)
            coordinates = coordinates.index_select(-1, chosen)
            values = values.index_select(-1, chosen)
        found = siren_forward(parameters, coordinates, settings.w0, settings.offset)
        loss = (found - values).square_().sum() / (outputs * values.shape[-1])
        optimiser.step(torch.autograd.grad(loss, list(parameters.values())))
        if (step + 1) % _REPORT_EVERY == 0:
            on_steps(_REPORT_EVERY * len(seeds))
    on_steps(settings.steps % _REPORT_EVERY * len(seeds))
    done = {key: x.detach() for key, x in parameters.items()}
    return Fits(done, _errors(done, targets, settings))


@torch.no_grad()
def _errors(parameters: Parameters, targets: FitTargets, settings: FitSettings) -> Tensor:
    total = targets.values.new_zeros(len(targets.values))
    pieces = zip(targets.coordinates.split(4096, -1), targets.values.split(4096, -1), strict=True)
    for coordinates, values in pieces:
        found = siren_forward(parameters, coordinates, settings.w0, settings.offset)
        total += (found - values).square().sum((1, 2))
    return total / targets.values[0].numel()
