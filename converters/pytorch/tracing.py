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
from torch.nn.utils import stateless

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.pytorch.modules import Fetch, apply_module
from nfn_graph.converters.pytorch.operations import apply
from nfn_graph.converters.pytorch.registry import UNKNOWN, Unknown, UnknownShape, values_in
from nfn_graph.converters.wiring import Activation, Opaque, Weight, Wiring
from nfn_graph.layout import Layout

Shapes = Mapping[fx.Node, Any]
Example = tuple[Any, ...] | None


def as_inputs(example_input: Any) -> tuple[Any, ...]:
    """An example input as the arguments of a network."""
    return example_input if isinstance(example_input, tuple) else (example_input,)


def trace(module: nn.Module, example_input: Any = None) -> Layout:
    """The layout of a module's state dict, in eval mode."""
    example = None if example_input is None else as_inputs(example_input)
    tensors = module.state_dict(keep_vars=True)
    if example is not None and any(tensor.is_meta for tensor in tensors.values()):
        example = tuple(x.to("meta") if isinstance(x, Tensor) else x for x in example)
    keys: dict[int, str] = {}
    tied: dict[str, list[str]] = {}
    for key, tensor in tensors.items():
        first = keys.setdefault(id(tensor), key)
        if first != key:
            tied.setdefault(first, []).append(key)
    wiring = Wiring(tensors, tied)

    def fetch(tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        key = keys.get(id(tensor))
        return wiring.constant(tuple(tensor.shape)) if key is None else wiring.parameter(key)

    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        _follow(wiring, module, example, fetch)
    finally:
        for part, mode in modes.items():
            part.training = mode
    return wiring.layout()


def _follow(wiring: Wiring, module: nn.Module, example: Example, fetch: Fetch) -> None:
    try:
        graph_module = _symbolic_trace(module, example)
    except Exception as error:  # Whatever the module's own code does with a symbolic input.
        if example is None:
            raise ConversionError(
                f"Expected a computation that does not depend on its input's shape or values "
                f"(got {type(module).__name__}, which torch.fx cannot follow: {error}). Give "
                f"an example_input"
            ) from error
        _follow_export(wiring, module, example, fetch)
    else:
        shapes = {} if example is None else _shapes(graph_module, example)
        _follow_fx(wiring, graph_module, shapes, fetch)


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


class _ShapeInterpreter(fx.Interpreter):
    """Runs a graph and notes the shape of every result; on the meta device if it can."""

    def __init__(self, module: fx.GraphModule, on_meta: bool) -> None:
        super().__init__(module)
        self.on_meta = on_meta
        self.shapes: dict[fx.Node, Any] = {}

    def fetch_attr(self, target: str) -> Any:
        found = super().fetch_attr(target)
        return found.to("meta") if self.on_meta and isinstance(found, Tensor) else found

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.shapes[n] = _shape_of(result)
        return result


def _shape_of(result: Any) -> Any:
    if isinstance(result, Tensor):
        return tuple(result.shape)
    if isinstance(result, list | tuple) and not isinstance(result, torch.Size):
        return [_shape_of(item) for item in result]
    return result if isinstance(result, int | torch.Size) else None


def _shapes(module: fx.GraphModule, example: tuple[Any, ...]) -> Shapes:
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    interpreter = _ShapeInterpreter(module, on_meta=True)
    inputs = [x.to("meta") if isinstance(x, Tensor) else x for x in example]
    try:
        with torch.no_grad(), stateless._reparametrize_module(module, meta):
            interpreter.run(*inputs)
    except Exception as error:  # Whatever the network's own code raises.
        if not any(tensor.is_meta for tensor in tensors.values()):
            return _real_shapes(module, example)
        raise _wrong_example(example, error) from error
    return interpreter.shapes


def _real_shapes(module: fx.GraphModule, example: tuple[Any, ...]) -> Shapes:
    """For networks with tensors that cannot be moved to the meta device."""
    interpreter = _ShapeInterpreter(module, on_meta=False)
    try:
        with torch.no_grad():
            interpreter.run(*example)
    except Exception as error:
        raise _wrong_example(example, error) from error
    return interpreter.shapes


def _wrong_example(example: tuple[Any, ...], error: Exception) -> ConversionError:
    return ConversionError(
        f"Expected an example_input that the network takes (got {_shape_of(example)}: {error})"
    )


def _follow_fx(
    wiring: Wiring,
    module: fx.GraphModule,
    shapes: Shapes,
    fetch: Fetch,
) -> None:
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
                result = fetch(_attribute(module, str(node.target)))
            elif node.op == "call_module":
                leaf = modules[str(node.target)]
                result = apply_module(wiring, leaf, fetch, args, kwargs)
            elif node.op == "output":
                _outputs(wiring, args[0])
                return
            else:
                result = _call(wiring, node, args, kwargs)
            known[node] = _annotated(wiring, result, shapes.get(node))


def _call(wiring: Wiring, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    if name in ("_assert", "_assert_is_none"):
        return None
    if values_in([*args, *kwargs.values()]):
        return apply(wiring, name, args, kwargs)
    if any(isinstance(arg, Unknown | UnknownShape) for arg in _leaves([*args, *kwargs.values()])):
        if name == "getitem":
            return args[0][args[1]]
        return wiring.constant(None) if _is_torch(target) else UNKNOWN
    if _is_torch(target):
        return wiring.constant(None)
    return target(*args, **kwargs)


def _leaves(args: Any) -> list[Any]:
    if isinstance(args, list | tuple):
        return [leaf for arg in args for leaf in _leaves(arg)]
    return [args]


def _is_torch(target: Any) -> bool:
    return (getattr(target, "__module__", None) or "torch").startswith("torch")


def _follow_export(
    wiring: Wiring,
    module: nn.Module,
    example: tuple[Any, ...],
    fetch: Fetch,
) -> None:
    try:
        program = torch.export.export(module, example, strict=False)
    except Exception as error:
        raise ConversionError(
            f"Expected a computation without data-dependent control flow (got "
            f"{type(module).__name__}, which torch.export cannot follow: {error})"
        ) from error
    signature = program.graph_signature
    stored = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    known: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        shape = _shape_of(node.meta.get("val"))
        args = fx.map_arg(node.args, known.__getitem__)
        kwargs = fx.map_arg(node.kwargs, known.__getitem__)
        with wiring.at(_place(node, {})):
            if node.op == "placeholder":
                if node.name in stored:
                    result = fetch(_attribute(module, stored[node.name]))
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
            known[node] = _annotated(wiring, result, shape)


def _aten_name(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    if schema is None:
        return str(getattr(target, "__name__", target))
    name = str(schema.name.split("::")[-1])
    return f"aten.{name}" if name in ("batch_norm", "instance_norm") else name


def _attribute(module: nn.Module, path: str) -> Tensor:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    if not isinstance(found, Tensor):
        raise ConversionError(f"Expected '{path}' to be a tensor (got {type(found).__name__})")
    return found


def _annotated(wiring: Wiring, result: Any, shape: Any) -> Any:
    if isinstance(result, tuple) and isinstance(shape, list) and len(shape) == len(result):
        return tuple(_annotated(wiring, r, s) for r, s in zip(result, shape, strict=True))
    if isinstance(result, Activation | Opaque) and isinstance(shape, tuple):
        return wiring.annotate(result, shape)
    if isinstance(result, Unknown) and isinstance(shape, int):
        return shape
    return result


def _outputs(wiring: Wiring, result: Any) -> None:
    for value in values_in(result):
        if isinstance(value, Weight):
            continue
        wiring.output(value)


def _place(node: fx.Node, modules: Mapping[str, nn.Module]) -> str:
    if node.op == "call_module":
        return f"{node.target} ({type(modules[str(node.target)]).__name__})"
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    inside = f" in {stack[-1][0]}" if stack and stack[-1][0] else ""
    return f"{node.name}{inside}"
