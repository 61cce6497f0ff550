"""Running networks from their graphs, with 64 inputs, forward and with the backward pass.

This is compared with a loop over the modules; for networks of one shape, also with stacked modules
(`torch.func`) and, for MLPs, with batched products written by hand. Every network has a layout
of its own, as if files were converted one by one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from harness.report import arguments, show
from harness.timing import alternate, ratio
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from nfn_graph import Batch
from nfn_graph.converters import from_module

INPUTS = 64


def mlp(hidden: tuple[int, ...]) -> nn.Module:
    """An MLP of two inputs and one output."""
    sizes = (2, *hidden, 1)
    layers: list[nn.Module] = []
    for first, second in pairwise(sizes):
        layers += [nn.Linear(first, second), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn(width: int) -> nn.Module:
    """A CNN of two convolutions."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10),
    )  # fmt: skip


def cases() -> dict[str, tuple[list[nn.Module], Tensor]]:
    """The networks of every row, and their inputs."""
    points, images = torch.randn(INPUTS, 2), torch.randn(INPUTS, 1, 16, 16)
    hidden = [tuple(8 + (7 * i + 5 * j) % 25 for j in range(1 + i % 3)) for i in range(256)]
    return {
        "256 MLPs 2-32-32-1": ([mlp((32, 32)) for _ in range(256)], points),
        "256 MLPs, mixed": ([mlp(sizes) for sizes in hidden], points),
        "64 CNNs of width 8": ([cnn(8) for _ in range(64)], images),
        "64 CNNs, mixed": ([cnn(4 + i % 13) for i in range(64)], images),
    }


def main() -> None:
    """Times all cases."""
    args = arguments(__doc__, "device")
    rows = []
    for name, (modules, x) in cases().items():
        rows.append(measure(name, [m.to(args.device) for m in modules], x.to(args.device), args))
        print(".", end="", flush=True)
    show(rows, "Networks run from their graphs", args.json)


def measure(name: str, modules: list[nn.Module], x: Tensor, args: Any) -> dict[str, object]:
    """Returns one row of the table."""
    batch = Batch.from_data_list([from_module(module) for module in modules])
    ours = {
        key: batch[key]["x" if isinstance(key, str) else "edge_attr"].requires_grad_()
        for key in (*batch.spec.neuron, *batch.spec.weight)
    }
    batch = batch.with_features(ours)
    own = [tensor for tensor in ours.values() if tensor.numel()]
    theirs = [p for module in modules for p in module.parameters()]
    functions = {
        **_passes("ours", lambda: batch.run(x), own),
        **_passes("loop", lambda: torch.stack([module(x) for module in modules]), theirs),
    }
    is_uniform = len({tuple(p.shape for p in module.parameters()) for module in modules}) == 1
    if is_uniform:
        stacked, _ = stack_module_state(modules)  # type: ignore[arg-type]
        base = copy.deepcopy(modules[0])

        def one(parameters: Mapping[str, Tensor]) -> Tensor:
            result: Tensor = functional_call(base, dict(parameters), (x,))
            return result

        functions |= _passes("stacked", lambda: torch.vmap(one)(stacked), list(stacked.values()))
        if x.dim() == 2:
            tensors = list(stacked.values())
            functions |= _passes("products", lambda: batched_products(tensors, x), tensors)
    times = alternate(functions, 3.0 if args.quick else 10.0, args.device)
    row: dict[str, object] = {"networks": name}
    for kind in ("forward", "backward"):
        row[f"{kind}, ms"] = median(times[f"ours {kind}"])
        for other in ("loop", "stacked", "products"):
            is_known = f"{other} {kind}" in times
            row[f"{kind} / {other}"] = (
                ratio(times, f"ours {kind}", f"{other} {kind}") if is_known else ""
            )
    return row


def batched_products(tensors: list[Tensor], x: Tensor) -> Tensor:
    """Runs MLPs of one shape, given their weights and biases in turn."""
    y = x.t().expand(tensors[0].shape[0], -1, -1)
    for weight, bias in zip(tensors[::2], tensors[1::2], strict=True):
        y = torch.baddbmm(bias.unsqueeze(-1), weight, y)
        y = y.relu() if weight is not tensors[-2] else y
    return y.mT


def _passes(
    name: str, forward: Callable[[], Tensor], leaves: list[Tensor]
) -> dict[str, Callable[[], object]]:
    def without_gradients() -> Tensor:
        with torch.no_grad():
            return forward()

    def with_gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward().sum(), leaves, allow_unused=True)

    return {f"{name} forward": without_gradients, f"{name} backward": with_gradients}


if __name__ == "__main__":
    main()
