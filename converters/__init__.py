"""Converters turn networks into weight graphs, and back without loss.

This room reads modules, state dicts and checkpoint files, finds out which axes of which tensors
belong to the same neurons, and builds the `WeightGraph` that says so. It knows about file formats
and architectures so that the core need not; it uses the core and never the tasks.

    io, formats, files/         files: `load` and `save`, and a reader and a writer of each format
    module, pytorch/            modules: their computation is followed, in the words of `wiring/`
    state_dict, checkpoint      state dicts: what a checkpoint holds, to a graph and back
    layouts, chain/, families/  the layout of a state dict: that of `arch`, a chain or a transformer
    layout_changes, channels    tensors left out or turned, and further values of every weight
    onnx/, keras/               models of other libraries, in the same words
    wiring/                     which axes of which tensors belong to the same neurons
    conversion/, store/         many networks: converted side by side, kept in few files
    zoos/                       collections that others published
    commands, summary, draw     what the command line shows
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
