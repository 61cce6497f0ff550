"""Training initialisations again under masks, to measure how good the masks are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nfn_graph import Batch, WeightGraph
from nfn_graph.converters import WeightDataset
from nfn_graph.messages import UserError
from nfn_graph.tasks.masks import ticket_from_scores
from nfn_graph.tasks.sources import Images, open_images
from nfn_graph.tasks.training.data import PreparedGraphs
from nfn_graph.tasks.training.run import load_model
from nfn_graph.tasks.winning_tickets import WinningTickets, mask_scores
from nfn_graph.tasks.zoo.builder import device_of, dtype_of
from nfn_graph.tasks.zoo.classifiers import TrainingData
from nfn_graph.tasks.zoo.optimisers import stack
from nfn_graph.tasks.zoo.seeds import generator_of
from nfn_graph.tasks.zoo.tickets import TicketZooOptions, ticket_run, weights_of
from nfn_graph.tasks.zoo.training import train_classifiers

# Networks that are trained as one computation.
_TOGETHER = 32
# The masks of one network by key; None keeps all weights.
Masks = Mapping[str, Tensor] | None


class Result(NamedTuple):
    """Test accuracies of all networks under one kind of mask.

    Attributes:
        name: The kind.
        accuracies: One for every network.
    """

    name: str
    accuracies: list[float]

    @property
    def mean(self) -> float:
        """The mean over networks."""
        return sum(self.accuracies) / len(self.accuracies)

    @property
    def standard_error(self) -> float | None:
        """The standard error of the mean; None for a single network."""
        count = len(self.accuracies)
        if count < 2:
            return None
        squares = sum((x - self.mean) ** 2 for x in self.accuracies)
        return math.sqrt(squares / (count - 1) / count)


def compare_masks(
    runs: Sequence[Path], zoo: WeightDataset, *, images: Images | None = None
) -> list[Result]:
    """Trains the networks of a zoo from their initial weights, under several masks each.

    Args:
        runs: Finished runs of winning-tickets; each becomes a row with the name of its model.
        zoo: The networks, such as ten of the test split.
        images: The images; by default they are read from the place that the zoo names.

    Returns:
        Dense, IMP, Random and Magnitude (of the initial weights); the latter three with weights
        on paths only (for IMP, see :func:`scores_of_mask`); then every run, and the masks from its
        scores alone.
    """
    options = options_of(zoo)
    images = open_images(options.data) if images is None else images
    if images.fingerprint != zoo.description["fingerprint"]:
        raise UserError(
            f"Expected the images that the zoo '{zoo.folder}' was made with (got other images "
            f"from '{images.name}')"
        )
    sparsity, scope = options.sparsity, options.scope
    states = [zoo.state_dict(i) for i in range(len(zoo))]
    initial = [weights_of(state) for state in states]
    networks = [
        WeightGraph.from_placements(graph.layout, state)
        for graph, state in zip(zoo, states, strict=True)
    ]

    def cut(scores: Sequence[Mapping[str, Tensor]], **how: Any) -> list[Masks]:
        pairs = zip(scores, networks, strict=True)
        return [ticket_from_scores(weights_of(x), g, sparsity, **how) for x, g in pairs]

    drawn = [_random(x, row) for x, row in zip(initial, zoo.rows, strict=True)]
    sizes = [{key: x.abs() for key, x in weights.items()} for weights in initial]
    pruned = [zoo.state_dict(i, "mask") for i in range(len(zoo))]
    ranked = [scores_of_mask(x, weights) for x, weights in zip(pruned, initial, strict=True)]
    kinds: dict[str, list[Masks]] = {
        "Dense": [None] * len(zoo),
        "IMP": list(pruned),
        "Random": cut(drawn, scope=scope, paths=False),
        "Magnitude": cut(sizes, scope=scope, paths=False),
        "IMP, on paths": cut(ranked, scope=scope),
        "Random, on paths": cut(drawn, scope=scope),
        "Magnitude, on paths": cut(sizes, scope=scope),
    }
    for run in runs:
        task, model, facts = load_model(run)
        if not isinstance(task, WinningTickets):
            raise UserError(f"Expected a run of winning-tickets (got '{run}', of {task.name})")
        model_name = task.options.model
        name = f"{model_name} ({run})" if model_name in kinds else model_name
        scores = _scores(PreparedGraphs(task, zoo, facts), model)
        kinds[name] = cut(scores)
        kinds[f"{name}, scores alone"] = cut(scores, scope=scope, paths=False)
    everything = [(i, masks) for kind in kinds.values() for i, masks in enumerate(kind)]
    accuracies = retrain(options, images, zoo, everything)
    count = len(zoo)
    parts = [accuracies[k * count : (k + 1) * count] for k in range(len(kinds))]
    return [Result(name, part) for name, part in zip(kinds, parts, strict=True)]


def scores_of_mask(masks: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scores that rank the weights of a mask first, and all others by their initial magnitude.

    A mask does not say which weights come next. For IMP these would be the ones that are largest
    after training, but a zoo stores only the mask and the initial weights. The initial magnitude
    is a stand-in for the final one.

    Args:
        masks: The mask of one network by key, nonzero where a weight is kept.
        initial: The initial weights of the same network, by key.

    Returns:
        Scores for :func:`~nfn_graph.tasks.masks.ticket_from_scores`, one for every initial weight.
    """
    sizes = {key: x.abs() for key, x in initial.items()}
    above = 1 + max(float(x.max()) for x in sizes.values() if x.numel())
    return {key: x + above * (masks[key] != 0).to(x) for key, x in sizes.items()}


def retrain(
    options: TicketZooOptions, images: Images, zoo: WeightDataset, jobs: Sequence[tuple[int, Masks]]
) -> list[float]:
    """The test accuracy of networks of a zoo that are trained under masks, job by job."""
    data = TrainingData.of(images, device_of(options), dtype_of(options))
    found = [math.nan] * len(jobs)
    by_group: dict[str, list[int]] = {}
    for job, (i, _) in enumerate(jobs):
        by_group.setdefault(zoo.rows[i]["group"], []).append(job)
    pieces = [
        members[k : k + _TOGETHER]
        for members in by_group.values()
        for k in range(0, len(members), _TOGETHER)
    ]
    for members in pieces:
        runs, initial, masks = [], [], []
        for job in members:
            i, mask = jobs[job]
            run = ticket_run(options, images, zoo.rows[i]["network"])
            runs.append(dataclasses.replace(run, network=job, checkpoints=(run.num_steps,)))
            initial.append(zoo.state_dict(i))
            ones = {key: torch.ones_like(x) for key, x in weights_of(initial[-1]).items()}
            masks.append(ones if mask is None else {k: mask[k].to(x) for k, x in ones.items()})
        for done in train_classifiers(
            runs, data, options.batch_size, initial=stack(initial), masks=stack(masks)
        ):
            found[done.run.network] = done.metrics.test_accuracy
    return found


def options_of(zoo: WeightDataset) -> TicketZooOptions:
    """The options that a zoo of tickets was made with."""
    if zoo.description["kind"] != "tickets":
        raise UserError(
            f"Expected a zoo of tickets (got '{zoo.folder}', a zoo of kind "
            f"'{zoo.description['kind']}'). Build one with: nfn-graph zoo tickets --out ..."
        )
    values: dict[str, Any] = {
        key: tuple(x) if isinstance(x, list) else x for key, x in zoo.description["options"].items()
    }
    return TicketZooOptions(zoo.folder, **values)


def _scores(graphs: PreparedGraphs, model: nn.Module) -> list[dict[str, Tensor]]:
    return [found for g in graphs for found in mask_scores(model, Batch.from_data_list([g]))]


def _random(state: Mapping[str, Tensor], row: Mapping[str, Any]) -> dict[str, Tensor]:
    generator = generator_of(row["seed"], "random ticket")
    return {key: torch.rand(x.shape, generator=generator) for key, x in state.items()}
