r"""The neurons of a network that can be rescaled, and the tensors that change with them.

A neuron whose activation function satisfies :math:`f(s z) = s f(z)` can be multiplied by `s`: its
incoming weights and its bias are multiplied, and its outgoing weights are divided by `s`. ReLU
allows every positive `s`, odd functions such as tanh allow `s = -1`. This module decides whether a
whole network allows it. It follows every result of the recorded computation, together with the axis
along which it is multiplied; the outputs must not change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from nfn_graph.data import Computation, Layout, Placement, Range, Ref, Step
from nfn_graph.spec import Key, NetworkSpec

Kind = Literal["scale", "sign", "phase"]
_Where = Literal["alone", "outer", "inner"]
_Sources = tuple[tuple[Placement, ...], ...]

_LINEAR = frozenset({"positive", "detach", "neg"})
_HOMOGENEOUS = _LINEAR | {"relu", "leaky_relu", "prelu", "abs"}
_ODD = _LINEAR | {"tanh", "sin", "tan", "sinh", "asin", "atan", "asinh", "atanh", "erf"}
_ODD |= {"softsign", "tanhshrink", "hardshrink", "softshrink"}
_SHAPES = frozenset({"shape", "size", "dim", "numel"})
_EXTREMES = frozenset({"amax", "amin"})
_REDUCTIONS = _EXTREMES | {"mean", "sum"}
# The positions of the statistics among the arguments of norm layers, and those of weight and bias.
_NORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "batch_norm": ((1, 2), (3, 4)),
    "instance_norm": ((1, 2), (3, 4)),
    "group_norm": ((), (2, 3)),
    "layer_norm": ((), (2, 3)),
    "rms_norm": ((), (2,)),
}
# The names of the arguments at these positions; the statistics have none.
_NAMES = ("", "", "weight", "bias", "bias")


class Taps(NamedTuple):
    """A range of taps of a store."""

    store: Key
    first: int
    number: int


@dataclass(frozen=True)
class Rescaling:
    """The way in which the neurons of a type can be rescaled.

    Args:
        name: The neuron type.
        kind: `scale` for positive factors, `sign` for signs, `phase` for signs and shifts of sines.
        incoming: The taps that are multiplied by the factor of the neuron they lead to.
        outgoing: The taps that are divided by the factor of the neuron they come from.
        measured: The taps of `incoming` that no later type changes; they determine the factor.
        w0: The factor inside the sine, if the kind is `phase`.
    """

    name: str
    kind: Kind
    incoming: tuple[Taps, ...]
    outgoing: tuple[Taps, ...]
    measured: tuple[Taps, ...] = ()
    w0: float = 1.0


class _Along(NamedTuple):
    """An axis of a result, counted from the end, along which the result is multiplied by factors.

    After a flatten, the neurons are the outer or the inner part of their axis.
    """

    axis: int
    power: int = 1
    where: _Where = "alone"


_State = tuple[_Along, ...]


class _RefusedError(Exception):
    """The reason why a step does not allow the factors; `step` is the number of steps before it."""

    def __init__(self, reason: str, step: int = -1) -> None:
        super().__init__(reason)
        self.step = step


def rescalings(layout: Layout) -> tuple[tuple[Rescaling, ...], tuple[tuple[str, str], ...]]:
    """The neuron types that can be rescaled, in order, and the reasons why others cannot."""
    return _rescalings(layout.spec, layout.sources, layout.computation)


@lru_cache(maxsize=256)
def _rescalings(
    spec: NetworkSpec, sources: _Sources, computation: Computation
) -> tuple[tuple[Rescaling, ...], tuple[tuple[str, str], ...]]:
    found: list[tuple[int, Rescaling]] = []
    left: list[tuple[str, str]] = []
    parents = {parent for neuron in spec.neurons for parent in neuron.parents}
    for neuron in spec.neurons:
        if neuron.fixed:
            continue
        if neuron.role or neuron.parents or neuron.name in parents:
            what = "a role type" if neuron.role else "nested in other neurons, or contains others"
            left.append((neuron.name, f"it is {what}"))
        elif computation.reason is not None:
            left.append((neuron.name, f"its computation is not known: {computation.reason}"))
        else:
            try:
                found.append(_rescaling(neuron.name, sources, computation))
            except _RefusedError as error:
                left.append((neuron.name, str(error)))
    ordered = [rescaling for _, rescaling in sorted(found, key=lambda item: item[0])]
    for i, rescaling in enumerate(ordered):
        rest = [later.name for later in ordered[i:]]
        measured = tuple(
            taps
            for taps in rescaling.incoming
            if isinstance(taps.store, str) or taps.store[0] not in rest
        )
        ordered[i] = replace(rescaling, measured=measured)
    return tuple(ordered), tuple(left)


def _rescaling(name: str, sources: _Sources, computation: Computation) -> tuple[int, Rescaling]:
    refused = _RefusedError("")
    still = _kept_tensors(computation)
    kinds: tuple[Kind, ...] = ("scale", "sign")
    for kind in kinds:
        try:
            follow = _Follow(name, kind, sources, computation, still)
            first = follow.run()
        except _RefusedError as error:
            # The kind that was followed further gives the more helpful reason.
            refused = error if error.step >= refused.step else refused
            continue
        incoming, outgoing = follow.taps()
        if not incoming or not outgoing:
            raise _RefusedError("these neurons have no incoming or no outgoing weights")
        w0 = _frequency(computation, follow) if kind == "sign" else None
        found = Rescaling(name, kind, incoming, outgoing)
        return first, found if w0 is None else replace(found, kind="phase", w0=w0)
    raise refused


def _kept_tensors(computation: Computation) -> frozenset[int]:
    """Tensors whose own neurons are not multiplied: slopes, statistics, and inputs of a norm."""
    steps, kept = computation.steps, list[object]()
    for step in steps:
        if step.operation == "prelu":
            kept.append(step.args[1])
        statistics, affine = _NORMS.get(step.operation, ((), ()))
        if any(_argument(step, i, _NAMES[i]) is not None for i in affine):
            kept += [_argument(step, i) for i in statistics]
            before = step.args[0]
            if isinstance(before, Ref) and _is_product(steps[before.step].operation):
                kept += steps[before.step].args[1:3]
    read = [steps[argument.step] for argument in kept if isinstance(argument, Ref)]
    numbers = [step.args[0] for step in read if step.operation == "parameter"]
    return frozenset(number for number in numbers if isinstance(number, int))


def _argument(step: Step, position: int, name: str = "") -> object:
    if position < len(step.args):
        return step.args[position]
    return dict(step.kwargs).get(name)


def _is_product(operation: str) -> bool:
    return operation == "linear" or operation.startswith("conv")


def _frequency(computation: Computation, follow: _Follow) -> float | None:
    """The factor inside the sine, if the type is a single layer with a bias, followed by a sine."""
    steps = computation.steps
    if [name for name, _ in follow.functions] != ["sin"]:
        return None
    operands = (ref for step in steps for ref in step.operands)
    uses = Counter(ref.step for ref in (*operands, *computation.outputs))
    w0, step = 1.0, steps[follow.functions[0][1]]
    while True:
        tensors = [arg for arg in step.args if isinstance(arg, Ref)]
        numbers = [arg for arg in step.args if isinstance(arg, int | float)]
        if step.operation == "mul" and len(tensors) == len(numbers) == 1:
            w0 *= float(numbers[0])
        elif step.operation != "sin":
            break
        if uses[tensors[0].step] != 1:
            return None
        step = steps[tensors[0].step]
    is_biased = _is_product(step.operation) and len(step.args) > 2 and step.args[2] is not None
    biases = [taps for taps in follow.taps()[0] if isinstance(taps.store, str)]
    if not (is_biased and w0 > 0 and len(biases) == 1 and biases[0].number == 1):
        return None
    # A shift is only exact where the sine reads all sums of these neurons: no other layer is added
    # to the sines, and the layer is not called again.
    own = {_only_read_here(arg, steps, uses) for arg in step.args[1:3]}
    multiplied = {n for n, state in follow.used.items() if any(a.power > 0 for a in state)}
    return w0 if own == multiplied else None


def _only_read_here(argument: object, steps: Sequence[Step], uses: Counter[int]) -> int | None:
    """The tensor that an argument is, or is made of; None if it is read at another place too."""
    while isinstance(argument, Ref) and uses[argument.step] == 1:
        step = steps[argument.step]
        if step.operation == "parameter":
            reads = [s for s in steps if s.operation == "parameter" and s.args == step.args]
            number = step.args[0]
            return number if len(reads) == 1 and isinstance(number, int) else None
        operands = tuple(step.operands)
        argument = operands[0] if len(operands) == 1 else None
    return None


@dataclass
class _Follow:
    """Follows the factors of one neuron type through a computation.

    `states` and `ranks` belong to the steps so far, `functions` are the functions of single entries
    with the numbers of their steps, and `used` has the states of the tensors that are multiplied.
    """

    name: str
    kind: Kind
    sources: _Sources
    computation: Computation
    kept: frozenset[int]
    states: list[_State] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    functions: list[tuple[str, int]] = field(default_factory=list)
    used: dict[int, _State] = field(default_factory=dict)

    def run(self) -> int:
        """Raises an error if a step refuses; returns the first step whose result is multiplied."""
        first = -1
        for number, step in enumerate(self.computation.steps):
            try:
                state, rank = self._step(step)
            except _RefusedError as error:
                raise _RefusedError(f"{error} (step %{number} = {step})", number) from None
            if first < 0 and state and step.operation != "parameter":
                first = number
            self.states.append(tuple(sorted(state)))
            self.ranks.append(rank)
        for ref in self.computation.outputs:
            if self.states[ref.step]:
                raise _RefusedError("the network returns its activations", len(self.states))
        return first

    def taps(self) -> tuple[tuple[Taps, ...], tuple[Taps, ...]]:
        """The taps that are multiplied, and those that are divided."""
        found: tuple[list[Taps], list[Taps]] = ([], [])
        for number, state in self.used.items():
            (placement,) = self.sources[number]
            for along in state:
                taps = Taps(placement.store, placement.tap, placement.taps)
                found[along.power < 0].append(taps)
        return tuple(found[0]), tuple(found[1])

    def _step(self, step: Step) -> tuple[_State, int | None]:
        operation = step.operation
        if operation == "parameter":
            tensor = step.args[0]
            if not isinstance(tensor, int):
                raise _RefusedError("its tensor has no number")
            if state := self._parameter(tensor):
                self.used[tensor] = state
            return state, len(self.sources[tensor][0].shape)
        if operation == "input" or operation in _SHAPES:
            return (), None
        rank = self._rank(step)
        if not any(self.states[ref.step] for ref in step.operands):
            return (), rank
        if _is_product(operation):
            return self._product(step), rank
        if operation in _NORMS:
            return self._norm(step, rank), rank
        if operation in _HANDLERS:
            return _HANDLERS[operation](self, step), rank
        return (self._pool if "pool" in operation else self._entrywise)(step), rank

    def _parameter(self, number: int) -> _State:
        """The axes of a tensor along which the neurons of the type lie."""
        placements = self.sources[number]
        if not any(
            self.name in ((s,) if isinstance(s := p.store, str) else s[::2]) for p in placements
        ):
            return ()
        first = placements[0]
        if len(placements) > 1 or not first.is_whole:
            raise _RefusedError(f"'{first.keys[0]}' belongs to several types of neurons")
        ends = {"neuron": first.store, "source": first.store[0], "target": first.store[-1]}
        return tuple(
            _own_axis(first, axis, -1 if role == "source" else 1)
            for axis, role in enumerate(first.axes)
            if ends.get(role) == self.name and (role == "source" or number not in self.kept)
        )

    def _state(self, argument: object) -> _State:
        return self.states[argument.step] if isinstance(argument, Ref) else ()

    def _rank_of(self, argument: object) -> int | None:
        return self.ranks[argument.step] if isinstance(argument, Ref) else None

    def _product(self, step: Step) -> _State:
        """Follows a linear layer or a convolution, which sums over its inputs."""
        x, weight = self._state(step.args[0]), self._state(step.args[1])
        bias = _argument(step, 2, "bias")
        spatial = 0 if step.operation == "linear" else int(step.operation[-2])
        out, into = -2 - spatial, -1 - spatial
        if "transpose" in step.operation:
            out, into = into, out
        if spatial and _argument(step, 6, "groups") not in (None, 1):
            raise _RefusedError("a grouped convolution reads it")
        x, weight = self._contract(x, -1 - spatial, weight, into)
        made = tuple(a._replace(axis=-1 - spatial) for a in weight if a.axis == out)
        if len(made) != len(weight):
            raise _RefusedError("the positions of a kernel would be multiplied")
        if bias is not None and self._state(bias) != tuple(a._replace(axis=-1) for a in made):
            raise _RefusedError("weight and bias would be multiplied differently")
        if x and made:
            raise _RefusedError("two axes would be multiplied")
        return x or made

    def _norm(self, step: Step, rank: int | None) -> _State:
        statistics, affine = _NORMS[step.operation]
        if any(self._state(_argument(step, i)) for i in (0, *statistics)):
            raise _RefusedError(f"{step.operation} depends on the scale of what it reads")
        given = [_argument(step, i, _NAMES[i]) for i in affine]
        states = {self._state(argument) for argument in given if argument is not None}
        if len(states) != 1:
            raise _RefusedError("weight and bias would be multiplied differently")
        (state,) = states
        if step.operation in ("layer_norm", "rms_norm"):
            return state
        return tuple(a._replace(axis=1 - (rank or 2)) for a in state)

    def _pool(self, step: Step) -> _State:
        state = self._state(step.args[0])
        spatial = int(step.operation[-2])
        if "max" in step.operation and self.kind != "scale":
            raise _RefusedError("a maximum does not commute with signs")
        if "lp_" in step.operation or any(a.axis >= -spatial for a in state):
            raise _RefusedError("its neurons would be pooled")
        return state

    def _entrywise(self, step: Step) -> _State:
        known = _HOMOGENEOUS if self.kind == "scale" else _ODD
        operation = step.operation
        if operation in ("clamp", "clamp_min", "clip", "hardtanh"):
            if not self._clamps(step):
                raise _RefusedError(f"the bounds of {operation} do not change with it")
        elif operation not in known:
            raise _RefusedError(
                f"{operation} is not known to be positively homogeneous (like relu) or odd (like "
                f"tanh)"
            )
        if any(self._state(arg) for arg in step.args[1:]):
            raise _RefusedError(f"{operation} takes it as a parameter")
        self.functions.append((operation, len(self.states)))
        return self._state(step.args[0])

    def _clamps(self, step: Step) -> bool:
        """Whether the bounds are zero, or opposite numbers if only signs change."""
        names = ("min_val", "max_val") if step.operation == "hardtanh" else ("min", "max")
        low, high = _argument(step, 1, names[0]), _argument(step, 2, names[1])
        if step.operation == "hardtanh":
            low, high = (-1.0 if low is None else low), (1.0 if high is None else high)
        if self.kind == "scale":
            return all(bound is None or bound == 0 for bound in (low, high))
        return isinstance(low, int | float) and isinstance(high, int | float) and low == -high

    def _contract(
        self, first: _State, axis: int, second: _State, into: int
    ) -> tuple[_State, _State]:
        """The remaining states of two factors after an axis of each is summed over."""
        summed = [*(a for a in first if a.axis == axis), *(a for a in second if a.axis == into)]
        power, places = sum(a.power for a in summed), [a.where for a in summed]
        # A weight with one entry per neuron has no positions next to the neurons.
        fits = not places or (len(places) == 2 and places[1] in ("alone", places[0]))
        if not fits or (power % 2 if self.kind == "sign" else power):
            raise _RefusedError("the tensor that reads it is not divided by its factors")
        return tuple(a for a in first if a.axis != axis), tuple(a for a in second if a.axis != into)

    def _add(self, step: Step) -> _State:
        states = [self._state(arg) for arg in step.args[:2] if arg != 0]
        if len(set(states)) != 1 or step.kwargs:
            raise _RefusedError("it is added to values with other factors")
        return states[0]

    def _mul(self, step: Step) -> _State:
        first, second = (self._state(arg) for arg in step.args[:2])
        if step.operation == "truediv":
            second = tuple(a._replace(power=-a.power) for a in second)
        found = {a.axis: a for a in first}
        for along in second:
            other = found.get(along.axis)
            if other is not None and other.where != along.where:
                raise _RefusedError("its neurons are combined with others")
            power = along.power + (other.power if other else 0)
            found[along.axis] = along._replace(power=power)
        if self.kind == "sign":
            found = {axis: a._replace(power=abs(a.power) % 2) for axis, a in found.items()}
        return tuple(a for a in found.values() if a.power)

    def _matmul(self, step: Step) -> _State:
        first, second = (self._state(arg) for arg in step.args[:2])
        first, second = self._contract(first, -1, second, -2)
        if any(a.axis != -1 for a in second) or any(a.axis == -2 for a in first):
            raise _RefusedError("its neurons are combined with others")
        if first and second:
            raise _RefusedError("two axes would be multiplied")
        return first or second

    def _mean(self, step: Step) -> _State:
        state = self._state(step.args[0])
        dims, keeps = self._dims(step)
        if step.operation in _EXTREMES and self.kind != "scale":
            raise _RefusedError("a maximum does not commute with signs")
        if dims is None or any(a.axis in dims for a in state):
            raise _RefusedError("its neurons are summed up")
        if keeps:
            return state
        return tuple(a._replace(axis=a.axis + sum(d > a.axis for d in dims)) for a in state)

    def _dims(self, step: Step) -> tuple[tuple[int, ...] | None, bool]:
        """The axes of a reduction, counted from the end, and whether they are kept."""
        given, keeps = _argument(step, 1, "dim"), bool(_argument(step, 2, "keepdim"))
        dims = given if isinstance(given, tuple) else (given,)
        if not all(isinstance(dim, int) and not isinstance(dim, bool) for dim in dims):
            return None, keeps
        return self._from_end(step, dims), keeps

    def _from_end(self, step: Step, axes: Iterable[object]) -> tuple[int, ...]:
        """Axes of the operand of a step, counted from the end."""
        rank = self._rank_of(step.args[0])
        found = []
        for axis in axes:
            if not isinstance(axis, int) or (axis >= 0 and rank is None):
                raise _RefusedError("the number of its axes is not known")
            found.append(axis if axis < 0 else axis - (rank or 0))
        return tuple(found)

    def _rank(self, step: Step) -> int | None:
        """The number of axes of the result of a step, or None if it is not known."""
        operation = step.operation
        ranks = [self.ranks[ref.step] for ref in step.operands]
        known = [rank for rank in ranks if rank is not None]
        if operation in ("getitem", "unsqueeze", "squeeze", "stack", "select", "unflatten"):
            return None
        if operation.startswith("conv"):
            return int(operation[-2]) + 2
        if operation == "permute":
            return len(_numbers(step.args[1:]))
        if operation in ("flatten", "reshape"):
            return 2 if _flattens(step) else None
        if operation in _REDUCTIONS and ranks[0] is not None:
            dims, keeps = self._dims(step)
            return ranks[0] if keeps else None if dims is None else ranks[0] - len(dims)
        if operation in ("add", "sub", "mul", "truediv"):
            return max(known, default=None) if len(known) == len(ranks) else None
        return ranks[0] if ranks else None

    def _flatten(self, step: Step) -> _State:
        """Follows a flatten of all axes but the first, in which neurons come first or last."""
        rank, state = self._rank_of(step.args[0]) or 2, self._state(step.args[0])
        fits = len(state) == 1 and state[0].where == "alone" and state[0].axis in (1 - rank, -1)
        if not fits or not _flattens(step):
            raise _RefusedError("its neurons are rearranged")
        if rank == 2:
            return state
        return (state[0]._replace(axis=-1, where="inner" if state[0].axis == -1 else "outer"),)

    def _permute(self, step: Step) -> _State:
        dims = _numbers(step.args[1:])
        order = [dim % len(dims) - len(dims) for dim in dims if isinstance(dim, int)]
        if len(order) < len(dims):
            raise _RefusedError("the order of its axes is computed")
        return tuple(
            a._replace(axis=order.index(a.axis) - len(dims)) for a in self._state(step.args[0])
        )

    def _transpose(self, step: Step) -> _State:
        ends = step.args[1:3] if step.operation == "transpose" else (-1, -2)
        first, second = self._from_end(step, ends)
        moved = {first: second, second: first}
        return tuple(a._replace(axis=moved.get(a.axis, a.axis)) for a in self._state(step.args[0]))

    def _pad(self, step: Step) -> _State:
        state, pads = self._state(step.args[0]), step.args[1]
        padded = len(pads) // 2 if isinstance(pads, tuple) else 0
        value = _argument(step, 3, "value")
        if not padded or value not in (None, 0) or any(a.axis >= -padded for a in state):
            raise _RefusedError("its neurons are padded, or the padding is not 0")
        return state

    def _getitem(self, step: Step) -> _State:
        x, taken = step.args[:2]
        state = self._state(x)
        if isinstance(taken, tuple) and len(taken) == self._rank_of(x):
            is_whole = all(taken[a.axis] == Range() for a in state)
            if is_whole and all(isinstance(part, Range) for part in taken):
                return state
        raise _RefusedError("only some of its neurons are read")


def _flattens(step: Step) -> bool:
    """Whether a step flattens all axes but the first."""
    if step.operation == "reshape":
        sizes = _numbers(step.args[1:])
        return len(sizes) == 2 and sizes[1] == -1
    end = _argument(step, 2, "end_dim")
    return _argument(step, 1, "start_dim") == 1 and end in (None, -1)


def _numbers(args: Iterable[object]) -> tuple[object, ...]:
    """The numbers of a call that accepts them one by one or as a tuple."""
    given = tuple(args)
    return given[0] if len(given) == 1 and isinstance(given[0], tuple) else given


def _own_axis(placement: Placement, axis: int, power: int) -> _Along:
    """The axis of a tensor to which an axis of its view belongs, as a whole or as a part."""
    for number, axes in enumerate(placement.view_axes):
        wide = [i for i in axes if placement.view[i] != 1 or i == axis]
        if axis in axes and axis in (wide[0], wide[-1]):
            where: _Where = "alone" if wide == [axis] else "outer" if axis == wide[0] else "inner"
            return _Along(number - len(placement.shape), power, where)
    raise _RefusedError(f"its neurons lie in the middle of an axis of '{placement.keys[0]}'")


_HANDLERS: dict[str, Callable[[_Follow, Step], _State]] = {
    "add": _Follow._add,
    "sub": _Follow._add,
    "mul": _Follow._mul,
    "truediv": _Follow._mul,
    "matmul": _Follow._matmul,
    **dict.fromkeys(_REDUCTIONS, _Follow._mean),
    **dict.fromkeys(("flatten", "reshape"), _Follow._flatten),
    "permute": _Follow._permute,
    **dict.fromkeys(("transpose", "t", "T", "mT"), _Follow._transpose),
    "pad": _Follow._pad,
    "getitem": _Follow._getitem,
}
