"""A common form of all networks that differ by symmetries of their activation functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.transforms import BaseTransform

from nfn_graph.data import WeightGraph
from nfn_graph.features import WeightFeatures
from nfn_graph.messages import UserError
from nfn_graph.spec import Key, NetworkSpec
from nfn_graph.transforms._rescaling import Kind, Rescaling, rescalings


@dataclass(frozen=True)
class Moved:
    """The changes that a canonical form made to the neurons of a type.

    Args:
        kind: `scale` for positive factors, `sign` for signs, `phase` for signs and shifts of sines.
        incoming: `[neurons]`, the factors of their incoming weights and biases.
        outgoing: `[neurons]`, the factors of their outgoing weights.
        shift: `[neurons]`, the numbers that were then added to their biases.

    Example:
        >>> from torch import nn
        >>> from nfn_graph.converters import from_module
        >>> from nfn_graph.transforms import CanonicalForm
        >>> graph = from_module(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)))
        >>> CanonicalForm().moved(graph)["hidden1"].kind
        'sign'
    """

    kind: Kind
    incoming: Tensor
    outgoing: Tensor
    shift: Tensor


class CanonicalForm(BaseTransform):
    r"""Brings networks that differ by symmetries of their activation functions to a common form.

    Networks with different weights can compute the same function, even if their neurons are in the
    same order:

    - ReLU and other functions with :math:`f(s z) = s f(z)` for positive `s`: the incoming weights
      and the bias of a neuron are divided by their joint norm, and its outgoing weights are
      multiplied by it.
    - tanh and other odd functions: the signs of a neuron are flipped so that its bias is not
      negative or, if the bias is zero, so that the sum of its incoming weights is not negative.
    - the sine after a layer with a bias: the phase is brought into :math:`[0, \pi/2]`, see
      :class:`CanonicalPhases`.

    The recorded computation of the network shows which symmetry applies, and the function does not
    change. Before a norm layer, the weight and bias of the norm itself are rescaled. Types of
    neurons without such a symmetry do not change, and :meth:`reasons` says why.

    The transform works on single graphs, and on batches of networks with the same computation and
    any widths.

    Args:
        neurons: The neuron types to transform. If one of them has no symmetry, an error says why.
            If None, all types with a symmetry; there must be at least one.

    Example:
        >>> import torch
        >>> from nfn_graph.converters import from_module
        >>> from nfn_graph.transforms import CanonicalForm
        >>> layers = torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)
        >>> graph = from_module(torch.nn.Sequential(*layers))
        >>> canonical = CanonicalForm()
        >>> canonical(graph)["hidden1"].x.abs().max() <= 1
        tensor(True)
        >>> moved = canonical.moved(graph)
        >>> moved["hidden1"].kind
        'scale'
        >>> back = canonical.undo(canonical(graph), moved)
        >>> torch.allclose(back["hidden1"].x, graph["hidden1"].x)
        True
    """

    def __init__(self, neurons: tuple[str, ...] | list[str] | None = None) -> None:
        self.neurons = None if neurons is None else tuple(neurons)

    def forward(self, data: WeightGraph) -> WeightGraph:
        """Brings the networks to their canonical form; `data` does not change."""
        return self._transformed(data)[0]

    def moved(self, data: WeightGraph) -> dict[str, Moved]:
        """The changes of :meth:`forward` to the neurons of every type, first layer first."""
        return self._transformed(data)[1]

    def undo(self, data: WeightGraph, moved: dict[str, Moved]) -> WeightGraph:
        """Restores the networks before :meth:`forward`, or others with the same neurons.

        Scales and phases are restored up to rounding, signs exactly.

        Args:
            data: The networks in their canonical form.
            moved: The result of :meth:`moved` for the original networks.
        """
        plan = {rescaling.name: rescaling for rescaling in self._plan(data)}
        if list(moved) != [name for name in plan if name in moved]:
            raise UserError(f"Expected the changes of {list(plan)} (got those of {list(moved)})")
        raw = data.features()
        tensors = dict(raw.tensors())
        for name in reversed(moved):
            back, count = moved[name], tensors[name].shape[0]
            if len(back.incoming) != count:
                raise UserError(
                    f"Expected the factors of {count} neurons of '{name}' (got "
                    f"{len(back.incoming)})"
                )
            _multiply(raw, tensors, plan[name], 1 / back.incoming, 1 / back.outgoing)
            _shift(tensors, plan[name], -back.shift / back.incoming)
        return data.with_features(tensors)

    def reasons(self, data: WeightGraph) -> dict[str, str]:
        """The reasons why neuron types do not change, by name."""
        return {name: why for layout in data.layouts for name, why in rescalings(layout)[1]}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.neurons is None else self.neurons})"

    def _plan(self, data: WeightGraph) -> tuple[Rescaling, ...]:
        if not isinstance(data, WeightGraph):
            raise TypeError(f"Expected a WeightGraph (got {type(data).__name__})")
        found = list(dict.fromkeys(rescalings(layout)[0] for layout in data.layouts))
        if len(found) > 1:
            raise UserError(
                "Expected a batch of networks with one computation (got several). Apply "
                "CanonicalForm to each network before batching."
            )
        plan = tuple(r for r in found[0] if self.neurons is None or r.name in self.neurons)
        missing = [n for n in self.neurons or () if n not in {r.name for r in plan}]
        if missing or not plan:
            reasons = self.reasons(data)
            why = [f"'{n}': {reasons.get(n, 'no free neurons')}" for n in missing or reasons]
            raise UserError(
                f"Expected neurons whose activation function has a symmetry (got none: "
                f"{'; '.join(why)})"
            )
        return plan

    def _transformed(self, data: WeightGraph) -> tuple[WeightGraph, dict[str, Moved]]:
        plan = self._plan(data)
        raw = data.features()
        if raw.channels != 1:
            raise UserError(f"Expected graphs with one channel (got {raw.channels} channels)")
        tensors = dict(raw.tensors())
        found: dict[str, Moved] = {}
        for rescaling in plan:
            moved = _move(raw, tensors, rescaling)
            _multiply(raw, tensors, rescaling, moved.incoming, moved.outgoing)
            _shift(tensors, rescaling, moved.shift)
            found[rescaling.name] = moved
        return data.with_features(tensors), found


def _move(raw: WeightFeatures, tensors: dict[Key, Tensor], rescaling: Rescaling) -> Moved:
    """The changes that bring the neurons of a type to their canonical form."""
    name, kind = rescaling.name, rescaling.kind
    zeros = tensors[name].new_zeros(tensors[name].shape[0])
    if kind == "phase":
        (bias,) = (tensors[t.store][:, t.first, 0] for t in rescaling.incoming if t.store == name)
        phases, flip, negate = canonical_phases(bias * rescaling.w0)
        return Moved(kind, flip, negate, phases / rescaling.w0 - flip * bias)
    biases, weights = _sums(raw, tensors, rescaling, 1 if kind == "sign" else 2)
    if kind == "sign":
        sums = torch.where(biases == 0, weights, biases)
        sign = torch.where(sums < 0, -1, 1).to(zeros)
        return Moved(kind, sign, sign, zeros)
    norms = (biases + weights).sqrt()
    norms = torch.where(norms > 0, norms, 1)
    return Moved(kind, 1 / norms, norms, zeros)


def _sums(
    raw: WeightFeatures, tensors: dict[Key, Tensor], rescaling: Rescaling, power: int
) -> tuple[Tensor, Tensor]:
    """The sums of a power of the biases, and of the incoming weights, of every neuron."""
    biases = weights = tensors[rescaling.name].new_zeros(tensors[rescaling.name].shape[0])
    for store, first, count in rescaling.measured:
        entries = tensors[store][:, first : first + count, 0].pow(power).sum(1)
        if isinstance(store, str):
            biases = biases + entries
        else:
            weights = weights.index_add(0, raw.incidence.weights[store].target.long(), entries)
    return biases, weights


def _multiply(
    raw: WeightFeatures,
    tensors: dict[Key, Tensor],
    rescaling: Rescaling,
    incoming: Tensor,
    outgoing: Tensor,
) -> None:
    """Multiplies the incoming and the outgoing taps of neurons."""
    for parts, of_neurons, end in (
        (rescaling.incoming, incoming, "target"),
        (rescaling.outgoing, outgoing, "source"),
    ):
        for store, first, number in parts:
            x, factor = tensors[store], of_neurons
            if not isinstance(store, str):
                factor = factor[getattr(raw.incidence.weights[store], end).long()]
            by_tap = x.new_ones(x.shape[0], x.shape[1], 1)
            by_tap[:, first : first + number] = factor.view(-1, 1, 1)
            tensors[store] = x * by_tap


def _shift(tensors: dict[Key, Tensor], rescaling: Rescaling, shift: Tensor) -> None:
    """Adds numbers to the biases of sines."""
    if rescaling.kind != "phase":
        return
    (tap,) = (taps.first for taps in rescaling.incoming if taps.store == rescaling.name)
    x = tensors[rescaling.name]
    by_tap = torch.zeros_like(x)
    by_tap[:, tap] = shift.view(-1, 1)
    tensors[rescaling.name] = x + by_tap


class CanonicalPhases(BaseTransform):
    r"""Brings the phase of every hidden sine neuron into [0, pi/2] without changing the function.

    .. math:: \sin(-x) = -\sin(x), \qquad \sin(x + \pi) = -\sin(x)

    A hidden neuron :math:`\sin(\omega_0 (w x + b))` can therefore be flipped (`w`, `b` and its
    outgoing weights negated) and shifted (:math:`\pi / \omega_0` added to `b`, its outgoing
    weights negated). Together they bring every phase :math:`\omega_0 b` into
    :math:`[0, \pi/2]`, where it is unique except at the ends.

    This transform is for sine networks whose graphs do not record the computation, and for batches
    of networks of different depths. If the computation is recorded, :class:`CanonicalForm` reads
    the frequency from it, and this transform raises an error if it has no sines.

    Args:
        w0: The frequency factor of all hidden layers, or a tensor with one factor for every
            network.

    Example:
        >>> import torch
        >>> from nfn_graph import WeightGraph
        >>> from nfn_graph.transforms import CanonicalPhases
        >>> weights, biases = [torch.ones(1, 2), torch.ones(1, 1)], [-torch.ones(1), torch.ones(1)]
        >>> graph = WeightGraph.from_tensors(weights, biases)
        >>> CanonicalPhases(w0=1.0)(graph)["hidden1"].x.item()
        1.0
    """

    def __init__(self, w0: float | Tensor = 30.0) -> None:
        if not (w0 > 0 if isinstance(w0, float | int) else bool((w0 > 0).all())):
            raise UserError(f"Expected w0 above 0 (got {w0})")
        self.w0 = w0

    def forward(self, data: WeightGraph) -> WeightGraph:
        """Brings the networks to their canonical form; `data` does not change."""
        if not isinstance(data, WeightGraph):
            raise TypeError(f"Expected a WeightGraph (got {type(data).__name__})")
        self._check_record(data)
        raw = data.features()
        weights, neurons = dict(raw.weights), dict(raw.neurons)
        for name in hidden_chain(data.spec):
            biases = neurons[name]
            w0 = self.w0
            if isinstance(w0, Tensor):
                w0 = w0.to(biases)[raw.graph_of(name).long()].view(-1, 1, 1)
            new, flip, negate = canonical_phases(biases * w0)
            neurons[name] = new / w0
            for key, x in weights.items():
                edges = raw.incidence.weights[key]
                if key[2] == name:
                    weights[key] = x * flip[edges.target]
                elif key[0] == name:
                    weights[key] = x * negate[edges.source]
        return data.with_features({**weights, **neurons})

    def _check_record(self, data: WeightGraph) -> None:
        """Raises if a recorded computation has no such phases, whose change would not be exact."""
        known: dict[int, dict[str, float]] = {}
        for i, layout in enumerate(data.layouts):
            if layout.computation.reason is not None:
                continue
            if id(layout) not in known:
                phases = {r.name: r.w0 for r in rescalings(layout)[0] if r.kind == "phase"}
                # A frequency may be a tensor of the network; then the record does not show it.
                if all(step.operation != "sin" for step in layout.computation.steps):
                    raise UserError(
                        f"Expected sines behind '{hidden_chain(layout.spec)[0]}' (got another "
                        f"computation). Use CanonicalForm, which finds the symmetries of every "
                        f"computation, or no canonical form."
                    )
                known[id(layout)] = phases
            given = self.w0
            if isinstance(given, Tensor):
                given = float(given if given.dim() == 0 else given[min(i, len(given) - 1)])
            for name, w0 in known[id(layout)].items():
                if not math.isclose(given, w0, rel_tol=1e-5):
                    raise UserError(
                        f"Expected w0 of {w0:g} for '{name}', as recorded (got {given:g})"
                    )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(w0={self.w0})"


def canonical_phases(phases: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Finds phases within [0, pi/2] that give the same sines.

    Returns:
        The new phases, the signs of the incoming weights, and the signs of the outgoing weights.
    """
    phases = torch.remainder(phases, 2 * math.pi)
    # sin(x + p) = -sin(x + (p - pi)) for p in [pi, 2 pi)
    shifted = phases >= math.pi
    phases = torch.where(shifted, phases - math.pi, phases)
    # sin(x + p) = sin(-x + (pi - p)) for p in (pi/2, pi)
    mirrored = phases > math.pi / 2
    phases = torch.where(mirrored, math.pi - phases, phases)
    one = torch.ones_like(phases)
    return phases.clamp(0, math.pi / 2), one.where(~mirrored, -1), one.where(~shifted, -1)


def hidden_chain(spec: NetworkSpec) -> list[str]:
    """The hidden neuron types of a network that has one bias per neuron, first layer first."""
    sources, targets = ({w.key[end] for w in spec.weights} for end in (0, 2))
    hidden = [n for n in spec.neurons if n.name in sources & targets]
    for neuron in hidden:
        if neuron.taps != 1 or neuron.role or neuron.fixed:
            raise UserError(
                f"Expected hidden layers of different types with one bias per neuron (got neuron "
                f"type '{neuron}'). Apply canonical forms before RoleTypes."
            )
    return [n.name for n in hidden]
