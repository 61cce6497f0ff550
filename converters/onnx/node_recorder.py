"""Records the nodes of an ONNX model, so that the graph can be run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nfn_graph.converters.onnx.node import Node
from nfn_graph.converters.wiring import Weight, Wiring
from nfn_graph.converters.wiring.tape import Unrecordable, recording
from nfn_graph.data import Ref

_SAME = frozenset({"Identity", "Dropout"})
_FUNCTIONS = {
    "Relu": "relu", "Sigmoid": "sigmoid", "Tanh": "tanh", "Softplus": "softplus",
    "Softsign": "softsign", "Erf": "erf", "Exp": "exp", "Log": "log", "Sqrt": "sqrt",
    "Reciprocal": "reciprocal", "Neg": "neg", "Abs": "abs", "Sign": "sign", "Floor": "floor",
    "Ceil": "ceil", "Sin": "sin", "Cos": "cos", "Tan": "tan", "Sinh": "sinh", "Cosh": "cosh",
    "Asin": "asin", "Acos": "acos", "Atan": "atan", "Mish": "mish", "HardSwish": "hardswish",
    "Add": "add", "Sub": "sub", "Mul": "mul", "Div": "truediv", "Pow": "pow", "MatMul": "matmul",
    "GlobalAveragePool": "adaptive_avg_pool", "GlobalMaxPool": "adaptive_max_pool",
}  # fmt: skip
_NUMBERS = {"LeakyRelu": ("leaky_relu", 0.01), "Elu": ("elu", 1.0), "Celu": ("celu", 1.0)}


class OnnxRecorder:
    """Records the nodes of a model on the tape of its wiring."""

    def __init__(self, wiring: Wiring) -> None:
        self._tape = wiring.tape
        self._refs: dict[str, Any] = {}

    def input(self, name: str) -> None:
        """Records an input of the model."""
        self._refs[name] = self._tape.input()

    def record(self, node: Node, kind: str, results: list[Any]) -> None:
        """Records a node."""
        ref = recording(self._tape, lambda: self._record(node, kind))
        if node.outputs:
            self._refs[node.outputs[0]] = ref
            self._tape.note(ref, results[0] if results else None)

    def output(self, name: str) -> None:
        """Records an output of the model."""
        self._tape.output(self._refs.get(name))

    def _record(self, node: Node, kind: str) -> Any:
        if any(node.outputs[1:]):
            raise Unrecordable(f"'{kind}' has several results")
        if kind in _SAME:
            return self._operand(node, 0)
        if kind in ("GlobalAveragePool", "GlobalMaxPool"):
            return self._call(f"{_FUNCTIONS[kind]}{node.rank() - 2}d", node, 1, 1)
        if kind in _FUNCTIONS:
            return self._call(_FUNCTIONS[kind], node, len(node.names))
        if kind in _NUMBERS:
            name, default = _NUMBERS[kind]
            return self._call(name, node, 1, node.decimal("alpha", default))
        handler = _HANDLERS.get(kind)
        if handler is None:
            raise Unrecordable(f"it uses '{kind}' of ONNX, which cannot be run from a graph")
        return handler(self, node)

    def _call(self, name: str, node: Node, count: int, *rest: Any) -> Ref:
        return self._tape.call(name, *(self._operand(node, i) for i in range(count)), *rest)

    def _operand(self, node: Node, index: int) -> Any:
        name = node.names[index]
        if name in self._refs:
            return self._refs[name]
        tensor = node.tensors.get(name)
        if isinstance(node.inputs[index], Weight):
            self._refs[name] = self._tape.parameter(name)
            return self._refs[name]
        if tensor is not None and tensor.numel() == 1:
            return tensor.item()
        raise Unrecordable(f"it computes with '{name}', which is not a weight")

    def _optional(self, node: Node, index: int) -> Any:
        return self._operand(node, index) if node.has(index) else None

    def conv(self, node: Node) -> Ref:
        """Records a convolution."""
        spatial = node.rank() - 2
        if node.text("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
            raise Unrecordable("the padding of its convolutions depends on the size of the input")
        strides, dilations = (
            tuple(node.integers(name) or [1] * spatial) for name in ("strides", "dilations")
        )
        x = self._operand(node, 0)
        padding, pads = _pads(node, spatial)
        if padding is None:
            x = self._tape.call("pad", x, pads)
        rest = [strides, padding or (0,) * spatial, dilations, node.integer("group", 1)]
        weight, bias = self._operand(node, 1), self._optional(node, 2)
        return self._tape.call(f"conv{spatial}d", x, weight, bias, *rest)

    def gemm(self, node: Node) -> Ref:
        """Records a linear layer."""
        if (node.decimal("alpha", 1.0), node.decimal("beta", 1.0)) != (1.0, 1.0):
            raise Unrecordable("its Gemm scales its operands")
        weight = self._operand(node, 1)
        weight = weight if node.integer("transB", 0) else self._tape.call("t", weight)
        y = self._tape.call("linear", self._operand(node, 0), weight, None)
        return self._tape.call("add", y, self._operand(node, 2)) if node.has(2) else y

    def batch_norm(self, node: Node) -> Ref:
        """Records a batch norm in eval mode."""
        if node.integer("training_mode", 0):
            raise Unrecordable("its batch norms are in training mode")
        scale, bias, mean, variance = (self._operand(node, i) for i in range(1, 5))
        eps = node.decimal("epsilon", 1e-5)
        x = self._operand(node, 0)
        return self._tape.call("batch_norm", x, mean, variance, scale, bias, False, 0.0, eps)

    def pool(self, kind: str, node: Node) -> Ref:
        """Records a pooling operation."""
        spatial = node.rank() - 2
        kernel = tuple(node.integers("kernel_shape") or ())
        padding, _ = _pads(node, spatial)
        is_plain = node.text("auto_pad", "NOTSET") in ("NOTSET", "VALID")
        dilations = tuple(node.integers("dilations") or [1] * spatial)
        if padding is None or not is_plain or node.integer("ceil_mode", 0):
            raise Unrecordable("its pooling has different padding on its two sides")
        strides = tuple(node.integers("strides") or [1] * spatial)
        x = self._operand(node, 0)
        if kind == "max":
            return self._tape.call(f"max_pool{spatial}d", x, kernel, strides, padding, dilations)
        if set(dilations) != {1}:
            raise Unrecordable("its average pooling is dilated")
        counts = bool(node.integer("count_include_pad", 0))
        rest = [kernel, strides, padding, False, counts]
        return self._tape.call(f"avg_pool{spatial}d", x, *rest)

    def flatten(self, node: Node) -> Ref:
        """Records a flatten of all axes but the first."""
        if node.integer("axis", 1) != 1:
            raise Unrecordable("it flattens its batch")
        return self._call("flatten", node, 1, 1)

    def reshape(self, node: Node) -> Ref:
        """Records a reshape that keeps the batch axis."""
        stored = node.tensors.get(node.names[1]) if node.has(1) else None
        batch = (node.shape(0) or (None,))[0]
        if stored is None or stored.is_floating_point() or node.integer("allowzero", 0):
            raise Unrecordable("its reshapes depend on sizes that it computes")
        first, *rest = (int(n) for n in stored.reshape(-1).tolist())
        if 0 in rest:
            raise Unrecordable("its reshapes copy sizes")
        x = self._operand(node, 0)
        if first == 0:
            return self._tape.call("reshape", x, (self._tape.call("size", x, 0), *rest))
        # A literal batch size stands for any batch size if the other sizes are known.
        if -1 in rest or first not in (-1, batch):
            raise Unrecordable("its reshapes only fit one batch size")
        return self._tape.call("reshape", x, (-1, *rest))

    def transpose(self, node: Node) -> Ref:
        """Records a permutation of axes."""
        order = node.integers("perm") or list(range(node.rank()))[::-1]
        return self._call("permute", node, 1, tuple(order))

    def concat(self, node: Node) -> Ref:
        """Records a concatenation."""
        operands = tuple(self._operand(node, i) for i in range(len(node.names)))
        return self._tape.call("cat", operands, node.integer("axis"))

    def softmax(self, name: str, node: Node) -> Ref:
        """Records a softmax along the last axis, for which all versions of ONNX agree."""
        axis = node.integer("axis", -1)
        if axis % node.rank() != node.rank() - 1:
            raise Unrecordable("its softmax runs along an axis that is not the last one")
        return self._call(name, node, 1, -1)


def _pads(node: Node, spatial: int) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Returns the padding if both ends are equal, and all of it in torch's format."""
    pads = node.integers("pads") or [0] * (2 * spatial)
    begin, end = tuple(pads[:spatial]), tuple(pads[spatial:])
    both = zip(reversed(begin), reversed(end), strict=True)
    return begin if begin == end else None, tuple(n for pair in both for n in pair)


_HANDLERS: dict[str, Callable[[OnnxRecorder, Node], Ref]] = {
    "Conv": OnnxRecorder.conv,
    "Gemm": OnnxRecorder.gemm,
    "BatchNormalization": OnnxRecorder.batch_norm,
    "MaxPool": lambda recorder, node: recorder.pool("max", node),
    "AveragePool": lambda recorder, node: recorder.pool("avg", node),
    "Flatten": OnnxRecorder.flatten,
    "Reshape": OnnxRecorder.reshape,
    "Transpose": OnnxRecorder.transpose,
    "Concat": OnnxRecorder.concat,
    "Softmax": lambda recorder, node: recorder.softmax("softmax", node),
    "LogSoftmax": lambda recorder, node: recorder.softmax("log_softmax", node),
}
