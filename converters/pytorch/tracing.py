"""Following the computation of a torch module: torch.fx, or torch.export where that fails.

torch.fx sees modules and needs no input; with an example input the shapes are propagated on
the meta device. Networks whose Python code looks at shapes or values are exported instead,
which needs an example input.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.pytorch.attention import PLAIN
from nfn_graph.converters.pytorch.following import follow_export, follow_fx
from nfn_graph.converters.pytorch.shapes import as_inputs, shapes_in, to_meta
from nfn_graph.converters.pytorch.targets import ForeignFunctionError
from nfn_graph.converters.pytorch.tensors import (
    StoredTensors,
    check_as_written,
    is_weight,
    unchanged,
)
from nfn_graph.converters.pytorch.wrappers import unwrap_parts, unwrapped_module
from nfn_graph.data import Layout

Example = tuple[Any, ...] | None


def trace(module: nn.Module, example_input: Any = None) -> Layout:
    """The layout of a module's state dict, in eval mode."""
    example = None if example_input is None else as_inputs(example_input)
    # Keys are those of the module, whatever it is wrapped in.
    tensors = module.state_dict(keep_vars=True)
    if StoredTensors(tensors).on_meta:
        example = to_meta(example)
    with unchanged(module):
        network = unwrapped_module(module)
        unwrap_parts(network)
        check_as_written(network)
        try:
            return _follow(tensors, network, example).wiring.layout()
        except ConversionError:
            stored = _with_constants(tensors, network, example)
            if stored is None:
                raise
            return stored.wiring.layout()


def _follow(tensors: Mapping[str, Any], network: nn.Module, example: Example) -> StoredTensors:
    stored = StoredTensors(tensors)
    try:
        graph_module, _ = _symbolic_trace(network, example)
    except ConversionError:
        raise
    except Exception as error:  # Whatever the module's own code does with a symbolic input.
        if example is None:
            raise ConversionError(
                f"Expected a computation that does not depend on its input's shape or values "
                f"(got {type(network).__name__}, which torch.fx cannot follow: {error}). Give "
                f"an example_input"
            ) from error
        follow_export(stored, network, example)
        return stored
    shapes = {} if example is None else shapes_in(graph_module, example)
    try:
        follow_fx(stored, graph_module, shapes)
    except ForeignFunctionError as error:
        if example is None:
            raise ConversionError(f"{error}. Give an example_input to look into it") from error
        # torch.fx keeps it whole; what it does shows in the operators of an exported network.
        stored = StoredTensors(tensors)
        follow_export(stored, network, example)
    return stored


def _with_constants(
    tensors: Mapping[str, Any], network: nn.Module, example: Example
) -> StoredTensors | None:
    """The same with the buffers that the code reads as constants, which fix what they meet.

    None if it reads none, or if the computation cannot be followed so either.
    """
    try:
        graph_module, constants = _symbolic_trace(network, example, False)
        if not constants:
            return None
        stored = StoredTensors(tensors, constants)
        follow_fx(stored, graph_module, {} if example is None else shapes_in(graph_module, example))
    except Exception:  # The first attempt has the reason.
        return None
    return stored


class _Proxy(fx.Proxy):
    """A symbol whose `+=` is one operation in place, as it is of a tensor."""

    def _in_place(self, function: Any, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.iadd, other)

    def __isub__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.isub, other)

    def __imul__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.imul, other)

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.itruediv, other)


class _Tracer(fx.Tracer):
    """Looks into everything but the modules that torch.nn itself defines.

    Parameters are symbols, and so are whole numbers with several axes, which are masks or would
    be weights. The code may look at the values of other whole numbers, counts and indices, and
    of tensors outside of the state dict.

    Args:
        module: The network.
        with_buffers: Whether floating-point buffers of the state dict are symbols, too.
    """

    proxy_buffer_attributes = True
    param_shapes_constant = True

    def __init__(self, module: nn.Module, with_buffers: bool) -> None:
        super().__init__()
        stored = module.state_dict(keep_vars=True).values()
        self._stored = {id(t): t for t in stored if isinstance(t, Tensor)}
        self._with_buffers = with_buffers
        #: The floating-point buffers that were read as values.
        self.constants: list[Tensor] = []

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A symbol for the result of a node."""
        return _Proxy(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """A symbol, or the value itself."""
        if not isinstance(attr_val, Tensor) or self._is_symbol(attr_val):
            return super().getattr(attr, attr_val, parameter_proxy_cache)
        if is_weight(attr_val) and id(attr_val) in self._stored:
            self.constants.append(attr_val)
        return attr_val

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A module of attention in plain operations; any other as it is."""
        plain = PLAIN.get(type(m))
        if plain is None:
            return super().call_module(m, forward, args, kwargs)
        check_as_written(m)
        return plain(m, *args, **kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).__module__.startswith("torch.nn.modules") and not isinstance(
            m, nn.Sequential
        )

    def _is_symbol(self, tensor: Tensor) -> bool:
        if id(tensor) not in self._stored:
            return False
        if is_weight(tensor):
            return self._with_buffers or isinstance(tensor, nn.Parameter)
        return tensor.dim() > 1


def _symbolic_trace(
    module: nn.Module, example: Example, with_buffers: bool = True
) -> tuple[fx.GraphModule, list[Tensor]]:
    """The module as a graph, and the stored tensors whose values were read."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    given = len(example) if example is not None else 0
    defaults = {
        p.name: p.default
        for i, p in enumerate(parameters)
        if i >= given and p.default is not inspect.Parameter.empty
    }
    if type(module).__module__.startswith("torch.nn.modules"):
        module = nn.Sequential(module) if not isinstance(module, nn.Sequential) else module
        defaults = {}
    tracer = _Tracer(module, with_buffers)
    graph = tracer.trace(module, concrete_args=defaults)
    return fx.GraphModule(tracer.root, graph), tracer.constants
