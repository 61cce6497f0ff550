"""Giving networks that share no types the same ones, so that one model reads them all.

What is added are zeros around kernels and biases of zero, which do not change what a network
computes. The sizes are those of the networks that a model was trained on; they are kept as plain
values with its run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from torch_geometric.transforms import Compose

from nfn_graph import WeightGraph
from nfn_graph.converters import WeightDataset
from nfn_graph.messages import UserError, one_line
from nfn_graph.transforms import FillBiases, GrowKernels, RoleTypes
from nfn_graph.transforms._grow_kernels import kernel_of

Unify = Literal["no", "kernels", "roles"]


def largest_parts(examples: Sequence[WeightGraph], unify: Unify) -> dict[str, Any]:
    """The largest kernels and the most biases of networks, as facts."""
    if unify == "no":
        return {}
    if unify == "kernels":
        grown = GrowKernels.to_largest(examples)
        sizes = dict(grown.sizes) if isinstance(grown.sizes, Mapping) else {}
        kernels = [[list(key), list(size)] for key, size in sizes.items()]
        filled = FillBiases.to_largest([grown(graph) for graph in examples])
        return {"kernels": kernels, "biases": filled.taps}
    found = [kernel_of(p) for graph in examples for p in graph.layout.placements]
    found = [kernel for kernel in found if kernel]
    largest = list(map(max, zip(*found, strict=True))) if found else []
    biases = [n.taps for graph in examples for n in graph.spec.neurons if not n.fixed]
    return {"kernel": largest, "bias": max([1, *biases])}


def unifying(facts: Mapping[str, Any]) -> Callable[[WeightGraph], WeightGraph]:
    """The transform that gives networks parts of the sizes in facts."""
    if "kernels" in facts:
        sizes = {(key[0], key[1], key[2]): tuple(size) for key, size in facts["kernels"]}
        return Compose([GrowKernels(sizes), FillBiases(facts["biases"])])
    grow = [GrowKernels(facts["kernel"])] if facts["kernel"] else []
    return Compose([*grow, FillBiases(facts["bias"]), RoleTypes()])


def without_refused(zoo: WeightDataset) -> WeightDataset:
    """The networks whose hidden layers can be given one type; says how many cannot, and why."""
    examples = zoo.examples()
    unify = unifying(largest_parts(examples, "roles"))
    numbers = list(dict.fromkeys(zoo.architectures.tolist()))
    refused: dict[int, UserError] = {}
    for number, graph in zip(numbers, examples, strict=True):
        try:
            unify(graph)
        except UserError as error:
            refused[number] = error
    kept = zoo.select(~np.isin(zoo.architectures, list(refused)))
    if refused:
        print(
            f"nfn-graph: left out {len(zoo) - len(kept)} of {len(zoo)} networks of '{zoo.folder}': "
            f"{one_line(next(iter(refused.values())))}",
            file=sys.stderr,
        )
    return kept
