"""A traced computation on tape, so that the graph can be run: functions, methods and modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx, nn

from nfn_graph.converters.pytorch.handling import CASTS
from nfn_graph.converters.pytorch.targets import is_known, operator_name
from nfn_graph.converters.pytorch.tensors import StoredTensors, normed_tensors
from nfn_graph.converters.pytorch.weights import recurrent_name, recurrent_weights
from nfn_graph.converters.wiring import Opaque, Signal, Weight
from nfn_graph.converters.wiring.tape import Unrecordable, recording
from nfn_graph.data import Ref
from nfn_graph.run import leaves

_SAME = frozenset(
    [
        "contiguous",
        "clone",
        "alias",
        "identity",
        "requires_grad",
        "cpu",
        "cuda",
        "lift_fresh_copy",
        "dropout",
        "alpha_dropout",
        "feature_alpha_dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
    ]
)
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
# What may share memory with its first operand.
_VIEWS = frozenset(
    [
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "permute",
        "transpose",
        "swapaxes",
        "swapdims",
        "movedim",
        "moveaxis",
        "squeeze",
        "unsqueeze",
        "chunk",
        "split",
        "narrow",
        "select",
        "unbind",
        "getitem",
        "expand",
        "broadcast_to",
        "t",
        "T",
        "mT",
        "contiguous",
        "detach",
    ]
)

#: Modules of single entries, as functions with the attributes that they take.
_ACTIVATIONS: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.ReLU: ("relu", ()),
    nn.ReLU6: ("relu6", ()),
    nn.LeakyReLU: ("leaky_relu", ("negative_slope",)),
    nn.ELU: ("elu", ("alpha",)),
    nn.SELU: ("selu", ()),
    nn.CELU: ("celu", ("alpha",)),
    nn.SiLU: ("silu", ()),
    nn.Mish: ("mish", ()),
    nn.Softplus: ("softplus", ("beta", "threshold")),
    nn.Softsign: ("softsign", ()),
    nn.Sigmoid: ("sigmoid", ()),
    nn.LogSigmoid: ("logsigmoid", ()),
    nn.Hardtanh: ("hardtanh", ("min_val", "max_val")),
    nn.Hardswish: ("hardswish", ()),
    nn.Hardsigmoid: ("hardsigmoid", ()),
    nn.Hardshrink: ("hardshrink", ("lambd",)),
    nn.Softshrink: ("softshrink", ("lambd",)),
    nn.Tanhshrink: ("tanhshrink", ()),
    nn.Tanh: ("tanh", ()),
    nn.Threshold: ("threshold", ("threshold", "value")),
    nn.Flatten: ("flatten", ("start_dim", "end_dim")),
    nn.Softmax2d: ("softmax", ()),
    nn.GLU: ("glu", ("dim",)),
    nn.PixelShuffle: ("pixel_shuffle", ("upscale_factor",)),
    nn.PixelUnshuffle: ("pixel_unshuffle", ("downscale_factor",)),
    nn.Unfold: ("im2col", ("kernel_size", "dilation", "padding", "stride")),
}
_NOTHING = (
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)  # fmt: skip
_POOLS = {
    "MaxPool": ("kernel_size", "stride", "padding", "dilation", "ceil_mode"),
    "AvgPool": ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad"),
    "LPPool": ("norm_type", "kernel_size", "stride", "ceil_mode"),
    "AdaptiveMaxPool": ("output_size",),
    "AdaptiveAvgPool": ("output_size",),
}
_PAD_MODES = {
    "ConstantPad": "constant", "ZeroPad": "constant", "ReflectionPad": "reflect",
    "ReplicationPad": "replicate", "CircularPad": "circular",
}  # fmt: skip

FetchRef = Callable[[Tensor | None], Any]


class FxRecorder:
    """Writes the nodes of a traced module on the tape of its wiring.

    Args:
        stored: The module's tensors.
        modules: The module's parts by name.
    """

    def __init__(self, stored: StoredTensors, modules: Mapping[str, nn.Module]) -> None:
        self._stored = stored
        self._tape = stored.wiring.tape
        self._modules = modules
        self._refs: dict[fx.Node, Any] = {}

    def record(self, node: fx.Node, tensor: Tensor | None, value: Any) -> None:
        """Writes a node down.

        Args:
            node: The node.
            tensor: The tensor that a node of the kind `get_attr` stands for.
            value: What is known of the axes of its result.
        """
        ref = recording(self._tape, lambda: self._record(node, tensor))
        if isinstance(value, Signal | Opaque | Weight) and self._is_in_place(node):
            recording(self._tape, lambda: self._replace(node, ref))
        self._refs[node] = ref
        self._tape.note(ref, value)
        if isinstance(ref, tuple) and isinstance(value, tuple):
            for part, known in zip(ref, value, strict=False):
                self._tape.note(part, known)

    def output(self, result: Any) -> None:
        """Writes down what the network returns."""
        for ref in _tensors_in(fx.map_arg(result, self._refs.get)):
            self._tape.output(ref)

    def _record(self, node: fx.Node, tensor: Tensor | None) -> Any:
        args = fx.map_arg(node.args, self._refs.__getitem__)
        kwargs = fx.map_arg(node.kwargs, self._refs.__getitem__)
        if node.op == "placeholder":
            return self._tape.input()
        if node.op == "get_attr":
            return self._fetch(tensor)
        if node.op == "call_module":
            return self._module(self._modules[str(node.target)], [*args, *kwargs.values()])
        name = operator_name(node.target)
        if not is_known(node.target):
            raise Unrecordable(f"it calls '{name}', which is no function of torch")
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
        """Notes that an operation in place changes its first operand, too."""
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
        if "out" in kwargs:
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
            raise Unrecordable(f"'{name}' makes a tensor out of numbers")
        if name == "getitem" and isinstance(args[0], tuple):
            return args[0][args[1]]
        if name == "split" and kwargs.get("split_size_or_sections") is None and len(args) < 2:
            kwargs["split_size_or_sections"] = kwargs.pop("split_size")
        return self._tape.call(name, *args, **kwargs)

    def _fetch(self, tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        key = self._stored.keys.get(id(tensor))
        return self._tape.constant(tensor) if key is None else self._tape.parameter(key)

    def _module(self, module: nn.Module, args: list[Any]) -> Any:
        x, *rest = args
        if isinstance(module, nn.RNNBase | nn.RNNCellBase) and not _weight_norms(module):
            return self._recurrent(module, x, *rest)
        if any(arg is not None for arg in rest):
            raise Unrecordable(f"it calls {type(module).__name__} with further arguments")
        normed = normed_tensors(module)
        hooks = {id(vars(module)[h.name]): h for h in _weight_norms(module)}

        def fetch(tensor: Tensor | None) -> Any:
            if id(tensor) not in normed:
                return self._fetch(tensor)
            v, g = normed[id(tensor)]
            dim = hooks[id(tensor)].dim
            return self._tape.call("_weight_norm", self._fetch(v), self._fetch(g), dim)

        if isinstance(module, _NOTHING):
            return x
        if isinstance(module, nn.GELU):
            return self._tape.call("gelu", x, approximate=module.approximate)
        name, arguments = self._as_call(module, x, fetch)
        return self._tape.call(name, *arguments)

    def _recurrent(self, module: nn.RNNBase | nn.RNNCellBase, x: Any, state: Any = None) -> Any:
        m: Any = module
        name = recurrent_name(module)
        if isinstance(module, nn.RNNCellBase):
            tensors = [self._fetch(t) for t in (m.weight_ih, m.weight_hh, m.bias_ih, m.bias_hh)]
            found = self._tape.call(name, x, state, *tensors)
            return self._items(found, 2) if isinstance(module, nn.LSTMCell) else found
        weights = [self._fetch(t) for t in recurrent_weights(module)]
        options = [m.bias, m.num_layers, 0.0, False, m.bidirectional, m.batch_first]
        found = self._tape.call(name, x, state, weights, *options)
        output, *states = self._items(found, 3 if isinstance(module, nn.LSTM) else 2)
        return output, states[0] if len(states) == 1 else tuple(states)

    def _items(self, ref: Ref, count: int) -> tuple[Ref, ...]:
        return tuple(self._tape.call("getitem", ref, i) for i in range(count))

    def _as_call(self, module: nn.Module, x: Any, fetch: FetchRef) -> tuple[str, list[Any]]:
        m: Any = module
        kind = type(module).__name__
        if type(module) in _ACTIVATIONS:
            name, attributes = _ACTIVATIONS[type(module)]
            if isinstance(module, nn.Softmax2d):
                return "softmax", [x, -3]
            return name, [x, *(getattr(m, attribute) for attribute in attributes)]
        if isinstance(module, nn.Linear):
            return "linear", [x, fetch(m.weight), fetch(m.bias)]
        if isinstance(module, nn.modules.conv._ConvNd):
            return self._convolution(m, x, fetch)
        if isinstance(module, nn.modules.batchnorm._NormBase):
            tensors = [fetch(t) for t in (m.running_mean, m.running_var, m.weight, m.bias)]
            name = "instance_norm" if "Instance" in kind else "batch_norm"
            return name, [x, *tensors, m.running_mean is None, 0.0, m.eps]
        if isinstance(module, nn.LayerNorm):
            return "layer_norm", [x, m.normalized_shape, fetch(m.weight), fetch(m.bias), m.eps]
        if isinstance(module, nn.RMSNorm):
            return "rms_norm", [x, m.normalized_shape, fetch(m.weight), m.eps]
        if isinstance(module, nn.GroupNorm):
            return "group_norm", [x, m.num_groups, fetch(m.weight), fetch(m.bias), m.eps]
        if isinstance(module, nn.PReLU):
            return "prelu", [x, fetch(m.weight)]
        if isinstance(module, nn.Embedding):
            return "embedding", [x, fetch(m.weight)]
        return self._without_tensors(m, kind, x)

    def _convolution(self, m: Any, x: Any, fetch: FetchRef) -> tuple[str, list[Any]]:
        spatial = len(m.kernel_size)
        weight, bias = fetch(m.weight), fetch(m.bias)
        if m.transposed:
            rest = [m.stride, m.padding, m.output_padding, m.groups, m.dilation]
            return f"conv_transpose{spatial}d", [x, weight, bias, *rest]
        padding = m.padding
        if m.padding_mode != "zeros":
            x = self._tape.call("pad", x, m._reversed_padding_repeated_twice, m.padding_mode)
            padding = (0,) * spatial
        return f"conv{spatial}d", [x, weight, bias, m.stride, padding, m.dilation, m.groups]

    def _without_tensors(self, m: Any, kind: str, x: Any) -> tuple[str, list[Any]]:
        stem = kind[:-2]
        if stem in _POOLS and not getattr(m, "return_indices", False):
            if getattr(m, "divisor_override", None) is not None:
                raise Unrecordable(f"{kind} has a divisor of its own")
            attributes = [getattr(m, name) for name in _POOLS[stem]]
            name = {"LPPool": "lp_pool", "MaxPool": "max_pool", "AvgPool": "avg_pool"}.get(
                stem, "adaptive_max_pool" if "Max" in stem else "adaptive_avg_pool"
            )
            return f"{name}{kind[-2:]}", [x, *attributes]
        if stem in _PAD_MODES:
            value = [m.value] if stem == "ConstantPad" else []
            return "pad", [x, tuple(m.padding), _PAD_MODES[stem], *value]
        if isinstance(m, nn.Upsample):
            scale = m.scale_factor
            rest = [m.mode, m.align_corners, m.recompute_scale_factor]
            return "interpolate", [x, m.size, scale, *rest]
        if isinstance(m, nn.Softmax | nn.LogSoftmax | nn.Softmin) and m.dim is not None:
            names = {nn.LogSoftmax: "log_softmax", nn.Softmin: "softmin"}
            return names.get(type(m), "softmax"), [x, m.dim]
        if isinstance(m, nn.Unflatten):
            return "unflatten", [x, m.dim, tuple(m.unflattened_size)]
        raise Unrecordable(f"it uses {kind}, which cannot be run from a graph")


def _weight_norms(module: nn.Module) -> list[Any]:
    return [h for h in module._forward_pre_hooks.values() if type(h).__name__ == "WeightNorm"]


def _may_share_memory(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    return operator_name(node.target).strip("_") in _VIEWS


def _is_last(node: fx.Node) -> bool:
    """Whether nothing else uses what a view was made of."""
    base = node.all_input_nodes[0]
    if len(base.users) > 1 or base.op in ("placeholder", "get_attr"):
        return False
    return not _may_share_memory(base) or _is_last(base)


def _tensors_in(result: Any) -> list[Any]:
    """The references among what a network returns; what is nothing at all is left out."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, list | tuple):
        return [ref for item in result for ref in _tensors_in(item)]
    return [] if result is None else [result]
