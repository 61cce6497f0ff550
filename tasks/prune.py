"""The commands `nfn-graph prune` and `nfn-graph retrain`: applying and testing winning tickets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from torch import nn
from tyro.conf import Positional, arg

from nfn_graph import WeightGraph
from nfn_graph.converters.commands import Reading, ReadingOptions, unset
from nfn_graph.converters.conversion import load_file
from nfn_graph.messages import UserError
from nfn_graph.tasks.masks import (
    TicketScope,
    masks_from_scores,
    on_no_path,
    prunable,
    ticket_from_scores,
)
from nfn_graph.tasks.option_checks import check_at_least
from nfn_graph.tasks.reports.page import Table, print_rows
from nfn_graph.tasks.retraining import compare_masks
from nfn_graph.tasks.sources import open_images
from nfn_graph.tasks.training.run import load_model
from nfn_graph.tasks.training.run_folder import write_csv
from nfn_graph.tasks.user_networks import check_single, save_like
from nfn_graph.tasks.winning_tickets import WinningTickets, mask_scores
from nfn_graph.tasks.zoo.builder import Split
from nfn_graph.tasks.zoo.folder import open_zoo_folder


@dataclass(frozen=True)
class PruneOptions:
    """Prune an initialisation before it is trained.

    Attributes:
        checkpoint: The initial weights, in any format that nfn-graph reads.
        run: The folder of a finished run of winning-tickets.
        out: The masked weights, with the keys and types of the checkpoint. The mask is written
            beside it: 1 where a weight is kept, as NAME.mask.SUFFIX.
        sparsity: The share of the weights to prune; by default that of the run's zoo.
        scope: Whether each layer keeps the number of weights that the model expects, or weights
            compete within the network, or within their layer.
        paths: Whether to keep only weights on a path from an input to an output, as far as
            possible, because others have no effect.
        biases: Whether to prune the same share of the biases, too. The smallest ones are pruned,
            because models only learn to choose weights.
        reading: The options for reading the file.
    """

    checkpoint: Positional[Path]
    run: Path
    out: Path
    sparsity: Annotated[float | None, unset("0..1")] = None
    scope: TicketScope = "expected"
    paths: bool = True
    biases: bool = False
    reading: Reading = field(default_factory=ReadingOptions)


def prune(options: Annotated[PruneOptions, arg(name="")]) -> int:
    """Prune an initialisation with a model from `nfn-graph train winning-tickets`.

    Examples:
      nfn-graph prune initial.pt --run runs/tickets --out sparse.pt
      nfn-graph prune initial.pt --run runs/tickets --out sparse.pt --sparsity 0.8 --scope layer

    Args:
        options: The options of the command.
    """
    task, model, facts = load_model(options.run)
    if not isinstance(task, WinningTickets):
        raise UserError(f"Expected a run of winning-tickets (got '{options.run}', of {task.name})")
    graph = load_file(options.checkpoint, options.reading)
    sparsity = facts["sparsity"] if options.sparsity is None else options.sparsity
    mask = mask_network(
        model, graph, sparsity, options.scope, paths=options.paths, biases=options.biases
    )
    masked = (graph.features() * mask.features()).to_graph()
    mask_path = options.out.with_suffix(f".mask{options.out.suffix}")
    save_like(masked, options.out, options.checkpoint)
    save_like(mask, mask_path, options.checkpoint)
    tensors = mask.to_tensors()
    kept = {key: tensors[key] != 0 for key in prunable(mask.layout)}
    number, count = sum(int(x.sum()) for x in kept.values()), sum(x.numel() for x in kept.values())
    dead = sum(int(x.sum()) for x in on_no_path(kept, graph).values())
    print(
        f"{options.out}: {number:,} of {count:,} weights are kept, {dead:,} of them on no path "
        f"from an input to an output\n{mask_path}: the mask"
    )
    return 0


@torch.no_grad()
def mask_network(
    model: nn.Module,
    graph: WeightGraph,
    sparsity: float,
    scope: TicketScope = "expected",
    *,
    paths: bool = True,
    biases: bool = False,
) -> WeightGraph:
    """Returns the mask that a trained model predicts for a network, as a graph of 0s and 1s.

    Args:
        model: An autoencoder of masks.
        graph: One network. Half precision is converted to single precision for the computation.
        sparsity: The share of the weights to prune, exactly.
        scope: See `ticket_from_scores`.
        paths: See `ticket_from_scores`.
        biases: Whether to prune the same share of every bias too, by magnitude.
    """
    raw = check_single(graph)
    scores = mask_scores(model.to(raw.dtype), raw.to_graph())[0]
    weights, own = prunable(graph.layout), graph.to_tensors()
    chosen = {key: scores[key] for key in weights}
    masks = ticket_from_scores(chosen, graph, sparsity, scope, paths=paths)
    # Tickets only mask weights, so no model has learned which biases to keep.
    sizes = {
        key: own[key].abs().unsqueeze(0)
        for key in prunable(graph.layout, biases)
        if key not in weights
    }
    if sizes:
        masks |= {k: x[0] for k, x in masks_from_scores(sizes, sparsity, "layer").items()}
    ones = {key: torch.ones_like(x) for key, x in own.items()}
    kept = {key: x.to(own[key].dtype) for key, x in masks.items()}
    return WeightGraph.from_placements(graph.layout, {**ones, **kept})


@dataclass(frozen=True)
class RetrainOptions:
    """Train initialisations under masks.

    Attributes:
        runs: Finished runs of winning-tickets.
        zoo: The zoo of tickets with the initialisations.
        networks: The number of initialisations, from the first on.
        split: The split of the zoo.
        data: The images of the zoo, if they have moved.
        out: The CSV file for the accuracies; by default none is written.
    """

    runs: Annotated[Positional[tuple[Path, ...]], unset("RUN ...")]
    zoo: Path
    networks: int = 10
    split: Split = "test"
    data: Annotated[str | None, unset("STR")] = None
    out: Annotated[Path | None, unset("PATH")] = None


def retrain(options: Annotated[RetrainOptions, arg(name="")]) -> int:
    """Train held-out initialisations under the masks of trained models and of baselines.

    Examples:
      nfn-graph retrain runs/np runs/pt --zoo zoos/tickets --networks 20 --out tickets.csv

    Args:
        options: The options of the command.
    """
    check_at_least("networks", options.networks, 1)
    zoo = open_zoo_folder(options.zoo)
    zoo = zoo.where(split=options.split, is_finite=True)[: options.networks]
    if not len(zoo):
        raise UserError(
            f"Expected networks of --split {options.split} in '{options.zoo}' (got none)"
        )
    images = None if options.data is None else open_images(options.data)
    results = compare_masks(options.runs, zoo, images=images)
    rows = [[r.name, r.mean, r.standard_error, len(r.accuracies)] for r in results]
    print_rows(Table(["mask", "test accuracy", "standard error", "networks"], rows))
    if options.out is not None:
        networks = zoo.column("network").to_pylist()
        found = (
            {"mask": result.name, "network": network, "test_accuracy": accuracy}
            for result in results
            for network, accuracy in zip(networks, result.accuracies, strict=True)
        )
        write_csv(options.out, list(found))
    return 0
