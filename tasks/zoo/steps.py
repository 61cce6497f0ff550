"""What a SIREN computes, so that graphs of networks whose files do not say it can be run."""

from __future__ import annotations

from nfn_graph.data import Argument, Computation, Layout, Neurons, Ref, Step
from nfn_graph.spec import Key, WeightKey


class _Steps:
    """The steps of a chain of layers, one after the other."""

    def __init__(self, layout: Layout) -> None:
        # Every tensor of a chain is the weights of one type or the biases of one layer.
        self._numbers = {parts[0].store: i for i, parts in enumerate(layout.sources)}
        self._steps = [Step("input", (0,))]
        self._activations: dict[str, Neurons] = {}
        self._neurons = ("input", -1)

    def add(self, operation: str, *args: Argument) -> None:
        """An operation of the last result."""
        self._append(Step(operation, (Ref(len(self._steps) - 1), *args)))
        if self._neurons[0] != "input":
            name, axis = self._neurons
            self._activations[name] = Neurons(name, Ref(len(self._steps) - 1), axis)

    def layer(self, key: WeightKey, operation: str, *args: Argument) -> None:
        """A linear map of the last result."""
        x = Ref(len(self._steps) - 1)
        tensors = [self._parameter(key), self._parameter(key[2])]
        self._neurons = (key[2], -1 if operation == "linear" else -3)
        self._append(Step(operation, (x, *tensors, *args)))

    def computation(self) -> Computation:
        """All steps."""
        last = Ref(len(self._steps) - 1)
        name, axis = self._neurons
        self._activations[name] = Neurons(name, last, axis)
        return Computation(tuple(self._steps), (last,), tuple(self._activations.values()))

    def _parameter(self, key: Key) -> Ref:
        return self._append(Step("parameter", (self._numbers[key],)))

    def _append(self, step: Step) -> Ref:
        self._steps.append(step)
        return Ref(len(self._steps) - 1)


def siren_computation(layout: Layout, w0: float, offset: float) -> Computation:
    """What a SIREN computes; see :func:`nfn_graph.tasks.zoo.siren.siren_forward`."""
    steps = _Steps(layout)
    depth = len(layout.spec.weights)
    for i, weight in enumerate(layout.spec.weights):
        steps.layer(weight.key, "linear")
        if i < depth - 1:
            steps.add("mul", w0)
            steps.add("sin")
    steps.add("add", offset)
    # Some checkpoints hold weights [in, out].
    turned = {
        number: [("permute", ((1, 0),))]
        for number, parts in enumerate(layout.sources)
        if parts[0].axes == ("source", "target")
    }
    return steps.computation().reading(turned)
