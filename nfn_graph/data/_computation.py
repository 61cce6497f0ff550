"""The computation of a network with its tensors, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import EllipsisType
from typing import Any, Union

from nfn_graph.messages import UserError


def own_fields(value: Any) -> dict[str, Any]:
    """The fields of a data class without cached values.

    `torch.load` refuses the types of some cached values, and hashes differ between processes.
    """
    return {field.name: value.__dict__[field.name] for field in fields(value)}


@dataclass(frozen=True, repr=False)
class Ref:
    """The result of an earlier step.

    Args:
        step: The number of the step.

    Example:
        >>> print(Ref(3))
        %3
    """

    step: int

    def __repr__(self) -> str:
        return f"%{self.step}"


@dataclass(frozen=True, repr=False)
class Range:
    """A hashable replacement for `slice`, whose bounds may be results of steps.

    Args:
        start: The first index.
        stop: The index after the last one.
        step: The distance between neighbouring indices.

    Example:
        >>> print(Range(1, Ref(3)))
        1:%3:
    """

    start: int | Ref | None = None
    stop: int | Ref | None = None
    step: int | Ref | None = None

    def __repr__(self) -> str:
        parts = (self.start, self.stop, self.step)
        return ":".join("" if part is None else str(part) for part in parts)


# mypy resolves a recursive alias only if it is written with Union.
Argument = Union[  # noqa: UP007
    Ref, Range, EllipsisType, None, bool, int, float, str, tuple["Argument", ...]
]

#: An operation with its arguments after the first one.
View = tuple[str, tuple[Argument, ...]]


@dataclass(frozen=True)
class Step:
    """One operation.

    Args:
        operation: The name in :data:`nfn_graph.run.OPERATIONS`. The operations `input` and
            `parameter` take the number of the input, or of the tensor in the order of the layout's
            placements.
        args: The positional arguments.
        kwargs: The named arguments.

    Example:
        >>> print(Step("flatten", (Ref(0),), (("start_dim", 1),)))
        flatten(%0, start_dim=1)
    """

    operation: str
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()

    def __str__(self) -> str:
        shown = [*map(repr, self.args), *(f"{name}={arg!r}" for name, arg in self.kwargs)]
        return f"{self.operation}({', '.join(shown)})".replace("Ellipsis", "...")

    def renamed(self, moved: Mapping[int, Ref]) -> Step:
        """Renumbers the operands of the step."""
        args = tuple(_renamed(arg, moved) for arg in self.args)
        kwargs = tuple((name, _renamed(arg, moved)) for name, arg in self.kwargs)
        return Step(self.operation, args, kwargs)

    @property
    def operands(self) -> Iterator[Ref]:
        """The results that the step reads."""
        return _refs((*self.args, *(arg for _, arg in self.kwargs)))


@dataclass(frozen=True)
class Neurons:
    """The result that holds the activations of a neuron type.

    Args:
        name: The neuron type.
        value: The result.
        axis: The axis of the neurons, counted from the end.

    Example:
        >>> Neurons("hidden1", Ref(2), axis=-1).name
        'hidden1'
    """

    name: str
    value: Ref
    axis: int


@dataclass(frozen=True)
class Computation:
    """The computation of a network, without tensors: networks that differ in width share it.

    Converters record it while they follow a network, and :meth:`nfn_graph.WeightGraph.run`
    carries it out. Tensors are identified by their place among the layout's placements, so the
    names in a checkpoint do not matter.

    Args:
        steps: The operations in order.
        outputs: The results that the network returns.
        activations: The results that hold the activations of neuron types, as far as they are
            known.
        reason: The reason why the computation is not known, in which case there are no steps.

    Example:
        >>> steps = Step("input", (0,)), Step("parameter", (0,)), Step("linear", (Ref(0), Ref(1)))
        >>> print(Computation(steps, outputs=(Ref(2),)))
        %0 = input(0)
        %1 = parameter(0)
        %2 = linear(%0, %1)
        return %2
    """

    steps: tuple[Step, ...] = ()
    outputs: tuple[Ref, ...] = ()
    activations: tuple[Neurons, ...] = ()
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.reason is None and not (self.steps and self.outputs):
            raise UserError("Expected steps and outputs, or the reason why there are none")
        for number, step in enumerate(self.steps):
            if any(not 0 <= ref.step < number for ref in step.operands):
                raise UserError(f"Expected operands from earlier steps (got %{number} = {step})")
        named = [*self.outputs, *(neurons.value for neurons in self.activations)]
        if any(not 0 <= ref.step < len(self.steps) for ref in named):
            raise UserError(f"Expected results of {len(self.steps)} steps (got {named})")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.steps, self.outputs, self.activations, self.reason))

    def __getstate__(self) -> dict[str, Any]:
        return own_fields(self)

    @classmethod
    def unknown(cls, reason: str) -> Computation:
        """Makes an unknown computation, which gives the reason why it is not known."""
        return cls(reason=reason)

    def reading(self, views: Mapping[int, Sequence[View]]) -> Computation:
        """The same computation for tensors that are stored in another form.

        Args:
            views: For the numbers of such tensors, the operations that turn a stored tensor into
                the one that the computation uses: names, and the arguments after the tensor.
        """
        steps: list[Step] = []
        moved: dict[int, Ref] = {}
        for number, step in enumerate(self.steps):
            steps.append(step.renamed(moved))
            tensor = step.args[0] if step.operation == "parameter" else None
            for operation, args in views.get(tensor, ()) if isinstance(tensor, int) else ():
                steps.append(Step(operation, (Ref(len(steps) - 1), *args)))
            moved[number] = Ref(len(steps) - 1)
        outputs = tuple(moved[ref.step] for ref in self.outputs)
        activations = (replace(n, value=moved[n.value.step]) for n in self.activations)
        return Computation(tuple(steps), outputs, tuple(activations), self.reason)

    @cached_property
    def last_uses(self) -> tuple[tuple[int, ...], ...]:
        """For every step, the results that no later step needs."""
        last = {ref.step: number for number, step in enumerate(self.steps) for ref in step.operands}
        done: list[list[int]] = [[] for _ in self.steps]
        for result, number in last.items():
            done[number].append(result)
        return tuple(map(tuple, done))

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        """The numbers of the tensors that the computation reads."""
        return tuple(dict.fromkeys(self._numbers("parameter")))

    @cached_property
    def num_inputs(self) -> int:
        """The number of inputs of the network."""
        return 1 + max(self._numbers("input"), default=-1)

    def _numbers(self, operation: str) -> list[int]:
        found = [step.args[0] for step in self.steps if step.operation == operation]
        return [number for number in found if isinstance(number, int)]

    def __str__(self) -> str:
        if self.reason is not None:
            return f"not known: {self.reason}"
        lines = [f"%{number} = {step}" for number, step in enumerate(self.steps)]
        return "\n".join([*lines, f"return {', '.join(map(str, self.outputs))}"])


def _refs(value: object) -> Iterator[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, Range):
        yield from _refs((value.start, value.stop, value.step))
    elif isinstance(value, tuple):
        for item in value:
            yield from _refs(item)


def _renamed(value: Argument, moved: Mapping[int, Ref]) -> Any:
    if isinstance(value, Ref):
        return moved[value.step]
    if isinstance(value, Range):
        return Range(*(_renamed(bound, moved) for bound in (value.start, value.stop, value.step)))
    return tuple(_renamed(v, moved) for v in value) if isinstance(value, tuple) else value
