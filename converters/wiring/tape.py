"""The record of a followed computation, from which the graph can be run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from nfn_graph.converters.wiring.axes import Nest, resolve
from nfn_graph.converters.wiring.values import Signal, Value
from nfn_graph.data import Computation, Neurons, Range, Ref, Step
from nfn_graph.run import OPERATIONS

# The largest number of entries of a constant, because all of them are written out.
_MOST_ENTRIES = 256


class Unrecordable(Exception):
    """Raised if a part of a computation cannot be recorded."""


class Tape:
    """Records what a network computes with the operations of :data:`nfn_graph.run.OPERATIONS`.

    If something cannot be recorded, the network has no computation, and the first reason for that
    is kept. Nothing here ever stops a conversion.
    """

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._keys: dict[str, Ref] = {}
        self._numbers: dict[int, str] = {}
        self._values: dict[int, Value] = {}
        self._outputs: list[Ref] = []
        self._num_inputs = 0
        self.reason: str | None = None

    def lose(self, reason: str) -> None:
        """Notes why the computation cannot be recorded."""
        if self.reason is None:
            self.reason = reason

    def input(self) -> Ref:
        """Records the next input of the network."""
        self._num_inputs += 1
        return self._add(Step("input", (self._num_inputs - 1,)))

    def parameter(self, key: str) -> Ref:
        """Records a tensor of the checkpoint."""
        if key not in self._keys:
            self._keys[key] = self._add(Step("parameter", (len(self._keys),)))
        return self._keys[key]

    def constant(self, tensor: Tensor) -> Ref:
        """Records a tensor that is not part of the checkpoint, entry by entry."""
        if tensor.is_meta or tensor.numel() > _MOST_ENTRIES or not tensor.is_floating_point():
            raise Unrecordable(
                f"it uses a constant of shape {tuple(tensor.shape)} and {tensor.dtype} that is not "
                f"part of the checkpoint"
            )
        return self._add(Step("constant", (_tuples(tensor.tolist()),)))

    def call(self, operation: str, *args: Any, **kwargs: Any) -> Ref:
        """Records an operation; arguments are references and plain values."""
        if operation not in OPERATIONS:
            raise Unrecordable(f"it uses '{operation}', which cannot be run from a graph")
        named = tuple((name, self._argument(arg)) for name, arg in kwargs.items())
        return self._add(Step(operation, tuple(map(self._argument, args)), named))

    def output(self, ref: Any) -> None:
        """Records a result that the network returns."""
        if isinstance(ref, Ref):
            self._outputs.append(ref)
        else:
            self.lose(f"it returns {type(ref).__name__} {ref!r}, which is not a tensor")

    def note(self, ref: Any, value: Any) -> None:
        """Keeps what is known about the axes of a result."""
        if isinstance(ref, Ref) and isinstance(value, Signal):
            self._values[ref.step] = value

    def computation(self, keys: Mapping[str, int], names: Mapping[Nest, str]) -> Computation:
        """Returns the record, once the whole network is known."""
        missing = [key for key in self._keys if key not in keys]
        if missing:
            self.lose(f"it uses '{missing[0]}', which is not part of the graph")
        if not self._outputs:
            self.lose("its operations were not recorded")
        if self.reason is not None:
            return Computation.unknown(self.reason)
        numbers = {ref.step: keys[key] for key, ref in self._keys.items()}
        steps = [
            Step("parameter", (numbers[i],)) if i in numbers else step
            for i, step in enumerate(self._steps)
        ]
        return Computation(tuple(steps), tuple(self._outputs), tuple(self._activations(names)))

    def _activations(self, names: Mapping[Nest, str]) -> list[Neurons]:
        """Returns, for every layer, the last result that holds its neurons and no others."""
        found: dict[str, Neurons] = {}
        for step, value in self._values.items():
            axes = value.neuron_axes if isinstance(value, Signal) else []
            if len(axes) != 1 or not isinstance(value, Signal):
                continue
            (segment, *others) = resolve(value.axes[axes[0]].segments)  # type: ignore[union-attr]
            name = names.get(segment.factors)  # type: ignore[arg-type]
            if name is not None and not others:
                found[name] = Neurons(name, Ref(step), axes[0] - value.rank)
        return [found[name] for name in names.values() if name in found]

    def _add(self, step: Step) -> Ref:
        self._steps.append(step)
        return Ref(len(self._steps) - 1)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, slice):
            bounds = (value.start, value.stop, value.step)
            return Range(*(self._argument(bound) for bound in bounds))
        if isinstance(value, list | tuple):
            return tuple(map(self._argument, value))
        if isinstance(value, Tensor):
            return self.constant(value)
        if isinstance(value, float) and math.isnan(value):
            raise Unrecordable("it uses NaN, which equals nothing")
        if value is None or value is ... or isinstance(value, bool | int | float | str | Ref):
            return value
        raise Unrecordable(f"it uses {type(value).__name__} {value!r} as an argument")


def recording(tape: Tape, record: Callable[[], Any]) -> Any:
    """Returns the result of a recording function; None, and keeps the reason, if it fails."""
    if tape.reason is not None:
        return None
    try:
        return record()
    except Unrecordable as error:
        tape.lose(str(error))
    except Exception as error:  # Arguments of files and modules may be of any kind.
        tape.lose(f"an operation has arguments that cannot be recorded: {error}")
    return None


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
