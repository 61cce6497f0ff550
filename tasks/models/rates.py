"""At which rates the parts of models learn."""

from __future__ import annotations

from typing import Any

from torch import nn

from nfn_graph import NFLinear, Probe

# How much faster than the rest of a model probes learn, by what was best on validation networks.
# Random images must become something else; random points may stay near where they are.
_IMAGES, _COORDINATES = 10.0, 0.3


def fast_probes(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """The parameters of a model, with a learning rate of their own for its probes.

    Args:
        model: Any module; only the inputs of the probes in it are treated differently, and do
            not decay.
        lr: The learning rate of all other parameters.

    Returns:
        Groups with `params` and `lr`, for an optimiser. Every parameter is in one of them.
    """
    probes = [part for part in model.modules() if isinstance(part, Probe)]
    inputs = {id(probe.inputs) for probe in probes}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in inputs]
    return [{"params": rest, "lr": lr}] + [
        {
            "params": [probe.inputs],
            "lr": lr * (_IMAGES if len(probe.input_shape) > 1 else _COORDINATES),
            "weight_decay": 0.0,
        }
        for probe in probes
    ]


def slow_aggregates(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """The parameters of a model that returns weights, with a learning rate for each group.

    The maps of an :class:`NFLinear` from neurons and from the network read aggregates, and the
    mean of many weights is nearly a constant. Adam moves every entry of a map by about the
    learning rate, so the sum over all constants moves by the rate times the number of taps that
    are read: some thirty where kernels have nine, and each step throws the level of all features
    about. Here such a map learns at the rate divided by its number of taps. Where the outputs
    are the networks' own statistics, which the aggregates are, that would only be slower.

    Args:
        model: Any module; only the NF-Layers in it are treated differently.
        lr: The learning rate of all other parameters.

    Returns:
        Groups with `params` and `lr`, for an optimiser. Every parameter is in one of them.
    """
    taps = {
        id(matrix): matrix.shape[1] // layer.in_channels
        for layer in model.modules()
        if isinstance(layer, NFLinear)
        for site, matrix in zip(layer.spec.sites, layer.site_maps(), strict=True)
        if matrix is not None and isinstance(site.key, str)
    }
    by_taps: dict[int, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        by_taps.setdefault(max(1, taps.get(id(parameter), 1)), []).append(parameter)
    return [{"params": group, "lr": lr / count} for count, group in sorted(by_taps.items())]
