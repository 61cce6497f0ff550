"""Converts files to graphs and back: `load` and `save`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nfn_graph import WeightGraph
from nfn_graph.converters.chain import FlattenOrder
from nfn_graph.converters.channels import WEIGHTS
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.families import heads_beside
from nfn_graph.converters.files.checks import check_path
from nfn_graph.converters.files.graph import write_graph
from nfn_graph.converters.formats import SAFETENSORS, ReadingHints, detect, format_of
from nfn_graph.converters.layout_changes import Orientation
from nfn_graph.converters.layouts import layout_of
from nfn_graph.converters.state_dict import from_state_dict, to_state_dict, without


def load(
    path: str | Path,
    *,
    arch: nn.Module | None = None,
    flatten: FlattenOrder | None = None,
    orientation: Orientation | None = None,
    key: str | None = None,
    activation: str | None = None,
    heads: int | None = None,
    example_input: Any = None,
    safe_globals: Sequence[str] = (),
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> WeightGraph:
    """Reads the graph of a network from a PyTorch, safetensors, npz, ONNX, Keras or graph file.

    The content determines the format. Nothing in a file is executed. No other file is read, except
    a `config.json` beside it for the number of attention heads. Large PyTorch and safetensors files
    stay mapped into memory.

    Args:
        path: The file.
        arch: The network as a module, for files whose keys and shapes do not determine its
            topology. It may be on the meta device. Keras layers are matched to its layers in order.
            ONNX files contain their topology and do not need it.
        flatten: The order of the entries between a convolution and a dense layer, for files that do
            not contain it.
        orientation: The axis order of weights, for files that do not contain it: `[out, in, ...]`
            (`"out_in"`) or `[..., in, out]` (`"in_out"`); see :func:`from_state_dict`.
        key: The name of the network in a file that holds several; see :func:`from_state_dict`.
        activation: The function between the layers, for chains of linear layers in files that do
            not contain it; see :func:`from_state_dict`.
        heads: The number of attention heads of a well-known transformer; by default it is read from
            a `config.json` beside the file.
        example_input: An input of the network, for networks whose topology depends on its shape;
            see :func:`from_state_dict`. For an ONNX file, it determines the sizes that the file
            leaves open.
        safe_globals: Names of classes and functions that a PyTorch file may use in addition to
            those that torch allows, such as `"numpy.dtype"`; see
            :func:`torch.serialization.safe_globals`. Reading the file calls them, so name only what
            you trust.
        only: Patterns such as `"encoder.*"`. Tensors whose keys match none of them are left out of
            the graph and carried along, so that they can be restored. By default all tensors are
            used.
        exclude: Patterns of tensors to leave out, such as `"*embeddings*"`.

    Raises:
        FileNotFoundError: If the file does not exist.
        ConversionError: If the file holds no network that has a graph; the message gives the
            reason.
        ModuleNotFoundError: If the package for its format is not installed.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> from nfn_graph.converters import from_module, load, save
        >>> network = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(from_module(network), f"{folder}/network.safetensors")
        ...     graph = load(f"{folder}/network.safetensors")
        >>> graph["hidden1"].x.shape
        torch.Size([4, 1, 1])
    """
    path = Path(path)
    format_, opened = detect(path)
    hints = ReadingHints(arch, flatten, example_input, safe_globals)
    try:
        found = (format_.load or format_.read)(opened, hints)
        if isinstance(found, WeightGraph):
            return without(found, only, exclude)
        return from_state_dict(
            found,
            arch=arch,
            flatten=flatten,
            orientation=orientation,
            key=key,
            activation=activation,
            heads=heads_beside(path, heads),
            example_input=example_input,
            only=only,
            exclude=exclude,
        )
    except ConversionError as error:
        if str(path) in str(error):
            raise
        raise ConversionError(f"'{path}': {error}") from error


def read_tensors(path: str | Path) -> Mapping[str, Any]:
    """Returns the named tensors of a file as stored; those of PyTorch files may be nested."""
    format_, opened = detect(path)
    return format_.read(opened, ReadingHints())


def save(
    graph: WeightGraph,
    path: str | Path,
    *,
    template: str | Path | None = None,
    channel: str | None = None,
    as_graph: bool = False,
) -> None:
    """Writes the tensors that a graph was made from, in the format of the path's suffix.

    The file is written completely or not at all. If the graph was loaded from a file of the same
    format, the tensors are equal bit for bit; keys, order and types are kept in all formats. In
    Keras files, kernels of a PyTorch network are written with Keras's names and axis order.

    Args:
        graph: A graph of one network.
        path: The file, such as `x.pt`, `x.safetensors` or `x.onnx`.
        template: A file of the same format from which everything else is copied: the operations of
            an ONNX model or the configuration of a Keras model. `.onnx` and `.keras` files require
            one.
        channel: The channel to write if the graph has several: the name of one of them, or
            `"weights"`.
        as_graph: Whether to write the graph itself, with its layout and all channels, into a
            `.safetensors` file, which :func:`load` reads back.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torch import nn
        >>> from nfn_graph.converters import from_module, save
        >>> network = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(from_module(network), f"{folder}/network.pt")
        ...     list(torch.load(f"{folder}/network.pt"))
        ['0.weight', '0.bias', '2.weight', '2.bias']
    """
    path = Path(path)
    format_ = format_of(path)
    if template is not None and not format_.has_template:
        raise ConversionError(
            f"Expected no template for a '{path.suffix}' file, which contains only tensors "
            f"(got '{template}')"
        )
    if as_graph:
        if format_ is not SAFETENSORS or channel is not None:
            raise ConversionError(
                f"Expected a '.safetensors' file for a graph with all its channels (got '{path}' "
                f"and channel {channel!r})"
            )
        write_graph(path, graph)
        return
    names = list(layout_of(graph).channels)
    if names and channel is None:
        raise ConversionError(
            f"Expected channel=... for '{path}', which holds one value per weight (got a graph "
            f"with the channels {[WEIGHTS, *names]}). Save one of them, or all of them with "
            f"as_graph=True"
        )
    model = None if template is None else check_path(template)
    values = to_state_dict(graph, channel)
    for key, value in values.items():
        if not isinstance(value, Tensor) and not format_.holds_objects:
            raise ConversionError(
                f"Expected tensors only for a '{path.suffix}' file (got '{key}', which is "
                f"{type(value).__name__}). Save to .pt."
            )
    format_.write(graph, path, values, model)
