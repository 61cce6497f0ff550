"""Which reader a source of images needs."""

from __future__ import annotations

from pathlib import Path

from nfn_graph.tasks.sources.cifar import has_cifar, read_cifar_folder
from nfn_graph.tasks.sources.digits import read_digits
from nfn_graph.tasks.sources.folder import read_image_folder
from nfn_graph.tasks.sources.idx import has_idx, read_idx_folder
from nfn_graph.tasks.sources.images import Images
from nfn_graph.tasks.sources.labelled import SourceError
from nfn_graph.tasks.sources.npz import read_npz_images

KINDS = (
    "'digits' (scikit-learn's, always there), a folder with the four idx files of MNIST or "
    "FashionMNIST, a folder with CIFAR batches (binary version), an .npz file, or a folder with "
    "a subfolder of pictures for each class"
)


def open_images(source: str | Path, *, size: int | None = None) -> Images:
    """Images by name or from local files; nothing is downloaded.

    Args:
        source: `digits`, a folder (idx files, CIFAR batches, or pictures in a subfolder for
            each class), or an `.npz` file.
        size: Height and width to scale the pictures of an image folder to.
    """
    if str(source) == "digits":
        return read_digits()
    path = Path(source)
    if path.is_dir():
        if has_idx(path):
            return read_idx_folder(path)
        if has_cifar(path):
            return read_cifar_folder(path)
        return read_image_folder(path, size)
    if not path.exists():
        raise FileNotFoundError(
            f"Expected a source of images: {KINDS} (got '{source}', which does not exist). "
            f"Nothing is downloaded: put the files of the dataset there."
        )
    if path.suffix.lower() == ".npz":
        return read_npz_images(path)
    raise SourceError(f"Expected a source of images: {KINDS} (got '{source}')")
