"""Drawing SIRENs back: pictures of images, and of shapes seen along an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nfn_graph import WeightGraph
from nfn_graph.converters import WeightDataset
from nfn_graph.converters.errors import require
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.data import Layout
from nfn_graph.messages import UserError
from nfn_graph.tasks.option_checks import check_at_least
from nfn_graph.tasks.zoo.siren import pixel_grid, voxel_grid

_VOXELS = 48
_GAP = 2


def render_graphs(graph: WeightGraph, size: tuple[int, int]) -> Tensor:
    """The images that SIRENs hold, differentiable in their weights.

    Args:
        graph: One network or a batch, of any widths and depths, which can be run. With several
            channels, each holds the weights of a network, and the image is the mean of their
            images.
        size: Height and width of the images.

    Returns:
        `[networks, outputs, height, width]`.
    """
    grid = pixel_grid(*size, torch.float64).mT
    channels = graph.features().channels
    shown = [_channel(graph, c) if channels > 1 else graph for c in range(channels)]
    values: Tensor = sum(own.run(grid) for own in shown) / channels
    if isinstance(graph.layout, Layout):
        values = values.unsqueeze(0)
    return values.mT.unflatten(-1, size)


def _channel(graph: WeightGraph, channel: int) -> WeightGraph:
    """The graph of the network that is one channel of a graph."""
    return graph.features().map(lambda x: x[..., channel : channel + 1]).to_graph()


@torch.no_grad()
def render_networks(
    zoo: WeightDataset, indices: Sequence[int], size: tuple[int, int] | None = None
) -> Tensor:
    """Renders networks of an INR zoo as pictures `[networks, channels, height, width]`.

    Args:
        zoo: A zoo of INRs; widths and depths may differ.
        indices: The networks.
        size: Height and width; by default those of the images that they were fitted to. A
            shape is drawn as the smallest distance along each line of sight.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.zoo import InrZooOptions, build_zoo, open_zoo_folder
        >>> from nfn_graph.tasks.zoo import render_networks
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     options = InrZooOptions(Path(folder), images=4, test_images=2, widths=(4,), steps=2)
        ...     zoo = open_zoo_folder(build_zoo(options))
        ...     print(render_networks(zoo, [0, 1]).shape)
        torch.Size([2, 1, 8, 8])
    """
    kind = zoo.description["kind"]
    if kind != "inr":
        raise UserError(f"Expected a zoo of INRs (got '{zoo.folder}', a zoo of kind '{kind}')")
    is_image = zoo.description["signal"] == "image"
    pictures = []
    for i in indices:
        if is_image:
            height, width = size or zoo.description["image_shape"][1:]
            pictures.append(render_graphs(zoo[i], (height, width))[0])
        else:
            found = zoo[i].run(voxel_grid(_VOXELS, torch.float64).mT)
            nearest = found.mT.unflatten(-1, (_VOXELS,) * 3).amin(2)
            # Seen from the side, upright, dark where the shape is.
            pictures.append((nearest * 4).clamp(0, 1).transpose(1, 2).flip(1))
    return torch.stack(pictures)


def draw_sheet(pictures: Tensor, path: Path, columns: int | None = None, zoom: int = 1) -> None:
    """Writes pictures `[count, channels, height, width]` within [0, 1] as one PNG."""
    pillow = require("PIL.Image", "to draw pictures", "tasks")
    count, channels, height, width = pictures.shape
    if channels not in (1, 3):
        raise UserError(f"Expected pictures of one or three channels (got {channels})")
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    shown = (pictures.detach().cpu().clamp(0, 1) * 255).round().to(torch.uint8)
    shown = shown.repeat_interleave(zoom, 2).repeat_interleave(zoom, 3)
    height, width = height * zoom + _GAP, width * zoom + _GAP
    sheet = torch.full((channels, rows * height + _GAP, columns * width + _GAP), 255).byte()
    for i, picture in enumerate(shown):
        top, left = i // columns * height + _GAP, i % columns * width + _GAP
        sheet[:, top : top + height - _GAP, left : left + width - _GAP] = picture
    array = sheet.permute(1, 2, 0).numpy()
    image = pillow.fromarray(array.squeeze(2) if channels == 1 else array)
    with replacing(Path(path)) as temporary:
        image.save(temporary, format="PNG")


def render_zoo(zoo: WeightDataset, path: str | Path, *, count: int = 64, zoom: int = 3) -> Path:
    """Renders the first networks of a zoo into one PNG file.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.zoo import InrZooOptions, build_zoo, open_zoo_folder, render_zoo
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     options = InrZooOptions(Path(folder), images=4, test_images=2, widths=(4,), steps=2)
        ...     zoo = open_zoo_folder(build_zoo(options))
        ...     print(render_zoo(zoo, Path(folder, "sheet.png"), count=4).name)
        sheet.png
    """
    check_at_least("count", count, 1)
    check_at_least("zoom", zoom, 1)
    pictures = render_networks(zoo, range(min(count, len(zoo))))
    draw_sheet(pictures, Path(path), zoom=zoom)
    return Path(path)
