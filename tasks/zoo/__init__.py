"""Zoos: many small networks, trained at once and written as checkpoints with a table.

.. code-block:: python

    path = build_zoo(CnnZooOptions(out=Path("zoo"), networks=500, widths=(8, 16, 32)))
    zoo = open_zoo_folder(path)  # a WeightDataset
    zoo.table            # a pyarrow table, one row per checkpoint
    zoo[0]               # a WeightGraph
"""

from nfn_graph.tasks.zoo.builder import build_zoo
from nfn_graph.tasks.zoo.cnn import CnnZooOptions
from nfn_graph.tasks.zoo.folder import open_zoo_folder
from nfn_graph.tasks.zoo.inr import InrZooOptions
from nfn_graph.tasks.zoo.render import render_networks, render_zoo
from nfn_graph.tasks.zoo.tickets import TicketZooOptions
from nfn_graph.tasks.zoo.transformer import TransformerZooOptions

__all__ = [
    "CnnZooOptions",
    "InrZooOptions",
    "TicketZooOptions",
    "TransformerZooOptions",
    "build_zoo",
    "open_zoo_folder",
    "render_networks",
    "render_zoo",
]
