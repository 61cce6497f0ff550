"""The fold as a layer."""

from __future__ import annotations

from torch import nn

from nfn_graph.data import WeightGraph
from nfn_graph.features import WeightFeatures
from nfn_graph.nn._layer_checks import check_choice, check_input
from nfn_graph.spec import Symmetry


class Fold(nn.Module):
    """Converts a graph, a batch or features to the view that the next layers work on.

    Every layer expects one view and none of them changes it, so an `nn.Sequential` of layers begins
    with a fold.

    Args:
        symmetry: `"np"`, `"hnp"`, or None for the networks' own tensors.

    Example:
        >>> from torch import nn
        >>> from nfn_graph import Activation, Fold, NetworkSpec, NFLinear, Pool
        >>> from nfn_graph.testing import random_graph
        >>> graph = random_graph(NetworkSpec.chain(2, input_size=2, output_size=1))
        >>> spec = graph.spec.fold("hnp")
        >>> layers = NFLinear(spec, 1, 8), Activation("relu"), Pool(spec)
        >>> model = nn.Sequential(Fold("hnp"), *layers).double()
        >>> model(graph).shape
        torch.Size([1, 5, 8])
    """

    def __init__(self, symmetry: Symmetry | None) -> None:
        super().__init__()
        self.symmetry = None if symmetry is None else check_choice(symmetry, ("np", "hnp"))

    def forward(self, graph: WeightGraph | WeightFeatures) -> WeightFeatures:
        """Folds or unfolds the input; features in the right view are returned unchanged."""
        check_input(graph)
        if isinstance(graph, WeightGraph):
            return graph.features(self.symmetry)
        return graph.unfold() if self.symmetry is None else graph.fold(self.symmetry)

    def extra_repr(self) -> str:
        """Shown by `print(layer)`."""
        return repr(self.symmetry)
