"""Follows the computation of a torch module with torch.fx, or with torch.export if that fails."""

from __future__ import annotations

import inspect
import operator
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.pytorch.attention import PLAIN
from nfn_graph.converters.pytorch.fx_recorder import FxRecorder
from nfn_graph.converters.pytorch.handling import (
    UNKNOWN,
    Unknown,
    UnknownShape,
    is_record,
    values_in,
)
from nfn_graph.converters.pytorch.modules import apply_module
from nfn_graph.converters.pytorch.operations import apply
from nfn_graph.converters.pytorch.shapes import (
    Shapes,
    as_inputs,
    map_tensors,
    shape_of,
    shapes_in,
    to_meta,
)
from nfn_graph.converters.pytorch.targets import (
    ForeignFunctionError,
    check_known,
    is_torch,
    operator_name,
)
from nfn_graph.converters.pytorch.tensors import (
    StoredTensors,
    check_as_written,
    is_uniform,
    is_weight,
    unchanged,
    unwrap_parts,
    unwrapped_module,
)
from nfn_graph.converters.wiring import Opaque, Signal, Weight, Wiring
from nfn_graph.data import Layout


def follow_fx(stored: StoredTensors, module: fx.GraphModule, shapes: Shapes) -> None:
    """Follows the computation of a module that torch.fx has traced."""
    wiring = stored.wiring
    known: dict[fx.Node, Any] = {}
    modules = dict(module.named_modules())
    recorder = FxRecorder(stored, modules)
    for node in module.graph.nodes:
        args = fx.map_arg(node.args, known.__getitem__)
        kwargs = fx.map_arg(node.kwargs, known.__getitem__)
        result: Any
        tensor: Tensor | None = None
        with wiring.at(_place(node, modules)):
            if node.op == "placeholder":
                shape = shapes.get(node)
                result = wiring.input(shape if isinstance(shape, tuple) else None)
            elif node.op == "get_attr":
                tensor = _attribute(module, str(node.target))
                result = stored.fetch(tensor)
                if isinstance(result, Opaque) and is_uniform(node, tensor):
                    result = replace(result, is_uniform=True)
            elif node.op == "call_module":
                leaf = modules[str(node.target)]
                check_as_written(leaf)
                result = apply_module(wiring, leaf, stored.fetch, args, kwargs)
            elif node.op == "output":
                _outputs(wiring, args[0])
                recorder.output(node.args[0])
                return
            else:
                result = _call(stored, node, args, kwargs)
            _note(wiring, known, node, result, shapes.get(node))
        recorder.record(node, tensor, known[node])


def _note(
    wiring: Wiring, known: dict[fx.Node, Any], node: fx.Node, result: Any, shape: Any
) -> None:
    """Keeps a result; that of an in-place operation replaces its first operand from here on."""
    known[node] = result = _annotated(wiring, result, shape)
    name = operator_name(node.target)
    if name.endswith("_") and not name.endswith("__") and node.all_input_nodes:
        first = node.all_input_nodes[0]
        if first.op == "get_attr" and len(node.all_input_nodes) > 1:
            # torch.fx reads the tensor again at every use and would miss the change.
            wiring.refuse(
                f"Expected tensors of the module to stay as they are (got {name} in place on "
                f"'{first.target}'). Clone it first"
            )
        known[first] = result


def _call(stored: StoredTensors, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    wiring = stored.wiring
    target: Any = node.target
    name = operator_name(target)
    if isinstance(target, type) and is_record(target):
        return target(*args, **kwargs)
    if name in ("new_zeros", "new_ones"):
        return wiring.constant(None, is_uniform=is_uniform(node))
    if values_in([*args, *kwargs.values()]):
        check_known(target)
        return apply(wiring, name, args, kwargs)
    if any(isinstance(arg, Unknown | UnknownShape) for arg in _leaves([*args, *kwargs.values()])):
        check_known(target)
        if name == "getitem":
            return args[0][args[1]]
        return wiring.constant(None, is_uniform=is_uniform(node)) if is_torch(target) else UNKNOWN
    if is_torch(target):
        return wiring.constant(None, is_uniform=is_uniform(node))
    try:
        result = target(*args, **kwargs)
    except Exception as error:  # Python code may raise anything for unknown numbers.
        raise ConversionError(
            f"Expected a computation of sizes that can be followed (got {name}: {error}). Pass "
            f"an example_input"
        ) from error
    return map_tensors(stored.fetch, result)


def _leaves(args: Any) -> list[Any]:
    if isinstance(args, list | tuple):
        return [leaf for arg in args for leaf in _leaves(arg)]
    return [args]


def _has_packed(error: BaseException) -> bool:
    """Whether code that failed had a packed sequence among its variables."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(isinstance(x, PackedSequence) for f in frames for x in f.f_locals.values())


def follow_export(stored: StoredTensors, module: nn.Module, example: tuple[Any, ...]) -> None:
    """Follows the computation of a module with torch.export: operators of aten, real shapes."""
    try:
        with warnings.catch_warnings():
            # The attributes of the module are restored afterwards.
            warnings.filterwarnings("ignore", message="(?s).*assigned during export")
            program = torch.export.export(module, example, strict=False)
    except Exception as error:
        if _has_packed(error):
            raise ConversionError(
                "Expected whole sequences (got a packed one, whose entries are in another order). "
                "Pass the padded sequence"
            ) from error
        raise ConversionError(
            f"Expected a computation without data-dependent control flow and unknown operators "
            f"(got {type(module).__name__}, which torch.export cannot follow: {error})"
        ) from error
    wiring = stored.wiring
    wiring.tape.lose("its code looks at shapes, so torch.fx cannot follow it")
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    known: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        shape = shape_of(node.meta.get("val"))
        args = fx.map_arg(node.args, known.__getitem__)
        kwargs = fx.map_arg(node.kwargs, known.__getitem__)
        result: Any
        with wiring.at(_place(node, {})):
            if node.op == "placeholder":
                if node.name in names:
                    result = stored.fetch(_attribute(module, names[node.name]))
                elif node.name in signature.user_inputs:
                    result = wiring.input(shape)
                else:
                    result = wiring.constant(shape)
            elif node.op == "output":
                _outputs(wiring, args[0])
                return
            elif node.op == "get_attr":
                result = wiring.constant(None)
            elif not values_in([*args, *kwargs.values()]) or is_uniform(node):
                result = wiring.constant(shape, is_uniform=is_uniform(node))
            else:
                check_known(node.target)
                result = apply(wiring, operator_name(node.target), args, kwargs)
            _note(wiring, known, node, result, shape)


def _attribute(module: nn.Module, path: str) -> Tensor:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    if not isinstance(found, Tensor):
        raise ConversionError(f"Expected '{path}' to be a tensor (got {type(found).__name__})")
    return found


def _annotated(wiring: Wiring, result: Any, shape: Any) -> Any:
    if isinstance(result, tuple) and isinstance(shape, list) and len(shape) == len(result):
        items = [_annotated(wiring, r, s) for r, s in zip(result, shape, strict=True)]
        return type(result)(*items) if hasattr(result, "_fields") else tuple(items)
    if isinstance(result, Signal | Opaque | Weight) and isinstance(shape, tuple):
        return wiring.annotate(result, shape)
    if isinstance(result, Unknown) and isinstance(shape, int):
        return shape
    return result


def _outputs(wiring: Wiring, result: Any) -> None:
    for value in values_in(result):
        wiring.output(value)


def _place(node: fx.Node, modules: Mapping[str, nn.Module]) -> str:
    if node.op == "call_module":
        return f"{node.target} ({type(modules[str(node.target)]).__name__})"
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    inside = f" in {stack[-1][0]}" if stack and stack[-1][0] else ""
    return f"{node.name}{inside}"


Example = tuple[Any, ...] | None


def trace(module: nn.Module, example_input: Any = None) -> Layout:
    """Returns the layout of a module's state dict, in eval mode."""
    example = None if example_input is None else as_inputs(example_input)
    # Keys are those of the module, including its wrappers.
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
    except Exception as error:  # The module's own code may raise anything on a symbolic input.
        if example is None:
            raise ConversionError(
                f"Expected a computation that does not depend on its input's shape or values "
                f"(got {type(network).__name__}, which torch.fx cannot follow: {error}). Pass "
                f"an example_input"
            ) from error
        follow_export(stored, network, example)
        return stored
    shapes = {} if example is None else shapes_in(graph_module, example)
    try:
        follow_fx(stored, graph_module, shapes)
    except ForeignFunctionError as error:
        if example is None:
            raise ConversionError(f"{error}. Pass an example_input to trace into it") from error
        # torch.fx keeps the function whole, but torch.export shows its operators.
        stored = StoredTensors(tensors)
        follow_export(stored, network, example)
    return stored


def _with_constants(
    tensors: Mapping[str, Any], network: nn.Module, example: Example
) -> StoredTensors | None:
    """Follows the network again, with the buffers whose values its code reads as constants.

    The constants fix the neurons that they are combined with. Returns None if the code reads no
    buffers, or if the computation cannot be followed in this way either.
    """
    try:
        graph_module, constants = _symbolic_trace(network, example, False)
        if not constants:
            return None
        stored = StoredTensors(tensors, constants)
        follow_fx(stored, graph_module, {} if example is None else shapes_in(graph_module, example))
    except Exception:  # The first attempt has the reason to report.
        return None
    return stored


class _Proxy(fx.Proxy):
    """A symbol whose `+=` is one in-place operation, as for a tensor."""

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
    """Traces into everything except the modules that torch.nn itself defines.

    Parameters are symbols, and so are integer tensors with several axes, which are masks or would
    be weights. The code may read the values of other integer tensors (counts and indices) and of
    tensors that are not in the state dict.
    """

    proxy_buffer_attributes = True
    param_shapes_constant = True

    def __init__(self, module: nn.Module, with_buffers: bool) -> None:
        super().__init__()
        stored = module.state_dict(keep_vars=True).values()
        self._stored = {id(t): t for t in stored if isinstance(t, Tensor)}
        self._with_buffers = with_buffers
        #: The floating-point buffers whose values were read.
        self.constants: list[Tensor] = []

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Returns a symbol for the result of a node."""
        return _Proxy(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Returns a symbol, or the value itself."""
        if not isinstance(attr_val, Tensor) or self._is_symbol(attr_val):
            return super().getattr(attr, attr_val, parameter_proxy_cache)
        if is_weight(attr_val) and id(attr_val) in self._stored:
            self.constants.append(attr_val)
        return attr_val

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Replaces a module of attention by plain operations, and calls other modules."""
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
    """Returns the module as a graph, and the stored tensors whose values were read."""
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
