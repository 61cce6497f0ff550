"""Converters turn networks into weight graphs, and back without loss.

This room reads modules, state dicts and checkpoint files, finds out which axes of which tensors
belong to the same neurons, and builds the `WeightGraph` that records it. It handles file formats
and architectures so that the core need not; it uses the core and never the tasks.

    io, formats, files/         files: `load` and `save`, and a reader and a writer for each format
    module, pytorch/            modules, whose computation is followed with the methods of `wiring/`
    state_dict, checkpoint      state dicts: finding them in a checkpoint, to a graph and back
    layouts, chain/, families/  the layout of a state dict: from `arch`, a chain or a transformer
    layout_changes, channels    excluded or transposed tensors, and further values of every weight
    onnx/, keras/               models of other libraries, followed with the same methods
    wiring/                     which axes of which tensors belong to the same neurons
    conversion/, store/         many networks, converted in parallel and kept in few files
    zoos/                       published collections of networks
    commands, summary, draw     commands, tables and pictures
"""

from nfn_graph.converters.conversion.converting import build_store
from nfn_graph.converters.draw import draw
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.io import load, save
from nfn_graph.converters.module import from_module
from nfn_graph.converters.pytorch.handling import handles
from nfn_graph.converters.state_dict import from_state_dict, to_module, to_state_dict
from nfn_graph.converters.store.dataset import WeightDataset
from nfn_graph.converters.summary import summary
from nfn_graph.converters.zoos import open_zoo

__all__ = [
    "ConversionError",
    "WeightDataset",
    "build_store",
    "draw",
    "from_module",
    "from_state_dict",
    "handles",
    "load",
    "open_zoo",
    "save",
    "summary",
    "to_module",
    "to_state_dict",
]
