"""Images as sine networks: the zoos of DWSNets and of NFN, with one file per network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.store.table import SPLITS
from nfn_graph.converters.zoos.files import (
    files_in,
    folders_in,
    only_file,
    read_checkpoint,
    state_dict_in,
)
from nfn_graph.converters.zoos.networks import make_siren, siren_layers
from nfn_graph.converters.zoos.splits import find_split_file, read_splits, refuse_split_file
from nfn_graph.converters.zoos.zoo import Checkpoint, Network, Row, ZooDescription, ZooSource

_DWS_MNIST = re.compile(r"mnist_png_(.+)_(\d+)_(\d+)")
_DWS_FASHION = re.compile(r"model_(\d+)\.pth")
_NFN_FOLDER = re.compile(r"randinit_smaller_(?:aug(\d+)_)?(\d)s")
_NFN_FILE = re.compile(r"net(\d+)\.pth")
#: Images below the first number are for training, those below the second for validation.
NFN_SPLIT_POINTS = (45_000, 50_000)
_W0 = 30.0
_PIXELS = "(row, column) of a pixel, both within [-1, 1]"


class _InrSource(ZooSource):
    """Networks that each have their own file."""

    def __init__(self, path: Path, layers: str) -> None:
        self.path = path
        self._layers = re.compile(rf"({layers})\.(?:weight|bias)")

    def read(self, index: int) -> Checkpoint:
        """Reads one file: tensors, and perhaps a label."""
        path = self.path / self.rows[index]["path"]
        content = dict(read_checkpoint(path))
        details = self._details(path, self.rows[index], content)
        return Checkpoint(state_dict_in(path, content), details)

    def _details(self, path: Path, row: Row, content: dict[str, Any]) -> Row:
        """Removes values that are not tensors of the network from the content of a file."""
        return {}

    def network(self, tensors: Mapping[str, Tensor], row: Row) -> Network:
        """Returns a SIREN with the layers of the file, in the order of their numbers."""
        found: dict[int, str] = {}
        for key in tensors:
            layer = self._layers.fullmatch(key)
            if layer is None:
                raise ConversionError(
                    f"Expected keys such as '{self._layers.pattern}' (got '{key}')"
                )
            found[int(layer[2])] = layer[1]
        layers = siren_layers(tensors, [found[i] for i in sorted(found)])
        offset = self.description.output_offset
        return make_siren(layers, _W0, 0.0 if offset is None else offset)


class _DwsSource(_InrSource):
    """The networks of DWSNets: layers `seq.{i}`, 0.5 added to the output."""

    def __init__(self, path: Path, images: str, file: Path | None) -> None:
        super().__init__(path, r"seq\.(\d+)")
        rule = f"'{file}'" if file else "by folder; 'train' also holds the validation networks"
        self.description = ZooDescription(
            layout=f"DWSNets {images} INRs",
            kind="inr",
            label="label",
            splits=rule,
            w0=_W0,
            output_offset=0.5,
            coordinates=_PIXELS,
            outputs="brightness within [0, 1]",
        )

    def _split(self, file: Path | None) -> dict[str, list[int]]:
        """Returns the splits of a file, or those by folder if there is no file."""
        if file is None:
            return {
                split: [i for i, row in enumerate(self.rows) if row["set"] == split]
                for split in ("train", "test")
            }
        splits = read_splits(file, [row["path"] for row in self.rows])
        for at, label in splits.columns.get("label", {}).items():
            known, row = _whole_number(label), self.rows[at]
            if known is None or row.setdefault("label", known) != known:
                raise ConversionError(
                    f"Expected label {row.get('label', 'as an integer')} of '{row['path']}' "
                    f"in '{file}' (got {label!r})"
                )
        return splits.indices


def is_dws_mnist(path: Path) -> bool:
    """Whether a folder holds folders `mnist_png_*_{label}_{image}`."""
    return any(_DWS_MNIST.fullmatch(name) for name in folders_in(path))


class DwsMnistSource(_DwsSource):
    """`mnist_png_{training,testing}_{label}_{image}/checkpoints/model_final.pth`."""

    unsplit = "Validation networks are a random choice that only mnist_splits.json contains"

    def __init__(self, path: Path, split_file: Path | None = None) -> None:
        file = find_split_file(path, ("mnist_splits.json",), split_file)
        super().__init__(path, "MNIST", file)
        self.rows = []
        seen: dict[tuple[bool, int], str] = {}
        for folder in folders_in(path):
            match = _DWS_MNIST.fullmatch(folder)
            if match is None:
                continue
            trains, image = "train" in match[1], int(match[3])
            first = seen.setdefault((trains, image), folder)
            if first != folder:
                raise ConversionError(
                    f"Expected one network per image in '{path}' (got '{first}' and '{folder}')"
                )
            name = only_file(path / folder / "checkpoints", ".pth")
            self.rows.append(
                {
                    "path": f"{folder}/checkpoints/{name}",
                    "label": int(match[2]),
                    "image": image,
                    "set": "train" if trains else "test",
                }
            )
        self.splits = self._split(file)


def is_dws_fashion(path: Path) -> bool:
    """Whether a folder holds `train/model_{image}.pth` or `test/...`."""
    parts = [path / name for name in ("train", "test") if (path / name).is_dir()]
    return any(_DWS_FASHION.fullmatch(name) for part in parts for name in files_in(part, ".pth"))


class DwsFashionSource(_DwsSource):
    """`{train,test}/model_{image}.pth`, whose label is in the file."""

    unsplit = "Validation networks are a random choice that only splits.json contains"

    def __init__(self, path: Path, split_file: Path | None = None) -> None:
        file = find_split_file(path, ("splits.json", "fmnist_splits.json"), split_file)
        super().__init__(path, "FashionMNIST", file)
        self.rows = []
        for folder in ("train", "test"):
            names = files_in(path / folder, ".pth") if (path / folder).is_dir() else []
            found = [(int(m[1]), name) for name in names if (m := _DWS_FASHION.fullmatch(name))]
            self.rows += [
                {"path": f"{folder}/{name}", "image": image, "set": folder}
                for image, name in sorted(found)
            ]
        self.splits = self._split(file)

    def details(self, index: int) -> Row:
        """Returns the label, for which the file is opened."""
        return {} if "label" in self.rows[index] else self.read(index).details

    def _details(self, path: Path, row: Row, content: dict[str, Any]) -> Row:
        label = _whole_number(content.pop("label", None))
        if label is None or row.get("label", label) != label:
            raise ConversionError(
                f"Expected 'label' in '{path}' to be {row.get('label', 'an integer')} (got {label})"
            )
        return {"label": label}


def is_nfn_inrs(path: Path) -> bool:
    """Whether a folder holds folders `randinit_smaller_{label}s`."""
    return any(_NFN_FOLDER.fullmatch(name) for name in folders_in(path))


class NfnInrSource(_InrSource):
    """`randinit_smaller_{label}s/net{image}.pth`, more fits in `randinit_smaller_aug{i}_{label}s`.

    The splits `train`, `validation` and `test` hold the first fit of every image. `train_augmented`
    holds all fits of the images in `train`, as the published classifiers use them.
    """

    def __init__(self, path: Path, split_file: Path | None = None) -> None:
        refuse_split_file(path, split_file)
        super().__init__(path, r"net\.(\d+)(?:\.linear)?")
        validation, test = NFN_SPLIT_POINTS
        self.description = ZooDescription(
            layout="NFN INRs",
            kind="inr",
            label="label",
            splits=f"by image: training below {validation}, validation below {test}, then testing",
            w0=_W0,
            output_offset=0.0,
            coordinates=_PIXELS,
            outputs="brightness or colours within [-1, 1]",
        )
        self.rows = self._find()
        splits: dict[str, list[int]] = {name: [] for name in (*SPLITS, "train_augmented")}
        for i, row in enumerate(self.rows):
            split = SPLITS[sum(row["image"] >= n for n in NFN_SPLIT_POINTS)]
            if row["fit"] == 0:
                splits[split].append(i)
            if split == "train":
                splits["train_augmented"].append(i)
        self.splits = splits

    def _find(self) -> list[Row]:
        found: dict[tuple[int, int], Row] = {}
        labels: dict[int, str] = {}
        for folder in folders_in(self.path):
            match = _NFN_FOLDER.fullmatch(folder)
            if match is None:
                continue
            fit, label = 0 if match[1] is None else int(match[1]) + 1, int(match[2])
            for name in files_in(self.path / folder, ".pth"):
                file = _NFN_FILE.fullmatch(name)
                if file is None:
                    raise ConversionError(
                        f"Expected files net{{image}}.pth in '{self.path / folder}' (got '{name}')"
                    )
                image, path = int(file[1]), f"{folder}/{name}"
                row = {"path": path, "label": label, "image": image, "fit": fit}
                first = found.setdefault((fit, image), row)
                other = labels.setdefault(image, path)
                if first is not row or not other.split("/")[0].endswith(f"_{label}s"):
                    raise ConversionError(
                        f"Expected one label of image {image} and one network per fit in "
                        f"'{self.path}' (got '{other if first is row else first['path']}' and "
                        f"'{path}')"
                    )
        return [found[key] for key in sorted(found)]


def _whole_number(value: Any) -> int | None:
    """Returns a label, which may be a tensor or text, as an integer; None if it is none."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
