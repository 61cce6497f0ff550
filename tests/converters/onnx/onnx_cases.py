"""ONNX models by name, some of which compute sizes."""

from __future__ import annotations

import onnx
import torch
from onnx_models import node, weights

Case = tuple[list[onnx.NodeProto], dict[str, torch.Tensor], tuple[int, ...], str]


def cases() -> dict[str, Case]:
    """Networks by name: nodes, initialisers, the input's shape, the outputs."""
    shape_of_two = {"s": torch.tensor([2, -1])}
    return {
        "gemm and matmul": (
            [
                node("Gemm", "x a b", "h", transB=1),
                node("Tanh", "h", "i"),
                node("Gemm", "i c d", "j", alpha=0.5),
                node("Relu", "j", "k"),
                node("MatMul", "k e", "l"),
                node("Add", "f l", "y"),
            ],
            weights(a=(5, 3), b=(5,), c=(5, 4), d=(1, 4), e=(4, 2), f=(2,)),
            (2, 3),
            "y",
        ),
        "transposed initialiser": (
            [
                node("Transpose", "a", "t"),
                node("MatMul", "x t", "h"),
                node("Sin", "h", "i"),
                node("MatMul", "i b", "y"),
            ],
            weights(a=(5, 3), b=(5, 2)),
            (2, 3),
            "y",
        ),
        "conv, norm, flatten": (
            [
                node("Conv", "x a b", "h", kernel_shape=[3, 2], pads=[1, 0, 1, 1]),
                node("BatchNormalization", "h c d m v", "i"),
                node("LeakyRelu", "i", "j"),
                node("MaxPool", "j", "k", kernel_shape=[2, 2], strides=[2, 2]),
                node("Flatten", "k", "l"),
                node("Gemm", "l e f", "y"),
            ],
            weights(a=(4, 2, 3, 2), b=(4,), c=(4,), d=(4,), m=(4,), v=(4,), e=(36, 3), f=(3,)),
            (2, 2, 6, 6),
            "y",
        ),
        "permute and reshape": (
            [
                node("Conv", "x a", "h"),
                node("Transpose", "h", "i", perm=[0, 2, 3, 1]),
                node("Reshape", "i s", "j"),
                node("MatMul", "j b", "y"),
            ],
            {**weights(a=(4, 2, 3, 3), b=(36, 3)), **shape_of_two},
            (2, 2, 5, 5),
            "y",
        ),
        "residual and self": (
            [
                node("Conv", "x a", "h", pads=[1, 1, 1, 1]),
                node("Conv", "h b c", "i", pads=[1, 1, 1, 1]),
                node("Relu", "i", "j"),
                node("Conv", "j d", "k"),
                node("Add", "k h", "l"),
                node("Conv", "l e", "m"),
                node("Sum", "m l", "n"),
                node("GlobalAveragePool", "n", "o"),
                node("Flatten", "o", "p"),
                node("MatMul", "p f", "y"),
            ],
            weights(
                a=(4, 2, 3, 3), b=(5, 4, 3, 3), c=(5,), d=(4, 5, 1, 1), e=(4, 4, 1, 1), f=(4, 3)
            ),
            (2, 2, 5, 5),
            "y",
        ),
        "concat, split, two heads": (
            [
                node("Conv", "x a", "h"),
                node("Conv", "x b", "i"),
                node("Concat", "h i", "j", axis=1),
                node("Conv", "j c", "y"),
                node("Split", "j t", "k l", axis=1),
                node("Conv", "l d", "z"),
            ],
            {
                **weights(a=(4, 2, 1, 1), b=(3, 2, 1, 1), c=(2, 7, 1, 1), d=(2, 3, 1, 1)),
                "t": torch.tensor([4, 3]),
            },
            (2, 2, 3, 3),
            "y z",
        ),
        "depthwise, transposed conv, PRelu": (
            [
                node("Conv", "x a", "h"),
                node("Conv", "h b c", "i", group=4),
                node("PRelu", "i p", "j"),
                node("ConvTranspose", "j d e", "k"),
                node("InstanceNormalization", "k q r", "l"),
                node("ReduceMax", "l", "m", axes=[2, 3], keepdims=0),
                node("MatMul", "m f", "y"),
            ],
            weights(
                a=(4, 2, 1, 1),
                b=(4, 1, 2, 2),
                c=(4,),
                p=(4, 1, 1),
                d=(4, 5, 2, 3),
                e=(5,),
                q=(5,),
                r=(5,),
                f=(5, 2),
            ),
            (2, 2, 4, 4),
            "y",
        ),
        "matmul from the left, layer norm": (
            [
                node("MatMul", "a x", "h"),
                node("Transpose", "h", "i"),
                node("LayerNormalization", "i b c", "j"),
                node("Clip", "j", "k"),
                node("MatMul", "k d", "y"),
            ],
            weights(a=(5, 3), b=(5,), c=(5,), d=(5, 2)),
            (3, 2),
            "y",
        ),
        "resize, pad, slice": (
            [
                node("Conv", "x a", "h"),
                node("Resize", "h none scales", "i", mode="nearest"),
                node("Pad", "i pads", "j"),
                node("Slice", "j one many two", "k"),
                node("Conv", "k b", "l"),
                node("Pad", "l nothing", "m"),
                node("GlobalMaxPool", "m", "n"),
                node("Squeeze", "n sides", "o"),
                node("MatMul", "o c", "y"),
            ],
            {
                **weights(a=(4, 2, 1, 1), b=(5, 4, 3, 3), c=(5, 2), none=(0,)),
                "scales": torch.tensor([1.0, 1.0, 2.0, 2.0]),
                "pads": torch.tensor([0, 0, 1, 0, 0, 0, 0, 1]),
                "nothing": torch.zeros(8, dtype=torch.int64),
                "one": torch.tensor([1]),
                "many": torch.tensor([2**31 - 1]),
                "two": torch.tensor([2]),
                "sides": torch.tensor([2, 3]),
            },
            (2, 2, 3, 3),
            "y",
        ),
        "axes that come and go, equal parts": (
            [
                node("MatMul", "x a", "h"),
                node("Unsqueeze", "h last", "i"),
                node("Conv", "i b", "j"),
                node("Split", "j", "k l", axis=1),
                node("Slice", "l zero three one", "m"),
                node("Gather", "m index", "n", axis=2),
                node("ReduceMean", "k", "o", axes=[2], keepdims=0),
                node("MatMul", "n c", "p"),
                node("MatMul", "o d", "q"),
                node("Add", "p q", "y"),
            ],
            {
                **weights(a=(3, 4), b=(6, 4, 1), c=(3, 2), d=(3, 2)),
                "last": torch.tensor([-1]),
                "zero": torch.tensor([0]),
                "one": torch.tensor([1]),
                "three": torch.tensor([3]),
                "index": torch.tensor(0),
            },
            (2, 3),
            "y",
        ),
        "reshape that keeps the batch": (
            [
                node("Conv", "x a", "h"),
                node("Reshape", "h kept", "i"),
                node("Transpose", "i", "j", perm=[0, 2, 1]),
                node("MatMul", "j b", "y"),
            ],
            {**weights(a=(4, 2, 3, 3), b=(4, 3)), "kept": torch.tensor([0, 0, -1])},
            (2, 2, 5, 5),
            "y",
        ),
        "shapes that are computed": (
            [
                node("Conv", "x a", "h"),
                node("Shape", "h", "s"),
                node("Gather", "s zero", "n"),
                node("Concat", "n minus", "t", axis=0),
                node("Reshape", "h t", "i"),
                node("Gemm", "i b", "y"),
            ],
            {
                **weights(a=(4, 2, 1, 1), b=(36, 3)),
                "zero": torch.tensor([0]),
                "minus": torch.tensor([-1]),
            },
            (2, 2, 3, 3),
            "y",
        ),
    }


ROW, ONE = torch.tensor([0]), torch.tensor(1)


FREE = "batch"


SizedCase = tuple[list[onnx.NodeProto], dict[str, torch.Tensor], tuple[int, ...], list[int | None]]


def sized(*shape: onnx.NodeProto) -> SizedCase:
    """A convolution whose result is flattened to a size that the model computes."""
    return (
        [
            node("Conv", "x a", "h"), node("Relu", "h", "r"), node("Shape", "r", "s"), *shape,
            node("Reshape", "r t", "i"), node("Gemm", "i b", "y"),
        ],
        {
            **weights(a=(4, 2, 1, 1), b=(36, 3)), "zero": ROW, "none": torch.tensor(0),
            "one": torch.tensor([1]), "four": torch.tensor([4]), "minus": torch.tensor([-1]),
            "many": torch.tensor([2**40]),
        },
        (2, 2, 3, 3),
        [FREE, 2, 3, 3],
    )  # fmt: skip


SIZED_CASES: dict[str, SizedCase] = {
    "a part of a shape": sized(
        node("Slice", "s zero one zero", "n"), node("Concat", "n minus", "t", axis=0)
    ),
    "an entry of a shape": sized(
        node("Gather", "s none", "n"),
        node("Unsqueeze", "n zero", "u"),
        node("Concat", "u minus", "t", axis=0),
    ),
    "a shape that is cast": sized(
        node("Cast", "s", "c", to=onnx.TensorProto.INT32),
        node("Slice", "c zero one", "n"),
        node("Cast", "n", "l", to=onnx.TensorProto.INT64),
        node("Concat", "l minus", "t", axis=0),
    ),
    "a product of sizes": sized(
        node("Slice", "s one many", "rest"),
        node("ReduceProd", "rest", "p", keepdims=1),
        node("Mul", "p one", "q"),
        node("Concat", "minus q", "t", axis=0),
    ),
    "a chosen size": sized(
        node("Slice", "s zero one", "n"),
        node("Div", "n one", "d"),
        node("Where", "one d d", "w"),
        node("Concat", "w minus", "t", axis=0),
    ),
    "a size where the batch is open, resized": (
        [
            node("MatMul", "x a", "h"),
            node("Shape", "h", "s"),
            node("Gather", "s zero", "n"),
            node("Concat", "n chw", "t", axis=0),
            node("Reshape", "h t", "i"),
            node("Resize", "i  scales", "j", mode="nearest"),
            node("Conv", "j b", "k"),
            node("GlobalAveragePool", "k", "l"),
            node("Flatten", "l", "m"),
            node("MatMul", "m c", "y"),
        ],
        {
            **weights(a=(3, 24), b=(5, 6, 1, 1), c=(5, 2)), "zero": ROW,
            "chw": torch.tensor([6, 2, 2]), "scales": torch.tensor([1.0, 1.0, 2.0, 2.0]),
        },
        (2, 3),
        [FREE, 3],
    ),
    "the place of the largest output": (
        [
            node("Gemm", "x a", "h"),
            node("Relu", "h", "r"),
            node("Gemm", "r b", "z"),
            node("ArgMax", "z", "i", axis=1, keepdims=0),
            node("Cast", "i", "y", to=onnx.TensorProto.FLOAT),
        ],
        weights(a=(3, 8), b=(8, 4)),
        (5, 3),
        [FREE, 3],
    ),
    "the places of the two largest outputs": (
        [
            node("Gemm", "x a", "h"),
            node("Relu", "h", "r"),
            node("Gemm", "r b", "z"),
            node("TopK", "z k", "v i"),
            node("Cast", "i", "f", to=onnx.TensorProto.FLOAT),
            node("Add", "f v", "y"),
        ],
        {**weights(a=(3, 8), b=(8, 4)), "k": torch.tensor([2])},
        (5, 3),
        [FREE, 3],
    ),
    "the largest output as a row of zeros with a one": (
        [
            node("Gemm", "x a", "h"),
            node("Relu", "h", "r"),
            node("Gemm", "r b", "z"),
            node("ArgMin", "z", "i", axis=-1, keepdims=0),
            node("OneHot", "i depth values", "y"),
        ],
        {
            **weights(a=(3, 8), b=(8, 4)), "depth": torch.tensor(4),
            "values": torch.tensor([0.5, 2.0]),
        },
        (5, 3),
        [FREE, 3],
    ),
    "a matrix before a vector": (
        [
            node("MatMul", "a x", "h"),
            node("Add", "h b", "i"),
            node("Relu", "i", "r"),
            node("MatMul", "c r", "y"),
        ],
        weights(a=(8, 3), b=(8,), c=(2, 8)),
        (3,),
        [3],
    ),
    "the deviations of a policy": (
        [
            node("Gemm", "x a", "h"),
            node("Tanh", "h", "r"),
            node("Gemm", "r b", "m"),
            node("Exp", "log_std", "e"),
            node("Shape", "m", "s"),
            node("Expand", "e s", "d"),
        ],
        weights(a=(3, 8), b=(8, 2), log_std=(2,)),
        (5, 3),
        [FREE, 3],
    ),
    "a temperature, and a bound": (
        [
            node("Gemm", "x a", "h"),
            node("Clip", "h  most", "r"),
            node("Gemm", "r b", "m"),
            node("Div", "m temperature", "y"),
        ],
        weights(a=(3, 8), b=(8, 2), temperature=(), most=()),
        (5, 3),
        [FREE, 3],
    ),
}  # fmt: skip
