r"""Methods to follow a network's computation, in whatever language it is written.

A front-end (torch.fx, torch.export, ONNX) walks through the operations of a network and calls a
method of :class:`Wiring` for each. These calls determine which neurons must be permuted together,
which tensor axis belongs to which layer and which positions are taps.

.. code-block:: python

    wiring = Wiring(tensors)                  # key -> tensor; only shapes and dtypes are read
    x = wiring.input((1, 3, 32, 32))          # the shape may be left out
    with wiring.at("conv1 (Conv)"):           # the place that errors name
        x = wiring.conv(x, wiring.parameter("conv1.weight"), wiring.parameter("conv1.bias"))
    x = wiring.channelwise(x, [wiring.parameter(k) for k in ("bn.weight", "bn.bias")], axis=1)
    x = wiring.pointwise(x)                   # relu; dropout, clip, ...
    x = wiring.pool(x, spatial=2)             # any pooling or resizing of the last two axes
    x = wiring.flatten(x, 1)
    x = wiring.linear(x, wiring.parameter("fc.weight"), wiring.parameter("fc.bias"))
    wiring.output(x)
    layout = wiring.layout()                  # -> WeightGraph.from_placements(layout, tensors)

Values:

- :class:`Signal`: at least one axis consists of neuron layers, and the others are positions.
- :class:`Opaque`: a value without neurons. An input becomes a layer of input neurons where a weight
  first reads it, along the axis that is read, so a flattened input has one neuron per value. A
  parameter-free function of inputs is opaque again (:meth:`Wiring.opaque`).
- :class:`Weight`: a stored tensor, perhaps transposed or combined with others entry by entry.

Rules: `combine` (any entrywise operation on several values) ties the neuron axes of its operands;
`concat` joins them; `slice` splits layers; `flatten` turns positions into taps of the next weight's
edges, in the order of the entries; `reshape` does that and the reverse. `reduce` and `statistics`
(softmax, norms) are symmetric functions along axes, `places` returns positions along an axis, and
`mixes` moves entries and is only allowed along positions. An `output` fixes its layers, and so does
any other value that reveals their order, once it is used. Operations that mix neurons in another
way have no method here, and the front-end refuses them with :meth:`Wiring.refuse`. Sizes of
positions may be unknown (None), and so may the number of axes of an input (`guessed`); `annotate`
fills them in if the front-end knows the shape of a result.
"""

from nfn_graph.converters.wiring.values import (
    NeuronAxis,
    Opaque,
    Positions,
    Signal,
    SplitAxis,
    Value,
    Weight,
    position_of,
)
from nfn_graph.converters.wiring.vocabulary import Wiring

__all__ = [
    "NeuronAxis",
    "Opaque",
    "Positions",
    "Signal",
    "SplitAxis",
    "Value",
    "Weight",
    "Wiring",
    "position_of",
]
