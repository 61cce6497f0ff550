"""Following the computation of a torch module: torch.fx, or torch.export where that fails.

torch.fx sees modules and needs no input; with an example input the shapes are propagated on
the meta device. Networks whose Python code looks at shapes or values are exported instead,
which needs an example input.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.pytorch.modules import apply_module
from nfn_graph.converters.pytorch.operations import apply
from nfn_graph.converters.pytorch.registry import (
    UNKNOWN,
    Unknown,
    UnknownShape,
    is_record,
    values_in,
)
from nfn_graph.converters.pytorch.shapes import Shapes, as_inputs, shape_of, shapes_in, to_meta
from nfn_graph.converters.pytorch.tensors import StoredTensors, check_as_written, unchanged
from nfn_graph.converters.wiring import Activation, Opaque, Weight, Wiring
from nfn_graph.layout import Layout

Example = tuple[Any, ...] | None


def trace(module: nn.Module, example_input: Any = None) -> Layout:
    """The layout of a module's state dict, in eval mode."""
    example = None if example_input is None else as_inputs(example_input)
    stored = StoredTensors(module)
    check_as_written(module)
    if stored.on_meta:
        example = to_meta(example)
    with unchanged(module):
        _follow(stored, module, example)
    return stored.wiring.layout()


def _follow(stored: StoredTensors, module: nn.Module, example: Example) -> None:
    try:
        graph_module = _symbolic_trace(module, example)
    except Exception as error:  # Whatever the module's own code does with a symbolic input.
        if example is None:
            raise ConversionError(
                f"Expected a computation that does not depend on its input's shape or values "
                f"(got {type(module).__name__}, which torch.fx cannot follow: {error}). Give "
                f"an example_input"
            ) from error
        _follow_export(stored, module, example)
    else:
        shapes = {} if example is None else shapes_in(graph_module, example)
        _follow_fx(stored, graph_module, shapes)


class _Tracer(fx.Tracer):
    """Looks into everything but the modules that torch.nn itself defines."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).__module__.startswith("torch.nn.modules") and not isinstance(
            m, nn.Sequential
        )


def _symbolic_trace(module: nn.Module, example: Example) -> fx.GraphModule:
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
    tracer = _Tracer()
    graph = tracer.trace(module, concrete_args=defaults)
    return fx.GraphModule(tracer.root, graph)


def _follow_fx(stored: StoredTensors, module: fx.GraphModule, shapes: Shapes) -> None:
    wiring = stored.wiring
    known: dict[fx.Node, Any] = {}
    modules = dict(module.named_modules())
    for node in module.graph.nodes:
        args = fx.map_arg(node.args, known.__getitem__)
        kwargs = fx.map_arg(node.kwargs, known.__getitem__)
        result: Any
        with wiring.at(_place(node, modules)):
            if node.op == "placeholder":
                shape = shapes.get(node)
                result = wiring.input(shape if isinstance(shape, tuple) else None)
            elif node.op == "get_attr":
                result = stored.fetch(_attribute(module, str(node.target)))
            elif node.op == "call_module":
                leaf = modules[str(node.target)]
                check_as_written(leaf)
                result = apply_module(wiring, leaf, stored.fetch, args, kwargs)
            elif node.op == "output":
                _outputs(wiring, args[0])
                return
            else:
                result = _call(wiring, node, args, kwargs)
            _note(wiring, known, node, result, shapes.get(node))


def _note(
    wiring: Wiring, known: dict[fx.Node, Any], node: fx.Node, result: Any, shape: Any
) -> None:
    """Keeps a result; that of an operation in place is its first operand from here on."""
    known[node] = result = _annotated(wiring, result, shape)
    name = str(node.target) if node.op == "call_method" else _aten_name(node.target)
    if name.endswith("_") and not name.endswith("__") and node.all_input_nodes:
        first = node.all_input_nodes[0]
        if first.op == "get_attr" and len(node.all_input_nodes) > 1:
            # torch.fx reads it anew at every use, and so would miss what was put into it.
            wiring.refuse(
                f"Expected tensors of the module to stay as they are (got {name} in place on "
                f"'{first.target}'). Clone it first"
            )
        known[first] = result


def _call(wiring: Wiring, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    if isinstance(target, type) and is_record(target):
        return target(*args, **kwargs)
    if values_in([*args, *kwargs.values()]):
        return apply(wiring, name, args, kwargs)
    if any(isinstance(arg, Unknown | UnknownShape) for arg in _leaves([*args, *kwargs.values()])):
        if name == "getitem":
            return args[0][args[1]]
        return wiring.constant(None) if _is_torch(target) else UNKNOWN
    if _is_torch(target):
        return wiring.constant(None)
    try:
        return target(*args, **kwargs)
    except Exception as error:  # Whatever Python does with numbers that are not known.
        raise ConversionError(
            f"Expected a computation of sizes that can be followed (got {name}: {error}). Give "
            f"an example_input"
        ) from error


def _leaves(args: Any) -> list[Any]:
    if isinstance(args, list | tuple):
        return [leaf for arg in args for leaf in _leaves(arg)]
    return [args]


def _is_torch(target: Any) -> bool:
    return (getattr(target, "__module__", None) or "torch").startswith("torch")


def _follow_export(stored: StoredTensors, module: nn.Module, example: tuple[Any, ...]) -> None:
    try:
        program = torch.export.export(module, example, strict=False)
    except Exception as error:
        raise ConversionError(
            f"Expected a computation without data-dependent control flow (got "
            f"{type(module).__name__}, which torch.export cannot follow: {error})"
        ) from error
    wiring = stored.wiring
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
            elif not values_in([*args, *kwargs.values()]):
                result = wiring.constant(shape)
            else:
                result = apply(wiring, _aten_name(node.target), args, kwargs)
            _note(wiring, known, node, result, shape)


#: Operators of aten that take or return something else than torch's functions.
_OTHERWISE = {"batch_norm", "instance_norm", "embedding"} | {
    f"adaptive_max_pool{n}d" for n in (1, 2, 3)
}


def _aten_name(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    if schema is None:
        return str(getattr(target, "__name__", target))
    name = str(schema.name.split("::")[-1])
    return f"aten.{name}" if name in _OTHERWISE else name


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
    if isinstance(result, Activation | Opaque | Weight) and isinstance(shape, tuple):
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
