"""The command `nfn-graph edit`: applies a trained editor to a user's network."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from tyro.conf import Positional, arg

from nfn_graph import WeightGraph
from nfn_graph.converters import save
from nfn_graph.converters.commands import Reading, ReadingOptions
from nfn_graph.converters.conversion import load_file
from nfn_graph.data import Layout, Placement
from nfn_graph.messages import UserError
from nfn_graph.spec import Key
from nfn_graph.tasks.edit_inr import EditInr, pictures
from nfn_graph.tasks.option_checks import check_above, check_at_least
from nfn_graph.tasks.training.run import load_model
from nfn_graph.tasks.user_networks import check_sines, check_single, save_like
from nfn_graph.tasks.zoo.render import draw_sheet
from nfn_graph.tasks.zoo.siren import siren_layers


@dataclass(frozen=True)
class EditOptions:
    """Edit the image that a SIREN holds.

    Attributes:
        checkpoint: The network, in any format that nfn-graph reads. It must follow the
            conventions of the zoo that the model was trained on, which its store.json states.
        w0: The factor of the network's sines, sin(w0 * (W x + b)). Weights alone reveal neither
            that a network is a SIREN nor its factor, which is 30 in zoos of nfn-graph unless they
            were built with another --w0.
        run: The folder of a finished run of edit-inr.
        out: The edited network, with the keys and types of the checkpoint. Its hidden layers are
            wider if the run has an --ensemble. A picture of before and after is written beside it,
            as .png.
        zoom: The width of a pixel of the picture, in pixels of the file.
        reading: The options for reading the file.
    """

    checkpoint: Positional[Path]
    w0: float
    run: Path
    out: Path
    zoom: int = 8
    reading: Reading = field(default_factory=ReadingOptions)


def edit(options: Annotated[EditOptions, arg(name="")]) -> int:
    """Edit the image that a SIREN holds, with a model from `nfn-graph train edit-inr`.

    Examples:
      nfn-graph edit digit.pt --w0 30 --run runs/dilate --out thicker.pt

    Args:
        options: The options of the command.
    """
    check_at_least("zoom", options.zoom, 1)
    check_above("w0", options.w0, 0)
    picture = options.out.with_suffix(".png")
    task, model, facts = load_model(options.run)
    if not isinstance(task, EditInr):
        raise UserError(f"Expected a run of edit-inr (got '{options.run}', of {task.name})")
    graph = load_file(options.checkpoint, options.reading)
    check_sines(options.checkpoint)
    edited, before, after = edit_network(task, model, graph, options.w0, facts)
    if task.options.ensemble > 1:
        save(edited, options.out)  # The layers are wider than those of the checkpoint.
    else:
        save_like(edited, options.out, options.checkpoint)
    draw_sheet(torch.cat([before, after]), picture, columns=2, zoom=options.zoom)
    error = float((after - edited.y).square().mean())
    unedited = float((before - edited.y).square().mean())
    print(
        f"{options.out}: {task.options.operation}, mean squared error {error:.4g} (before the "
        f"edit {unedited:.4g})\n{picture}: before and after"
    )
    return 0


@torch.no_grad()
def edit_network(
    task: EditInr, model: torch.nn.Module, graph: WeightGraph, w0: float, facts: dict[str, Any]
) -> tuple[WeightGraph, Tensor, Tensor]:
    """Returns one network after the edit, and its picture before and after.

    Args:
        task: The task of a run.
        model: The trained model of the run.
        graph: The network. The result has its precision, but half precision is converted to
            single precision for the computation.
        w0: The factor of its sines.
        facts: The stored facts about the zoo that the run was trained on.
    """
    raw = check_single(graph)
    last, known = siren_layers(graph.spec)[-1][2], facts["image_shape"][0]
    if graph.layout.num_rows(last) != known:
        raise UserError(
            f"Expected an INR with {known} neuron(s) of type '{last}', as in the networks that the "
            f"model was trained on (got {graph.layout.num_rows(last)})"
        )
    model = model.to(raw.dtype)
    prepared = task.placed(raw.to_graph(), w0, facts["output_offset"], facts)
    edited: WeightGraph = model(prepared)
    if task.options.ensemble > 1:
        edited = joined_networks(edited)
    return edited, pictures(prepared), pictures(edited)


def joined_networks(graph: WeightGraph) -> WeightGraph:
    r"""Joins several SIRENs, the channels of a graph, into one that shows the mean of their images.

    .. math:: \frac{1}{k} \sum_{c=1}^k f_c(x)

    The hidden neurons of all networks are concatenated, so the layers are `k` times as wide and
    block diagonal; the last weights are divided by `k`, the last biases are averaged. The result is
    an ordinary network with the original tensor names.

    Args:
        graph: One network (not a batch) with a channel for each of the networks to join.
    """
    layout = graph.layout
    if not isinstance(layout, Layout):
        raise TypeError("Expected one network (got a batch; take batch[i] of it)")
    siren_layers(layout.spec)
    if any(p.view != p.shape or not p.is_whole for p in layout.placements):
        raise UserError("Expected tensors that hold one whole layer each (got parts of layers)")
    raw = graph.features()
    count, free = raw.channels, {n.name for n in layout.spec.neurons if not n.fixed}
    stores: dict[Key, Tensor] = {}
    for name, x in raw.neurons.items():
        joined = x.movedim(-1, 0).flatten(0, 1) if name in free else x.mean(-1)
        stores[name] = joined.unsqueeze(-1)
    for key, x in raw.weights.items():
        blocks = x.movedim(-1, 0).reshape(count, layout.num_rows(key[2]), layout.num_rows(key[0]))
        if key[0] not in free:
            weight = blocks.flatten(0, 1) if key[2] in free else blocks.mean(0)
        elif key[2] in free:
            weight = torch.block_diag(*blocks)
        else:
            weight = blocks.transpose(0, 1).flatten(1) / count
        stores[key] = weight.reshape(-1, 1, 1)
    sizes = zip(layout.spec.neurons, layout.shape.sizes, strict=True)
    shape = layout.shape._replace(
        sizes=tuple(tuple(n * (count if t.name in free else 1) for n in own) for t, own in sizes)
    )
    placements = tuple(_widened(p, free, count) for p in layout.placements)
    return graph.rebuilt(replace(layout, shape=shape, placements=placements, before=None), stores)


def _widened(placement: Placement, free: set[str], count: int) -> Placement:
    """The placement of a tensor whose hidden layers have more neurons."""
    store = placement.store
    ends = {"neuron": store, "source": store[0], "target": store[-1]}
    shape = tuple(
        n * (count if ends.get(axis) in free else 1)
        for n, axis in zip(placement.shape, placement.axes, strict=True)
    )
    return replace(placement, shape=shape, view=shape, stop=shape)
