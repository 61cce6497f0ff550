"""The checks that every layer makes of its spec and its input."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from nfn_graph.data import WeightGraph
from nfn_graph.features import WeightFeatures
from nfn_graph.messages import UserError
from nfn_graph.ops import Reduce
from nfn_graph.ops._precision import autocast_dtype
from nfn_graph.spec import FoldedSpec, NetworkSpec

_UNION_HINT = (
    "for networks that have only some types of a larger spec, use "
    "graph.features(symmetry, spec=larger)"
)

Choice = TypeVar("Choice", bound=str)


def check_folded(spec: NetworkSpec | FoldedSpec) -> FoldedSpec:
    """Raises an error unless the spec is folded."""
    if not isinstance(spec, FoldedSpec):
        raise TypeError(
            f"Expected a folded spec (got {type(spec).__name__}). "
            f"Use spec.fold('np') or spec.fold('hnp')."
        )
    return spec


def check_unfolded(spec: NetworkSpec) -> NetworkSpec:
    """Raises an error unless the spec is that of the networks themselves."""
    if not isinstance(spec, NetworkSpec):
        raise TypeError(
            f"Expected the networks' own NetworkSpec, before the fold, such as batch.spec "
            f"(got {type(spec).__name__})"
        )
    return spec


def check_input(value: object) -> None:
    """Raises an error unless a value is a graph, a batch or features."""
    if not isinstance(value, (WeightGraph, WeightFeatures)):
        raise TypeError(
            f"Expected a WeightGraph, a Batch or WeightFeatures (got {type(value).__name__}). Use "
            f"nfn_graph.Batch.from_data_list to batch several graphs, or "
            f"nfn_graph.interop.nfn.batch_from_nfn for the published WeightSpaceFeatures."
        )


def check_features(
    features: WeightFeatures, spec: NetworkSpec | FoldedSpec, channels: int | None = None
) -> None:
    """Raises an error unless the features fit."""
    if not isinstance(features, WeightFeatures):
        hint = ""
        if isinstance(features, WeightGraph):
            symmetry = f'"{spec.symmetry}"' if isinstance(spec, FoldedSpec) else ""
            hint = f". Use graph.features({symmetry})."
        raise TypeError(f"Expected WeightFeatures (got {type(features).__name__}){hint}")
    # The compiler cannot compare specs. In compiled models, torch finds shapes that do not fit.
    comparable = features.spec is not spec and not torch.compiler.is_compiling()
    if comparable and not _fits(spec, features.spec):
        raise UserError(f"Expected features of {spec} (got {_difference(spec, features.spec)})")
    if channels is not None and features.channels != channels:
        raise UserError(f"Expected features of {channels} channels (got {features.channels})")


def check_parameters(features: WeightFeatures, parameters: Iterable[Tensor]) -> None:
    """Raises an error unless features and parameters have one dtype and are on one device."""
    like = next(iter(parameters), None)
    if like is None:
        return
    if like.device != features.device:
        raise UserError(
            f"Expected features on {like.device}, where the parameters of the layer are (got "
            f"{features.device}). Use batch.to('{like.device}') or move the model."
        )
    if like.dtype != features.dtype and autocast_dtype(features.device) is None:
        raise UserError(
            f"Expected features of {like.dtype}, like the parameters of the layer (got "
            f"{features.dtype}). Use batch.to({like.dtype}) or model.to({features.dtype})."
        )


def check_choice(value: Choice, choices: Sequence[str]) -> Choice:
    """Raises an error unless the value is one of the choices."""
    if value not in choices:
        raise UserError(f"Expected one of {list(choices)} (got {value!r})")
    return value


def check_aggregate(value: Reduce, choices: Sequence[str]) -> Reduce:
    """Raises an error unless the value is one of the aggregates. PyG also calls a sum `"add"`."""
    return check_choice("sum" if value == "add" else value, choices)


def _fits(spec: NetworkSpec | FoldedSpec, got: NetworkSpec | FoldedSpec) -> bool:
    """Whether the specs are equal, except for sizes that the first one leaves open."""
    if isinstance(spec, FoldedSpec) or isinstance(got, FoldedSpec):
        return spec == got
    return spec.unsized == got.unsized and all(
        n.size in (None, m.size) for n, m in zip(spec.neurons, got.neurons, strict=True)
    )


def _difference(spec: NetworkSpec | FoldedSpec, got: NetworkSpec | FoldedSpec) -> str:
    if isinstance(spec, FoldedSpec) and isinstance(got, FoldedSpec):
        if spec.symmetry != got.symmetry:
            return f"features folded for '{got.symmetry}'"
        return f"{spec.unfolded.difference(got.unfolded)}; {_UNION_HINT}"
    if isinstance(spec, FoldedSpec):
        return f"features before the fold; use features.fold('{spec.symmetry}')"
    if isinstance(got, FoldedSpec):
        return "features after the fold; use features.unfold()"
    return f"{spec.difference(got)}; {_UNION_HINT}"
