"""The base of all tasks with one label per network: the label, and a model that predicts it.

Networks that share no types can be given the same ones, so that one model reads them all. Kernels
are padded with zeros and missing biases are zeros, which does not change what a network computes.
The sizes are those of the networks that a model was trained on, and are stored with its run.
"""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from torch import Tensor, nn
from torch_geometric.transforms import Compose

from nfn_graph import Batch, NetworkSpec, WeightGraph
from nfn_graph.converters import WeightDataset
from nfn_graph.converters.commands import unset
from nfn_graph.converters.store.shards import PLACE
from nfn_graph.converters.store.table import COLUMN, arrow, compute
from nfn_graph.messages import UserError, one_line
from nfn_graph.tasks.augment import MixUp
from nfn_graph.tasks.models import build_model
from nfn_graph.tasks.option_checks import check_at_least, check_several
from nfn_graph.tasks.training.options import TrainOptions
from nfn_graph.tasks.training.run import network_names
from nfn_graph.tasks.training.task import Predictions, Task
from nfn_graph.transforms import CanonicalForm, FillBiases, GrowKernels, RoleTypes

Unify = Literal["no", "kernels", "roles"]
# The inputs of a probe are kept in memory; no image is larger.
_MOST_INPUTS = 2**28
# Columns that say where a network comes from or is stored, which are not labels.
_NO_LABELS = (*PLACE, COLUMN, "file", "path", "bytes", "mtime_ns", "options", "network", "group")


def largest_parts(examples: Sequence[WeightGraph], unify: Unify) -> dict[str, Any]:
    """The largest kernels and the most biases of networks, as facts."""
    if unify == "no":
        return {}
    if unify == "kernels":
        grown = GrowKernels.to_largest(examples)
        sizes = dict(grown.sizes) if isinstance(grown.sizes, Mapping) else {}
        kernels = [[list(key), list(size)] for key, size in sizes.items()]
        filled = FillBiases.to_largest([grown(graph) for graph in examples])
        return {"kernels": kernels, "biases": filled.taps}
    found = [p.kernel for graph in examples for p in graph.layout.placements]
    found = [kernel for kernel in found if kernel]
    largest = list(map(max, zip(*found, strict=True))) if found else []
    biases = [n.taps for graph in examples for n in graph.spec.neurons if not n.fixed]
    return {"kernel": largest, "bias": max([1, *biases])}


def unifying(facts: Mapping[str, Any]) -> Callable[[WeightGraph], WeightGraph]:
    """The transform that gives networks parts of the sizes in facts."""
    if "kernels" in facts:
        sizes = {(key[0], key[1], key[2]): tuple(size) for key, size in facts["kernels"]}
        return Compose([GrowKernels(sizes), FillBiases(facts["biases"])])
    grow = [GrowKernels(facts["kernel"])] if facts["kernel"] else []
    return Compose([*grow, FillBiases(facts["bias"]), RoleTypes()])


def without_refused(zoo: WeightDataset) -> WeightDataset:
    """The networks whose hidden layers can be given one type; says how many cannot, and why."""
    examples = zoo.examples()
    unify = unifying(largest_parts(examples, "roles"))
    numbers = list(dict.fromkeys(zoo.architectures.tolist()))
    refused: dict[int, UserError] = {}
    for number, graph in zip(numbers, examples, strict=True):
        try:
            unify(graph)
        except UserError as error:
            refused[number] = error
    kept = zoo.select(~np.isin(zoo.architectures, list(refused)))
    if refused:
        print(
            f"nfn-graph: left out {len(zoo) - len(kept)} of {len(zoo)} networks of '{zoo.folder}': "
            f"{one_line(next(iter(refused.values())))}",
            file=sys.stderr,
        )
    return kept


@dataclass(frozen=True)
class SupervisedOptions(TrainOptions):
    """Options of tasks with one label per network.

    Attributes:
        label: The column of the zoo's table to predict; by default the one that the zoo names.
        input_shape: The shape of one input of the networks without a batch axis, such as 3 32 32,
            for probe; by default the one that the zoo names, or one value for every input neuron.
        unify: How to combine networks that share no types. kernels pads convolution kernels and
            biases with zeros up to the largest. roles also gives all hidden layers one type, for
            networks that are wired differently (not for nfn-hnp), and leaves out networks for
            which this is impossible.
        mixup: Augmentation: networks of one shape are mixed in pairs, weights and labels alike,
            with a share from the distribution Beta(mixup, mixup); 0 for none.
        canonical: Whether to bring networks that differ by a symmetry of their activation functions
            (the scale of a ReLU, the sign of an odd function) to one form first, which does not
            change what a network computes.
    """

    label: Annotated[str | None, unset("NAME")] = None
    input_shape: Annotated[tuple[int, ...], unset("N ...")] = ()
    unify: Unify = "no"
    mixup: float = 0.0
    canonical: bool = False

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        super().check()
        check_at_least("mixup", self.mixup, 0)
        if self.input_shape:
            check_several("input_shape", self.input_shape, 1)
            if math.prod(self.input_shape) > _MOST_INPUTS:
                raise UserError(
                    f"Expected an --input-shape of at most {_MOST_INPUTS} values (got "
                    f"{' '.join(map(str, self.input_shape))})"
                )


Options = TypeVar("Options", bound=SupervisedOptions)


class SupervisedTask(Task[Options]):
    """A task with one label per network, from an invariant model.

    Args:
        options: The options of the task; missing values come from the preset.
    """

    # Whether the canonical form follows the record of what networks compute.
    follows_record: ClassVar[bool] = True

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if options.mixup:
            self.augmentations.insert(0, MixUp(options.mixup))

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of every network."""

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The mean loss; networks that were mixed have the labels of both."""
        losses = self.losses(outputs, batch.y)
        if "mixed_share" in batch:
            share = batch.mixed_share.to(losses)
            others = self.losses(outputs, batch.y[batch.mixed_with])
            losses = share * losses + (1 - share) * others
        return losses.mean()

    @abstractmethod
    def targets(self, zoo: WeightDataset, facts: Mapping[str, Any]) -> Tensor:
        """The targets of the model's outputs, a row for every network."""

    @abstractmethod
    def num_outputs(self, facts: Mapping[str, Any]) -> int:
        """Outputs of the model per network."""

    @abstractmethod
    def answer(self, outputs: Tensor) -> Predictions:
        """The predictions for all networks, whose labels are not needed."""

    def predict(self, outputs: Tensor, batch: Batch) -> Predictions:
        """The true labels beside the predictions."""
        return {"target": batch.y, **self.answer(outputs)}

    def facts(self, zoos: Mapping[str, WeightDataset]) -> dict[str, Any]:
        """Returns the column of the label, and the shape of the inputs if it is known."""
        shape = self._input_shape(zoos["train"])
        known = {} if shape is None else {"input_shape": shape}
        return {
            "label": self.label_column(zoos["train"]),
            **known,
            **largest_parts(self._examples(zoos), self.options.unify),
        }

    def _examples(self, zoos: Mapping[str, WeightDataset]) -> list[WeightGraph]:
        if self.options.unify == "no":
            return []
        return [graph for zoo in zoos.values() for graph in zoo.examples()]

    def usable(self, zoo: WeightDataset) -> WeightDataset:
        """Leaves out networks with weights that are not finite, or that `--unify` cannot handle."""
        if "is_finite" in zoo.store.table.column_names:
            zoo = zoo.where(is_finite=True)
        return without_refused(zoo) if self.options.unify == "roles" and len(zoo) else zoo

    def transform(self, facts: Mapping[str, Any]) -> Callable[[WeightGraph], WeightGraph] | None:
        """Returns the transforms of `--canonical` and `--unify`, if they are on."""
        steps: list[Callable[[WeightGraph], WeightGraph]] = []
        if self.options.canonical and self.follows_record:
            steps.append(CanonicalForm())
        if self.options.unify != "no":
            steps.append(unifying(facts))
        return Compose(steps) if steps else None

    def _input_shape(self, zoo: WeightDataset) -> list[int] | None:
        """Returns the shape of the images that the networks read, if it is known."""
        if self.options.input_shape:
            return list(self.options.input_shape)
        # The images of a zoo of INRs are what its networks show, not what they read.
        shape: list[int] | None = zoo.description.get("image_shape")
        return None if zoo.description.get("kind") == "inr" else shape

    def check_facts(self, zoo: WeightDataset, facts: Mapping[str, Any]) -> None:
        """A model that runs networks takes those that read images of one shape."""
        known, found = facts.get("input_shape"), self._input_shape(zoo)
        if self.options.model == "probe" and found != known:
            raise UserError(
                f"Expected networks that read images of shape {known}, as the run's own (got "
                f"'{zoo.folder}' with {found})"
            )

    def show(
        self, folder: Path, name: str, model: nn.Module, graphs: Sequence[WeightGraph]
    ) -> None:
        """The inputs that a model runs networks on, once for a run."""
        from nfn_graph.tasks.reports.network_figures import draw_probes

        if name == "test":
            draw_probes(folder / "probes.png", model, graphs)

    def label_column(self, zoo: WeightDataset, known: str | None = None) -> str:
        """The column to predict: the one that was asked for, or the one that the zoo names.

        Args:
            zoo: The networks.
            known: The column of the zoo that a model was trained on.
        """
        columns = zoo.store.table.column_names
        name = self.options.label or zoo.description.get("label") or known
        if name in columns:
            return str(name)
        labels = ", ".join(c for c in columns if c not in _NO_LABELS) or "none"
        raise UserError(
            f"Expected --label to name a column of '{zoo.folder}' to predict: {labels} (got "
            f"{'none' if name is None else repr(name)}). Labels are added to checkpoints with: "
            f"nfn-graph convert --labels"
        )

    def attributes(self, zoo: WeightDataset, facts: Mapping[str, Any]) -> dict[str, Tensor]:
        """The labels, and any other attributes that the model reads."""
        return {"y": self.targets(zoo, facts), **self.inputs(zoo, facts)}

    def inputs(self, zoo: WeightDataset, facts: Mapping[str, Any]) -> dict[str, Tensor]:
        """The attributes of graphs other than weights and labels, if any."""
        return {}

    def build(
        self, spec: NetworkSpec, sizes: Mapping[str, int], facts: Mapping[str, Any]
    ) -> nn.Module:
        """An untrained model for networks of these types and sizes."""
        options = self.options
        return build_model(
            options.model,
            options.model_settings(),
            spec,
            sizes,
            self.num_outputs(facts),
            facts.get("input_shape"),
        )


def known_labels(zoo: WeightDataset, column: str) -> Any:
    """The labels of all networks, a `pyarrow.ChunkedArray`; raises if one has none."""
    found = zoo.column(column)
    missing = compute().is_null(found, nan_is_null=arrow().types.is_floating(found.type))
    count = compute().sum(missing).as_py() or 0
    if count:
        first = compute().index(missing, True).as_py()
        raise UserError(
            f"Expected a label for every network in column '{column}' of '{zoo.folder}' (got none "
            f"for {count} of {len(zoo)} networks, such as "
            f"'{network_names(zoo[first : first + 1])[1][0]}'). Leave them out with --where, or "
            f"complete the labels."
        )
    return found
