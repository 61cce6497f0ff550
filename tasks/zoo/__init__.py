"""Zoos: many small networks, trained at once and written as checkpoints with a table.

.. code-block:: python

    path = build_cnn_zoo(CnnZooOptions(out=Path("zoo"), networks=500, widths=(8, 16, 32)))
    zoo = open_zoo_folder(path)  # a WeightDataset
    zoo.table            # a pyarrow table, one row per checkpoint
    zoo[0]               # a WeightGraph
"""

from nfn_graph.tasks.zoo.cnn import CnnZooOptions, build_cnn_zoo
from nfn_graph.tasks.zoo.folder import open_zoo_folder
from nfn_graph.tasks.zoo.inr import InrZooOptions, build_inr_zoo
from nfn_graph.tasks.zoo.render import render_networks, render_zoo
from nfn_graph.tasks.zoo.tickets import TicketZooOptions, build_ticket_zoo
from nfn_graph.tasks.zoo.transformer import TransformerZooOptions, build_transformer_zoo

__all__ = [
    "CnnZooOptions",
    "InrZooOptions",
    "TicketZooOptions",
    "TransformerZooOptions",
    "build_cnn_zoo",
    "build_inr_zoo",
    "build_ticket_zoo",
    "build_transformer_zoo",
    "open_zoo_folder",
    "render_networks",
    "render_zoo",
]
