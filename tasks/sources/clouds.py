"""Point clouds of labelled shapes, centred and scaled into the unit ball; and distances to them.

Sources: an `.npz` file with the arrays `points` `[shapes, points, 3]` and `label` or `labels`
(and, for the split, a bool array `train` or `is_test`), or a folder of `.off` or `.ply` files:
`class/file`, or `class/train/file` and `class/test/file` as in ModelNet.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nfn_graph.messages import UserError
from nfn_graph.tasks.sources.image_files import read_arrays, read_labels
from nfn_graph.tasks.sources.images import Labelled, SourceError, every_fifth, numbered_classes
from nfn_graph.tasks.sources.meshes import Mesh, read_off, read_ply

_READERS = {".off": read_off, ".ply": read_ply}
# The shares of points near the surface and farther away, with the noise of each. The rest is
# uniform over the cube.
_NEAR = ((0.5, 0.02), (0.25, 0.1))


@dataclass(frozen=True, eq=False)
class Clouds(Labelled):
    """Point clouds with labels and a split.

    Args:
        name: The origin of the data, for metadata and messages.
        points: `[count, points, 3]`, float32, each shape within the unit ball.
        labels: The class of each, `[count]`, int64.
        is_test: Whether each belongs to the test split, `[count]`, bool.
        classes: The names of the classes.

    Example:
        >>> import torch
        >>> from nfn_graph.tasks.sources import Clouds
        >>> points = torch.nn.functional.normalize(torch.randn(2, 64, 3), dim=-1)
        >>> labels, is_test = torch.tensor([0, 0]), torch.tensor([False, True])
        >>> Clouds("spheres", points, labels, is_test, ("sphere",)).name
        'spheres'
    """

    name: str
    points: Tensor
    labels: Tensor
    is_test: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.points.dim() != 3 or self.points.shape[2] != 3 or 0 in self.points.shape:
            raise SourceError(
                f"Expected point clouds [shapes, points, 3] in '{self.name}' "
                f"(got shape {list(self.points.shape)})"
            )
        self.check_labels()
        if not self.points.isfinite().all():
            raise SourceError(f"Expected finite points in '{self.name}' (got infinity or NaN)")

    @property
    def content(self) -> Tensor:
        """The points."""
        return self.points


def open_clouds(source: str | Path, *, num_points: int = 1024) -> Clouds:
    """Reads point clouds from local files; nothing is downloaded.

    Args:
        source: An `.npz` file, or a folder with a subfolder of `.off` or `.ply` files for each
            class.
        num_points: The number of points to sample from a mesh, or to keep of a cloud at most.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from nfn_graph.tasks.sources import open_clouds
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     points, labels = np.random.randn(10, 64, 3).astype("f4"), np.arange(10) % 2
        ...     np.savez(f"{folder}/clouds.npz", points=points, labels=labels)
        ...     clouds = open_clouds(f"{folder}/clouds.npz", num_points=32)
        >>> clouds.points.shape
        torch.Size([10, 32, 3])
    """
    path = Path(source)
    if path.is_dir():
        return _read_folder(path, num_points)
    if not path.exists():
        raise FileNotFoundError(
            f"Expected point clouds in '{source}': an .npz file with 'points' and 'labels', or "
            f"a folder with a subfolder of .off or .ply files for each class (got nothing "
            f"there). Nothing is downloaded: put the files of the dataset there."
        )
    if path.suffix.lower() != ".npz":
        raise SourceError(
            f"Expected an .npz file or a folder of .off or .ply files (got '{source}')"
        )
    return _read_npz(path, num_points)


def sample_surface(mesh: Mesh, num_points: int, seed: int) -> np.ndarray:
    """Samples points uniformly from the triangles, or from the vertices if there are none."""
    vertices, triangles = mesh
    draws = np.random.default_rng(seed)
    if not len(triangles):
        return vertices[draws.choice(len(vertices), num_points, len(vertices) < num_points)]
    a, b, c = (vertices[triangles[:, i]] for i in range(3))
    areas = np.linalg.norm(np.cross(b - a, c - a), axis=1)
    if not areas.sum() > 0:
        return vertices[draws.choice(len(vertices), num_points)]
    chosen = draws.choice(len(triangles), num_points, p=areas / areas.sum())
    u, v = draws.random((2, num_points, 1))
    u, v = np.where(u + v > 1, 1 - u, u), np.where(u + v > 1, 1 - v, v)
    points: np.ndarray = a[chosen] + u * (b - a)[chosen] + v * (c - a)[chosen]
    return points


def normalise(points: Tensor) -> Tensor:
    """Clouds `[..., points, 3]` centred at their mean, the farthest point at distance 1."""
    centred = points - points.mean(-2, keepdim=True)
    radius = centred.norm(dim=-1).amax(-1)[..., None, None]
    return centred / radius.clamp(min=torch.finfo(points.dtype).tiny)


def _read_npz(path: Path, num_points: int) -> Clouds:
    arrays = read_arrays(path)
    key = "labels" if "labels" in arrays else "label"
    if "points" not in arrays or key not in arrays:
        raise SourceError(
            f"Expected the arrays 'points' and 'labels' in '{path}' (got {sorted(arrays)})"
        )
    points, labels = arrays["points"], read_labels(path, key, arrays[key])
    if points.ndim != 3 or points.shape[2] != 3 or points.dtype.kind != "f" or not points.size:
        raise SourceError(
            f"Expected 'points' of '{path}' as numbers [shapes, points, 3] (got "
            f"{list(points.shape)} of {points.dtype})"
        )
    if "is_test" in arrays:
        is_test = torch.from_numpy(arrays["is_test"].astype(bool))
    elif "train" in arrays:
        is_test = torch.from_numpy(~arrays["train"].astype(bool))
    else:
        is_test = every_fifth(torch.arange(len(points)))
    cloud = torch.from_numpy(points[:, :num_points].astype(np.float32))
    return Clouds(str(path), normalise(cloud), labels, is_test, numbered_classes(labels))


def _read_folder(folder: Path, num_points: int) -> Clouds:
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in _READERS)
    if not paths:
        raise SourceError(f"Expected .off or .ply files in '{folder}' (got none)")
    loose = [p for p in paths if p.parent == folder]
    if loose:
        raise SourceError(
            f"Expected a subfolder of .off or .ply files for each class in '{folder}' (got "
            f"'{loose[0].name}' outside of all subfolders)"
        )
    classes = sorted({p.relative_to(folder).parts[0] for p in paths})
    points, labels = [], []
    is_test = every_fifth(torch.arange(len(paths)))
    for number, path in enumerate(paths):
        parts = path.relative_to(folder).parts
        points.append(sample_surface(_READERS[path.suffix.lower()](path), num_points, number))
        labels.append(classes.index(parts[0]))
        if len(parts) > 2:
            is_test[number] = parts[1] == "test"
    cloud = torch.from_numpy(np.stack(points).astype(np.float32))
    return Clouds(str(folder), normalise(cloud), torch.tensor(labels), is_test, tuple(classes))


class DistanceSamples(NamedTuple):
    """Points `[shapes, points, 3]` within [-1, 1] and their distances `[shapes, points, 1]`.

    Example:
        >>> import torch
        >>> from nfn_graph.tasks.sources import DistanceSamples
        >>> DistanceSamples(torch.zeros(1, 5, 3), torch.zeros(1, 5, 1)).points.shape
        torch.Size([1, 5, 3])
    """

    points: Tensor
    distances: Tensor


def sample_distances(clouds: Tensor, num_points: int, seeds: list[int]) -> DistanceSamples:
    """Samples points around shapes, half of them close to the surface.

    Args:
        clouds: Points of the shapes, `[shapes, points, 3]`.
        num_points: The number of points per shape.
        seeds: One seed per shape, so that its points do not depend on the other shapes.

    Example:
        >>> import torch
        >>> from nfn_graph.tasks.sources import sample_distances
        >>> found = sample_distances(torch.randn(2, 64, 3) / 4, num_points=100, seeds=[0, 1])
        >>> found.points.shape, found.distances.shape
        (torch.Size([2, 100, 3]), torch.Size([2, 100, 1]))
    """
    if len(seeds) != len(clouds):
        raise UserError(f"Expected a seed for each of {len(clouds)} shapes (got {len(seeds)})")
    points, distances = [], []
    for cloud, seed in zip(clouds, seeds, strict=True):
        generator = torch.Generator().manual_seed(seed)
        drawn = _draw(cloud, num_points, generator)
        points.append(drawn)
        distances.append(torch.cdist(drawn, cloud).amin(1, keepdim=True))
    return DistanceSamples(torch.stack(points), torch.stack(distances))


def _draw(cloud: Tensor, num_points: int, generator: torch.Generator) -> Tensor:
    parts = []
    for share, noise in _NEAR:
        count = int(num_points * share)
        chosen = cloud[torch.randint(len(cloud), (count,), generator=generator)]
        parts.append(chosen + noise * torch.randn(count, 3, generator=generator))
    rest = num_points - sum(len(p) for p in parts)
    parts.append(torch.rand(rest, 3, generator=generator) * 2 - 1)
    return torch.cat(parts).clamp(-1, 1).to(cloud.dtype)
