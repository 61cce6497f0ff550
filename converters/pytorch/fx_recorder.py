"""Records a traced computation (functions, methods, modules), so that the graph can be run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from nfn_graph.converters.pytorch.handling import CASTS
from nfn_graph.converters.pytorch.modules import say_module
from nfn_graph.converters.pytorch.targets import is_known, operator_name
from nfn_graph.converters.pytorch.tensors import StoredTensors, normed_tensors
from nfn_graph.converters.wiring import Opaque, Signal, Weight
from nfn_graph.converters.wiring.tape import Unrecordable, recording
from nfn_graph.data import Ref
from nfn_graph.run import leaves

_SAME_NAMES = """
    contiguous clone alias identity requires_grad cpu cuda lift_fresh_copy dropout alpha_dropout
    feature_alpha_dropout dropout1d dropout2d dropout3d
"""
_SAME = frozenset(_SAME_NAMES.split())
_DROPOUTS = frozenset(name for name in _SAME if "dropout" in name)
_FLOATING = CASTS | {"float", "double", "half", "bfloat16"}
_SIZES = frozenset({"shape", "ndim", "T", "mT"})
_OTHER_NAMES = {
    "iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv", "ndim": "dim",
    "ndimension": "dim", "absolute": "abs", "special_expit": "sigmoid", "arctan": "atan",
    "rmatmul": "matmul", "fliplr": "flip", "log_sigmoid": "logsigmoid",
    "view": "reshape",
}  # fmt: skip
_IN_PLACE = frozenset({"iadd", "isub", "imul", "itruediv"})
# Operations whose result may share memory with their first operand.
_VIEW_NAMES = """
    view reshape flatten unflatten permute transpose swapaxes swapdims movedim moveaxis squeeze
    unsqueeze chunk split narrow select unbind getitem expand broadcast_to t T mT contiguous detach
"""
_VIEWS = frozenset(_VIEW_NAMES.split())


class FxRecorder:
    """Records the nodes of a traced module on the tape of its wiring."""

    def __init__(self, stored: StoredTensors, modules: Mapping[str, nn.Module]) -> None:
        self._stored = stored
        self._tape = stored.wiring.tape
        self._modules = modules
        self._refs: dict[fx.Node, Any] = {}

    def record(self, node: fx.Node, tensor: Tensor | None, value: Any) -> None:
        """Records a node."""
        ref = recording(self._tape, lambda: self._record(node, tensor))
        if isinstance(value, Signal | Opaque | Weight) and self._is_in_place(node):
            recording(self._tape, lambda: self._replace(node, ref))
        self._refs[node] = ref
        self._tape.note(ref, value)
        if isinstance(ref, tuple) and isinstance(value, tuple):
            for part, known in zip(ref, value, strict=False):
                self._tape.note(part, known)

    def output(self, result: Any) -> None:
        """Records what the network returns."""
        for ref in _tensors_in(fx.map_arg(result, self._refs.get)):
            self._tape.output(ref)

    def _record(self, node: fx.Node, tensor: Tensor | None) -> Any:
        args = fx.map_arg(node.args, self._refs.__getitem__)
        kwargs = fx.map_arg(node.kwargs, self._refs.__getitem__)
        if node.op == "placeholder":
            return self._tape.input()
        if node.op == "get_attr":
            return self.fetch(tensor)
        if node.op == "call_module":
            return self._module(self._modules[str(node.target)], [*args, *kwargs.values()])
        name = operator_name(node.target)
        if not is_known(node.target):
            raise Unrecordable(f"it calls '{name}', which is not a function of torch")
        name = name.strip("_") if name.startswith("__") else name.rstrip("_")
        return self._function(name, list(args), dict(kwargs))

    def _is_in_place(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return bool(getattr(self._modules[str(node.target)], "inplace", False))
        if node.op not in ("call_function", "call_method") or not node.all_input_nodes:
            return False
        name = operator_name(node.target)
        has_mark = name.endswith("_") and not name.endswith("__")
        return name in _IN_PLACE or has_mark or bool(node.kwargs.get("inplace"))

    def _replace(self, node: fx.Node, ref: Any) -> None:
        """Records that an in-place operation also changes its first operand."""
        first = node.all_input_nodes[0]
        if first.op == "get_attr":
            raise Unrecordable(f"{node.name} changes '{first.target}' in place")
        views = [n for n in first.users if n is not node and _may_share_memory(n)]
        if _may_share_memory(first) and not _is_last(first):
            views.append(first)
        if views:
            raise Unrecordable(
                f"{node.name} changes a tensor in place that may share memory with {views[0].name}"
            )
        self._refs[first] = ref

    def _function(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        kwargs.pop("inplace", None)
        if name == "getattr" and args[1] in _SIZES:
            name, args = str(args[1]), args[:1]
        if kwargs.pop("out", None) is not None:
            raise Unrecordable(f"'{name}' writes its result into another tensor")
        if name in _DROPOUTS and (kwargs.get("training", True) if len(args) < 3 else args[2]):
            raise Unrecordable(f"'{name}' is random even in eval mode")
        if name in _SAME:
            return args[0] if args else kwargs["input"]
        if name in _FLOATING and isinstance(args[0], Ref):
            raise Unrecordable(f"'{name}' casts values to another type")
        if name == "rmatmul":
            args = args[::-1]
        name = _OTHER_NAMES.get(name, name)
        if not any(isinstance(leaf, Ref) for leaf in leaves([args, kwargs])):
            raise Unrecordable(f"'{name}' creates a tensor from numbers")
        if name == "getitem" and isinstance(args[0], tuple):
            return args[0][args[1]]
        if name == "split" and kwargs.get("split_size_or_sections") is None and len(args) < 2:
            kwargs["split_size_or_sections"] = kwargs.pop("split_size")
        return self._tape.call(name, *args, **kwargs)

    def _module(self, module: nn.Module, args: list[Any]) -> Any:
        is_recurrent = isinstance(module, nn.RNNBase | nn.RNNCellBase)
        kind = type(module).__name__
        if any(arg is not None for arg in args[1:]) and not is_recurrent:
            raise Unrecordable(f"it calls {kind} with further arguments")
        if is_recurrent and normed_tensors(module):
            return self.unknown(kind)
        if getattr(module, "dim", 0) is None:
            raise Unrecordable(f"its {kind} has no fixed axis")
        if getattr(module, "divisor_override", None) is not None:
            raise Unrecordable(f"{kind} overrides its divisor")
        try:
            return say_module(self, module, *args)
        except Unrecordable as error:
            raise error if kind in str(error) else Unrecordable(f"{error} ({kind})") from None

    def fetch(self, tensor: Tensor | None) -> Any:
        """Records a tensor of the checkpoint, or a constant."""
        if tensor is None:
            return None
        key = self._stored.keys.get(id(tensor))
        return self._tape.constant(tensor) if key is None else self._tape.parameter(key)

    def call(self, name: str, *args: Any, results: int = 1, **kwargs: Any) -> Any:
        """Records a function; several results are returned as a tuple."""
        ref = self._tape.call(name, *args, **kwargs)
        if results == 1:
            return ref
        return tuple(self._tape.call("getitem", ref, i) for i in range(results))

    def padded(self, x: Any, padding: Sequence[int], mode: str) -> Any:
        """Records padding of a value."""
        return self._tape.call("pad", x, padding, mode)

    def unknown(self, kind: str) -> Any:
        """Raises because a module cannot be recorded."""
        raise Unrecordable(f"it uses {kind}, which cannot be run from a graph")


def _may_share_memory(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    return operator_name(node.target).strip("_") in _VIEWS


def _is_last(node: fx.Node) -> bool:
    """Whether nothing else uses the tensor of which a node is a view."""
    base = node.all_input_nodes[0]
    if len(base.users) > 1 or base.op in ("placeholder", "get_attr"):
        return False
    return not _may_share_memory(base) or _is_last(base)


def _tensors_in(result: Any) -> list[Any]:
    """Returns the references in what a network returns, without None."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, list | tuple):
        return [ref for item in result for ref in _tensors_in(item)]
    return [] if result is None else [result]
