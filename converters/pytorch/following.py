"""The nodes of a traced or exported computation, one by one, in the words of `wiring`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.pytorch.modules import apply_module
from nfn_graph.converters.pytorch.operations import apply
from nfn_graph.converters.pytorch.recording import FxRecorder
from nfn_graph.converters.pytorch.registry import (
    UNKNOWN,
    Unknown,
    UnknownShape,
    is_record,
    values_in,
)
from nfn_graph.converters.pytorch.shapes import Shapes, map_tensors, shape_of
from nfn_graph.converters.pytorch.targets import check_known, is_torch, operator_name
from nfn_graph.converters.pytorch.tensors import StoredTensors, check_as_written, is_uniform
from nfn_graph.converters.wiring import Opaque, Signal, Weight, Wiring


def follow_fx(stored: StoredTensors, module: fx.GraphModule, shapes: Shapes) -> None:
    """The computation of a module that torch.fx has traced."""
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
    """Keeps a result; that of an operation in place is its first operand from here on."""
    known[node] = result = _annotated(wiring, result, shape)
    name = operator_name(node.target)
    if name.endswith("_") and not name.endswith("__") and node.all_input_nodes:
        first = node.all_input_nodes[0]
        if first.op == "get_attr" and len(node.all_input_nodes) > 1:
            # torch.fx reads it anew at every use, and so would miss what was put into it.
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
    except Exception as error:  # Whatever Python does with numbers that are not known.
        raise ConversionError(
            f"Expected a computation of sizes that can be followed (got {name}: {error}). Give "
            f"an example_input"
        ) from error
    return map_tensors(stored.fetch, result)


def _leaves(args: Any) -> list[Any]:
    if isinstance(args, list | tuple):
        return [leaf for arg in args for leaf in _leaves(arg)]
    return [args]


def follow_export(stored: StoredTensors, module: nn.Module, example: tuple[Any, ...]) -> None:
    """The computation of a module as torch.export sees it: operators of aten, real shapes."""
    try:
        with warnings.catch_warnings():
            # The attributes of the module are put back afterwards.
            warnings.filterwarnings("ignore", message="(?s).*assigned during export")
            program = torch.export.export(module, example, strict=False)
    except Exception as error:
        raise ConversionError(
            f"Expected a computation without data-dependent control flow and unknown operators "
            f"(got {type(module).__name__}, which torch.export cannot follow: {error})"
        ) from error
    wiring = stored.wiring
    wiring.tape.lose("its code looks at shapes, so that torch.fx cannot follow it")
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
