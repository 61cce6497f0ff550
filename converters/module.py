"""From a torch module to a graph: the computation says which weights share neurons."""

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

# Of float64, relative to the largest output.
_TOLERANCE = 1e-9
# One element of the group may leave just those neurons in place whose order matters.
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
    additions, branches, several heads, shared weights, flattening and concatenation are
    followed; anything else raises :class:`ConversionError` that names the module and the
    reason. Every parameter that the outputs depend on is in the graph: one that the network
    returns by itself, such as the logarithm of a policy's standard deviation, is a tap of the
    output neurons if it has an entry for each of them, else of the network. Floating-point
    buffers are weights like parameters, unless the code reads their values; those that it reads,
    buffers of whole numbers, and tensors that no output depends on, are carried along, and
    :func:`summary` lists them. Values are copied: the graph does not change when the module is
    trained on.

    Args:
        module: The network; on the meta device it gives a graph without values. What
            `torch.compile`, `DataParallel`, `DistributedDataParallel` and `AveragedModel` wrap
            is followed, under the keys of the wrapper's state dict.
        example_input: An input, or a tuple of inputs. Needed where shapes decide: for
            networks whose code looks at them or calls functions that are not torch's
            (`torch.fx.wrap`), and where axes are counted from the front of
            values that may be `[batch, features]` or have more axes. Without it, a norm of
            channels (`BatchNorm1d`, `PReLU`) after a linear layer is taken to meet features,
            and a convolution to meet a batch.
        verify: Applies four random elements :math:`\sigma` of the graph's symmetry group to
            random weights and raises unless the network computes the same with each of them in
            float64, if the graph itself computes something else when it is run, or if a
            parameter that is not in the graph changes the outputs. Needs an `example_input`.
        channels: Further values for every parameter, such as gradients or masks; see
            :func:`from_state_dict`.
        only: Patterns such as `"encoder.*"`; tensors whose keys match none of them are left out of
            the graph, and carried along for the way back. All tensors count if there are none.
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
        # Fresh norm layers hold ones and zeros, which no permutation would move.
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
    """Runs the graph itself, if what the network computes could be recorded."""
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
    """The parameters that a graph carries along; buffers may be constants of the computation."""
    parameters = network.named_parameters(remove_duplicate=False)
    return {key: p for key, p in parameters if key in graph.layout.carried}


def _changed_outputs(
    network: nn.Module, parameter: Tensor, inputs: tuple[Any, ...], generator: torch.Generator
) -> Tensor:
    """The outputs with other values of a parameter, which gets its own back."""
    before = parameter.clone()
    noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
    parameter += (1 + noise).to(parameter)
    outputs = _outputs(network, inputs)
    parameter.copy_(before)
    return outputs


def _copy(module: nn.Module) -> nn.Module:
    """A module of its own, with computed tensors as constants and no wrappers inside."""
    held = [value for part in module.modules() for value in vars(part).values()]
    computed = [value for value in held if isinstance(value, Tensor) and not value.is_leaf]
    network = copy.deepcopy(module, {id(tensor): tensor.detach().clone() for tensor in computed})
    unwrap_parts(network)
    return network


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [value for value in module.state_dict().values() if isinstance(value, Tensor)]


def _distance(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value; infinite for NaN or other shapes."""
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
    """All outputs of a network in a row."""
    try:
        outputs = network(*inputs)
    except Exception as error:  # Whatever the network's own code raises.
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
    """The tensors among outputs of any kind; numbers and None are no part of the check."""
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
