"""Opens a zoo in any of the known layouts, which is recognised by its files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.zoos.files import folders_in
from nfn_graph.converters.zoos.inr2vec import Inr2vecSource, is_inr2vec
from nfn_graph.converters.zoos.inrs import (
    DwsFashionSource,
    DwsMnistSource,
    NfnInrSource,
    is_dws_fashion,
    is_dws_mnist,
    is_nfn_inrs,
)
from nfn_graph.converters.zoos.model_zoos import ModelZooSource, is_model_zoo
from nfn_graph.converters.zoos.small_cnn import SmallCnnSource, is_small_cnn
from nfn_graph.converters.zoos.wild_park import WildParkSource, is_wild_park
from nfn_graph.converters.zoos.zoo import Zoo, ZooSource


class KnownLayout(NamedTuple):
    """A known layout: its name, and functions that recognise and open a folder."""

    name: str
    recognise: Callable[[Path], bool]
    source: Callable[[Path, Path | None], ZooSource]


LAYOUTS = (
    KnownLayout("Small CNN Zoo", is_small_cnn, SmallCnnSource),
    KnownLayout("DWSNets MNIST INRs", is_dws_mnist, DwsMnistSource),
    KnownLayout("DWSNets FashionMNIST INRs", is_dws_fashion, DwsFashionSource),
    KnownLayout("NFN INRs", is_nfn_inrs, NfnInrSource),
    KnownLayout("CNN Wild Park", is_wild_park, WildParkSource),
    KnownLayout("Model Zoos of Schürholt et al.", is_model_zoo, ModelZooSource),
    KnownLayout("inr2vec", is_inr2vec, Inr2vecSource),
)
# How many folders inside an unknown one are checked, to suggest the right one.
_MOST_HINTS = 20


def open_zoo(
    path: str | Path, *, split_file: str | Path | None = None, check_finite: bool = True
) -> Zoo:
    """Opens a published zoo, with its labels and the published splits.

    The layout is recognised by the files: the Small CNN Zoo, the INRs of DWSNets (MNIST and
    FashionMNIST) and of NFN, the CNN Wild Park, the Model Zoos of Schürholt et al., inr2vec.
    Nothing in a file is executed, and a network is read when it is accessed.

    Args:
        path: The zoo's folder.
        split_file: The file with the published splits or order, if it is not in the folder.
        check_finite: Whether a network with NaN or infinite weights is an error.

    Raises:
        FileNotFoundError: If the folder does not exist, or lacks a file of its layout.
        ConversionError: If its layout is unknown or a file is damaged; the message names the file.

    Example:
        >>> import pathlib, tempfile
        >>> import torch
        >>> from nfn_graph.converters import open_zoo
        >>> shapes = {"0.linear": (32, 2), "1.linear": (32, 32), "2": (1, 32)}
        >>> tensors = {f"net.{k}.weight": torch.randn(shape) for k, shape in shapes.items()}
        >>> tensors |= {f"net.{k}.bias": torch.randn(shape[0]) for k, shape in shapes.items()}
        >>> with tempfile.TemporaryDirectory() as folder:  # one INR as NFN publishes them, of a 7
        ...     file = pathlib.Path(folder, "randinit_smaller_7s", "net0.pth")
        ...     file.parent.mkdir()
        ...     torch.save(tensors, file)
        ...     zoo = open_zoo(folder)
        ...     print(zoo[0]["hidden1"].x.shape, zoo.row(0)["label"])
        torch.Size([32, 1, 1]) 7
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(
            f"Expected the folder of a zoo (got '{path}', which is not a folder)"
        )
    layout = recognised_layout(path)
    source = layout.source(path, None if split_file is None else Path(split_file))
    return Zoo(source, check_finite=check_finite)


def recognised_layout(path: Path) -> KnownLayout:
    """Returns the only layout that a folder fits."""
    found = [layout for layout in LAYOUTS if layout.recognise(path)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(layout.name for layout in LAYOUTS)
    if found:
        both = " and ".join(layout.name for layout in found)
        raise ConversionError(
            f"Expected one zoo in '{path}' (got files of {both}). Move them apart"
        )
    inside = [name for name in folders_in(path)[:_MOST_HINTS] if _is_known(path / name)]
    hint = f". Open '{path / inside[0]}'" if inside else ""
    got = "an empty folder" if not any(path.iterdir()) else "none of their files"
    raise ConversionError(
        f"Expected a zoo in one of the layouts {names} in '{path}' (got {got}){hint}"
    )


def _is_known(path: Path) -> bool:
    return any(layout.recognise(path) for layout in LAYOUTS)
