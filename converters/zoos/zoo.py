"""The interface to a published zoo: graphs, rows of metadata, splits."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from nfn_graph import WeightGraph
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.state_dict import from_state_dict, to_module
from nfn_graph.messages import UserError

Row = dict[str, Any]


@dataclass(frozen=True)
class ZooDescription:
    """Facts that hold for all networks of a zoo.

    Attributes:
        layout: The name of the layout that was recognised.
        kind: Whether the networks classify images, or store images or shapes.
        label: The column of a row that models learn to predict.
        splits: The rule or file that the splits come from.
        w0: The factor inside every sine of an INR: `sin(w0 * (W x + b))`.
        output_offset: The number that is added to the outputs of an INR.
        coordinates: The meaning of the inputs of an INR.
        outputs: The meaning of the outputs of an INR.
        assumptions: Facts that the files do not state and that come from the published code.

    Example:
        >>> from nfn_graph.converters.zoos import ZooDescription
        >>> ZooDescription("my INRs", "inr", label="class", splits="by name", w0=30.0).w0
        30.0
    """

    layout: str
    kind: Literal["cnn", "inr"]
    label: str
    splits: str
    w0: float | None = None
    output_offset: float | None = None
    coordinates: str | None = None
    outputs: str | None = None
    assumptions: tuple[str, ...] = ()


class Checkpoint(NamedTuple):
    """The contents of the files of one network.

    Attributes:
        tensors: Its state dict.
        details: Metadata in these files that is not in its row.
    """

    tensors: Mapping[str, Tensor]
    details: Row


class Network(NamedTuple):
    """A network without values, on the meta device, and an example input if it needs one."""

    module: nn.Module
    example: Tensor | None = None


class ZooSource(ABC):
    """The files of a zoo in one layout.

    Attributes:
        path: The zoo's folder.
        description: Facts that hold for all networks.
        rows: The metadata of every network that is known without opening the network's own files.
        splits: The networks of each published split, by name.
        unsplit: Advice for the case that there are no splits.
    """

    path: Path
    description: ZooDescription
    rows: Sequence[Row]
    splits: Mapping[str, Sequence[int]]
    unsplit: str = ""

    def name(self, index: int) -> str:
        """Returns the file of a network, with the record if the file holds several networks."""
        return f"'{self.path / self.rows[index]['path']}'"

    @abstractmethod
    def read(self, index: int) -> Checkpoint:
        """Reads everything about one network."""

    @abstractmethod
    def network(self, tensors: Mapping[str, Tensor], row: Row) -> Network:
        """Returns the published network that computes with these tensors."""

    def details(self, index: int) -> Row:
        """Returns metadata from the files of a network that is not in its row."""
        return {}


class Zoo(Sequence[WeightGraph]):
    """The networks of a published zoo, each of which is read when it is accessed.

    `zoo[i]` is a graph with its metadata as the attribute `row`, and `zoo[2:5]` is a zoo.

    Args:
        source: The files of the zoo.
        indices: The networks to include; None for all of them.
        check_finite: Whether a network with NaN or infinite weights is an error.

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
        ...     print(len(zoo), len(zoo.split("train")), zoo.labels)
        1 1 [7]
    """

    def __init__(
        self, source: ZooSource, indices: Sequence[int] | None = None, check_finite: bool = True
    ) -> None:
        self.source = source
        self.indices = range(len(source.rows)) if indices is None else indices
        self.check_finite = check_finite

    @property
    def path(self) -> Path:
        """The zoo's folder."""
        return self.source.path

    @property
    def description(self) -> ZooDescription:
        """Facts that hold for all networks."""
        return self.source.description

    @property
    def splits(self) -> Mapping[str, Sequence[int]]:
        """The published splits: for each name, networks of the whole zoo."""
        return self.source.splits

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[WeightGraph]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Zoo(self.source, self.indices[index], self.check_finite)
        graph, _ = self._load(index)
        return graph

    def __repr__(self) -> str:
        return f"Zoo({self.description.layout}, {len(self)} networks, '{self.path}')"

    def row(self, index: int) -> Row:
        """Returns the labels and metadata of a network, and opens its files if necessary."""
        at = self.indices[index]
        return {**self.source.rows[at], **self.source.details(at)}

    @property
    def labels(self) -> list[Any]:
        """The label of each network, which models learn to predict."""
        return self.column(self.description.label)

    def column(self, name: str) -> list[Any]:
        """Returns one entry of the metadata of each network."""
        found = []
        for i, at in enumerate(self.indices):
            row = self.source.rows[at]
            row = row if name in row else self.row(i)
            if name not in row:
                raise UserError(f"Expected a column of the zoo: {list(row)} (got '{name}')")
            found.append(row[name])
        return found

    def split(self, name: str) -> Zoo:
        """Returns the networks of a published split, in the published order."""
        if name not in self.splits:
            known = ", ".join(self.splits) or "none"
            raise UserError(
                f"Expected a split of '{self.path}': {known} (got '{name}'). {self.source.unsplit}"
            )
        chosen = set(self.indices)
        return self._at([at for at in self.splits[name] if at in chosen])

    def where(self, **values: Any) -> Zoo:
        """Returns the networks with these metadata, as in `where(step=86)`."""
        columns = [(self.column(name), value) for name, value in values.items()]
        chosen = (i for i in range(len(self)) if all(c[i] == value for c, value in columns))
        return self.select(list(chosen))

    def select(self, indices: Sequence[int]) -> Zoo:
        """Returns some of the networks as a zoo."""
        return self._at([self.indices[i] for i in indices])

    def state_dict(self, index: int) -> dict[str, Tensor]:
        """Returns the tensors of a network under the names in its file, in PyTorch's axis order."""
        return dict(self._read(index).tensors)

    def module(self, index: int) -> nn.Module:
        """Builds a module that computes what the published network computes, in eval mode."""
        graph, network = self._load(index)
        return to_module(graph, copy.deepcopy(network.module)).eval()

    def _at(self, indices: Sequence[int]) -> Zoo:
        return Zoo(self.source, indices, self.check_finite)

    def _load(self, index: int) -> tuple[WeightGraph, Network]:
        at = self.indices[index]
        checkpoint = self._read(index)
        row = {**self.source.rows[at], **checkpoint.details}
        try:
            network = self.source.network(checkpoint.tensors, row)
            graph = from_state_dict(
                checkpoint.tensors, arch=network.module, example_input=network.example
            )
        except ConversionError as error:
            raise ConversionError(f"{self.source.name(at)}: {error}") from error
        graph.row = row
        return graph, network

    def _read(self, index: int) -> Checkpoint:
        at = self.indices[index]
        checkpoint = self.source.read(at)
        for key, tensor in checkpoint.tensors.items():
            if self.check_finite and not torch.isfinite(tensor).all():
                raise ConversionError(
                    f"Expected finite weights in {self.source.name(at)} (got NaN or infinity in "
                    f"'{key}'). The file is damaged, or the training failed. Leave the network "
                    f"out, or open the zoo with check_finite=False"
                )
        return checkpoint
