"""A small world for commands: a checkpoint, a store, zoos of every kind, and runs of every use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from siren_data import blobs
from zoo_data import tiny_images

from nfn_graph.converters import from_module
from nfn_graph.converters.conversion import Options, convert_files
from nfn_graph.converters.store import StoreWriter
from nfn_graph.tasks.edit_inr import EditInr, EditInrOptions
from nfn_graph.tasks.regress import Regress, RegressOptions
from nfn_graph.tasks.training import train
from nfn_graph.tasks.winning_tickets import WinningTickets, WinningTicketsOptions
from nfn_graph.tasks.zoo import (
    CnnZooOptions,
    InrZooOptions,
    TicketZooOptions,
    build_zoo,
    open_zoo_folder,
)


def make_world(folder: Path) -> None:
    """Writes all of it in a few seconds.

    net.pt, store/        an MLP, and a store with it
    x.npy                 inputs of the MLP
    siren.pt, initial.pt  an INR and an initialisation, of the zoos inr/ and tickets/
    cnn/, inr/, tickets/  zoos
    edits/, masks/        finished runs on the last two
    labels/               a finished run on networks such as net.pt
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    torch.save(model.state_dict(), folder / "net.pt")
    np.save(folder / "x.npy", np.ones((2, 3), dtype=np.float32))
    convert_files([folder / "net.pt"], folder / "store", Options())
    images = tiny_images()
    shares = {"validation_share": 0.3, "test_share": 0.3}
    build_zoo(
        CnnZooOptions(
            folder / "cnn", networks=10, widths=(3,), depths=(1,), epochs=(1, 1), **shares
        ),
        source=images,
    )
    build_zoo(InrZooOptions(folder / "inr", widths=(4,), steps=2), source=blobs(16))
    build_zoo(
        TicketZooOptions(folder / "tickets", networks=10, widths=(4,), epochs=1, **shares),
        source=images,
    )
    editing = EditInrOptions(folder / "inr", folder / "edits", preset="tiny", epochs=1)
    train(EditInr(editing.resolved()))
    tickets = WinningTicketsOptions(folder / "tickets", folder / "masks", preset="tiny", epochs=1)
    train(WinningTickets(tickets.resolved()))
    networks = [({"y": float(i % 4)}, from_module(model)) for i in range(12)]
    StoreWriter(folder / "labelled", {}).publish("all", networks)
    train(
        Regress(
            RegressOptions(
                folder / "labelled", folder / "labels", label="y", preset="tiny", epochs=1
            )
        )
    )
    for zoo, name in (("inr", "siren.pt"), ("tickets", "initial.pt")):
        torch.save(open_zoo_folder(folder / zoo).state_dict(0), folder / name)
