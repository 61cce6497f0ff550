"""The command `nfn-graph edit`: a trained editor at work on a user's network."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tyro.conf import OmitArgPrefixes, Positional

from nfn_graph import WeightGraph
from nfn_graph.converters import save
from nfn_graph.converters.commands import ReadingOptions
from nfn_graph.converters.conversion import load_file
from nfn_graph.messages import UserError
from nfn_graph.tasks.edit_inr import EditInr, pictures
from nfn_graph.tasks.option_checks import check_above, check_at_least
from nfn_graph.tasks.rendering import joined_networks, siren_layers
from nfn_graph.tasks.training.run import load_model
from nfn_graph.tasks.user_networks import (
    check_sines,
    check_single,
    save_like,
)
from nfn_graph.tasks.zoo.render import draw_sheet


@dataclass(frozen=True)
class EditOptions:
    """Edit the image that a SIREN holds.

    Attributes:
        checkpoint: The network, in any format that nfn-graph reads. It must follow the
            conventions of the zoo that the model was trained on, which its store.json states.
        w0: The factor of the network's sines, sin(w0 * (W x + b)). Weights alone do not say that a
            network is a SIREN, nor its factor, which is 30 in zoos of nfn-graph unless --w0 was
            given there.
        run: The folder of a finished run of edit-inr.
        out: The edited network, with the keys and types of the checkpoint. Its hidden layers are
            wider if the run has an --ensemble. A picture of before and after is written beside it,
            as .png.
        zoom: How many pixels wide each pixel of the picture is drawn.
        reading: How the file is read.
    """

    checkpoint: Positional[Path]
    w0: float
    run: Path
    out: Path
    zoom: int = 8
    reading: ReadingOptions = field(default_factory=ReadingOptions)


def edit(options: OmitArgPrefixes[EditOptions]) -> int:
    """Edit the image that a SIREN holds, with a model that `nfn-graph train edit-inr` gave.

    Examples:
      nfn-graph edit digit.pt --w0 30 --run runs/dilate --out thicker.pt

    Args:
        options: What to edit.
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
        save(edited, options.out)  # The checkpoint is no template for wider layers.
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
    task: EditInr,
    model: torch.nn.Module,
    graph: WeightGraph,
    w0: float,
    facts: dict[str, Any],
) -> tuple[WeightGraph, Tensor, Tensor]:
    """One network after the edit, and its picture before and after.

    Args:
        task: The task of a run.
        model: Its model.
        graph: The network; its own precision is kept, half precision is computed in single.
        w0: The factor of its sines.
        facts: What the run knows about the zoo that it was trained on.
    """
    raw = check_single(graph)
    last, known = siren_layers(graph.spec)[-1][2], facts["image_shape"][0]
    if graph.layout.num_rows(last) != known:
        raise UserError(
            f"Expected an INR with {known} neuron(s) of type '{last}', as those that the model "
            f"was trained on (got {graph.layout.num_rows(last)})"
        )
    model = model.to(raw.dtype)
    prepared = task.placed(raw.to_graph(), w0, facts["output_offset"], facts)
    edited: WeightGraph = model(prepared)
    if task.options.ensemble > 1:
        edited = joined_networks(edited)
    return edited, pictures(prepared), pictures(edited)
