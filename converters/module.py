"""Converts a torch module to a graph by following its computation."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nfn_graph import symmetry
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.layout_changes import leave_out
from nfn_graph.converters.pytorch import as_inputs, map_tensors, trace, unwrapped_module
from nfn_graph.converters.pytorch.tensors import check_module, unwrap_parts
from nfn_graph.converters.state_dict import build_graph, to_state_dict
from nfn_graph.data import WeightGraph
from nfn_graph.messages import UserError

# The largest difference between outputs in float64, relative to the largest output.
_TOLERANCE = 1e-9
# A single element of the group may happen to fix exactly those neurons whose order matters.
_ELEMENTS = 4


def from_module(
    module: nn.Module,
    example_input: Any = None,
    verify: bool = False,
    *,
    channels: Mapping[str, Mapping[str, Tensor]] | None = None,
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> WeightGraph:
    r"""Builds the weight graph of a network by following its computation in eval mode.

    Linear maps, convolutions of any kind, norms, entrywise activations, pooling, residual
    additions, branches, several heads, shared weights, flattening and concatenation are supported.
    Any other operation raises a :class:`ConversionError` that names the module and the reason.

    Every parameter that the outputs depend on is in the graph. If the network returns a parameter
    directly, such as the logarithm of a policy's standard deviation, it becomes a tap of the output
    neurons if it has one entry for each of them, and a tap of the network otherwise. Floating-point
    buffers are weights like parameters, unless the code reads their values. Such buffers, integer
    buffers and tensors that no output depends on are carried along unchanged, and :func:`summary`
    lists them. Values are copied, so training the module later does not change the graph.

    Args:
        module: The network. If it is on the meta device, the graph has no values. Networks wrapped
            by `torch.compile`, `DataParallel`, `DistributedDataParallel` or `AveragedModel` are
            followed under the keys of the wrapper's state dict.
        example_input: An input, or a tuple of inputs. It is needed if the result depends on shapes:
            for networks whose code reads them or calls functions that are not torch's
            (`torch.fx.wrap`), and for axes that are counted from the front of values that may be
            `[batch, features]` or have more axes. Without it, a norm over channels (`BatchNorm1d`,
            `PReLU`) after a linear layer is assumed to receive features, and a convolution to
            receive a batch.
        verify: Whether to check the graph. Four random elements :math:`\sigma` of its symmetry
            group are applied to random weights. An error is raised unless the network computes the
            same with each of them in float64, the graph computes the same as the network when it is
            run, and no parameter outside the graph changes the outputs. Requires an
            `example_input`.
        channels: Further values for every parameter, such as gradients or masks; see
            :func:`from_state_dict`.
        only: Patterns such as `"encoder.*"`. Tensors whose keys match none of them are left out of
            the graph and carried along, so that they can be restored. By default all tensors are
            used.
        exclude: Patterns of tensors to leave out, such as `"*embeddings*"`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from nfn_graph.converters import from_module
        >>> network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
        >>> graph = from_module(network, torch.randn(1, 1, 8, 8), verify=True)
        >>> graph["hidden1", "weight", "output"].edge_attr.shape  # 36 positions are taps of an edge
        torch.Size([40, 36, 1])
    """
    check_module(module, "module")
    layout = trace(module, example_input)
    tensors = {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, value in module.state_dict().items()
    }
    graph = build_graph(leave_out(layout, list(tensors), only, exclude), tensors, channels)
    if verify:
        if example_input is None:
            raise UserError("Expected an example_input to verify with (got None)")
        _verify(module, as_inputs(example_input))
    return graph


def _verify(module: nn.Module, example: tuple[Any, ...]) -> None:
    if any(p.is_meta for p in _tensors_of(module)):
        raise UserError("Expected a module with values to verify (got one on the meta device)")
    network = _copy(unwrapped_module(module)).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        # New norm layers hold ones and zeros, which no permutation changes.
        for tensor in _tensors_of(network):
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
                tensor += 0.1 * noise.to(tensor.device)
        inputs = map_tensors(lambda x: _random_like(x, generator), example)
        expected = _outputs(network, inputs)
        if not torch.isfinite(expected).all():
            raise ConversionError("Expected finite outputs to verify with (got NaN or infinity)")
        difference = _distance(_outputs(network, inputs), expected)
        if difference > _TOLERANCE:
            raise ConversionError(
                f"Expected a deterministic network to verify (got outputs that differ by "
                f"{difference:.1e} when {type(network).__name__} runs twice on one input with "
                f"the same weights, in eval mode)"
            )
        graph = from_module(network, inputs)
        for key, parameter in _left_out(network, graph).items():
            outputs = _changed_outputs(network, parameter, inputs, generator)
            if _distance(outputs, expected) > _TOLERANCE:
                raise ConversionError(
                    f"Expected a graph of all parameters that the outputs depend on (got one "
                    f"without '{key}', whose values change the outputs in a way that the "
                    f"operations do not show). Let forward use the parameter itself, not its "
                    f"data or a number read from it"
                )
        _verify_run(graph, inputs, expected)
        difference = 0.0
        for _ in range(_ELEMENTS):
            permuted = symmetry.sample(graph, "hnp", generator).apply(graph)
            network.load_state_dict(to_state_dict(permuted))
            difference = max(difference, _distance(_outputs(network, inputs), expected))
    if difference > _TOLERANCE:
        raise ConversionError(
            f"Expected the network to compute the same with permuted neurons (got outputs that "
            f"differ by {difference:.1e}). It depends on the order of its neurons in a way that "
            f"its operations do not show"
        )


def _verify_run(graph: WeightGraph, inputs: tuple[Any, ...], expected: Tensor) -> None:
    """Runs the graph and compares its outputs, if the computation of the network was recorded."""
    if graph.layout.computation.reason is not None or not all(
        isinstance(x, Tensor) for x in inputs
    ):
        return
    outputs = graph.run(inputs)
    found = torch.cat([x.double().flatten() for x in _tensors(outputs)])
    difference = _distance(found, expected)
    if difference > _TOLERANCE:
        raise ConversionError(
            f"Expected a graph that computes what the network computes (got outputs that differ "
            f"by {difference:.1e}). The network's code does something that its operations do not "
            f"show, such as changing a tensor through a view of it"
        )


def _left_out(network: nn.Module, graph: WeightGraph) -> dict[str, Tensor]:
    """Returns the parameters that are not in the graph; buffers may be constants."""
    parameters = network.named_parameters(remove_duplicate=False)
    return {key: p for key, p in parameters if key in graph.layout.carried}


def _changed_outputs(
    network: nn.Module, parameter: Tensor, inputs: tuple[Any, ...], generator: torch.Generator
) -> Tensor:
    """Returns the outputs with other values of a parameter, and then restores its values."""
    before = parameter.clone()
    noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
    parameter += (1 + noise).to(parameter)
    outputs = _outputs(network, inputs)
    parameter.copy_(before)
    return outputs


def _copy(module: nn.Module) -> nn.Module:
    """Copies a module, with computed tensors as constants and its parts unwrapped."""
    held = [value for part in module.modules() for value in vars(part).values()]
    computed = [value for value in held if isinstance(value, Tensor) and not value.is_leaf]
    network = copy.deepcopy(module, {id(tensor): tensor.detach().clone() for tensor in computed})
    unwrap_parts(network)
    return network


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [value for value in module.state_dict().values() if isinstance(value, Tensor)]


def _distance(actual: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest value; infinite for NaN or other shapes."""
    if actual.shape != expected.shape or not torch.isfinite(actual).all():
        return math.inf
    if not actual.numel():
        return 0.0
    return float((actual - expected).abs().max() / max(1.0, float(expected.abs().max())))


def _random_like(x: Tensor, generator: torch.Generator) -> Tensor:
    if not x.is_floating_point():
        return x
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return x.double() + noise.to(x.device)


def _outputs(network: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    """Returns all outputs of a network, concatenated."""
    try:
        outputs = network(*inputs)
    except Exception as error:  # The network's own code may raise anything.
        raise ConversionError(
            f"Expected a network that runs in float64 to verify it (got "
            f"{type(network).__name__}: {error}). It may cast values to another type"
        ) from error
    found = list(_tensors(outputs))
    if not found:
        raise ConversionError("Expected tensors as outputs to verify (got none)")
    for tensor in found:
        if tensor.is_floating_point() and tensor.dtype != torch.float64:
            raise ConversionError(
                f"Expected outputs in float64 to verify (got {tensor.dtype} from "
                f"{type(network).__name__}, which casts values to another type)"
            )
    return torch.cat([tensor.double().flatten() for tensor in found])


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Yields the tensors in outputs of any kind. Numbers and None are not compared."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        yield from _tensors(list(outputs.values()))
    elif isinstance(outputs, list | tuple):
        for item in outputs:
            yield from _tensors(item)
    elif is_dataclass(outputs):
        yield from _tensors([getattr(outputs, f.name) for f in fields(outputs)])
    elif not isinstance(outputs, bool | int | float | str | None):
        raise ConversionError(
            f"Expected tensors as outputs to verify (got {type(outputs).__name__})"
        )
