"""The options of zoos of winning tickets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nfn_graph.tasks.masks import Scope, check_sparsity
from nfn_graph.tasks.option_checks import (
    check_above,
    check_at_least,
    check_networks,
    check_several,
    check_split,
)
from nfn_graph.tasks.zoo.architecture import Activation, InitKind
from nfn_graph.tasks.zoo.optimisers import Optimiser
from nfn_graph.tasks.zoo.options import BuildOptions


@dataclass(frozen=True)
class TicketZooOptions(BuildOptions):
    """Find winning tickets: initialisations, each with a mask under which it trains well.

    One step of iterative magnitude pruning: a network is trained, its largest weights are
    kept, and the mask is laid on the weights that it started from. All networks are trained
    alike, each from its own seed.

    Attributes:
        data: The images: digits, or a folder or .npz file; see nfn_graph.tasks.sources.
        networks: How many to train.
        arch: MLPs of two hidden layers; or three 3 x 3 convolutions with stride 2, a hidden
            and an output layer, which reads all positions of the last map.
        widths: Neurons or channels of every hidden layer; one is drawn per network.
        sparsity: The share of the weights to prune. Biases are kept.
        scope: Whether weights compete within their network or within their layer.
        activation: After every hidden layer.
        init: How weights are initialised.
        optimiser: For all networks.
        learning_rate: Of the optimiser.
        l2: The penalty on the sum of squared weights.
        epochs: How often a network sees the training images.
        batch_size: Images per step.
        test_share: The share of networks for testing.
    """

    data: str = "digits"
    networks: int = 500
    arch: Literal["mlp", "cnn"] = "mlp"
    widths: tuple[int, ...] = (64,)
    sparsity: float = 0.95
    scope: Scope = "global"
    activation: Activation = "relu"
    init: InitKind = "he_normal"
    optimiser: Optimiser = "adam"
    learning_rate: float = 3e-3
    l2: float = 0.0
    epochs: int = 40
    batch_size: int = 64
    validation_share: float = 0.1
    test_share: float = 0.1

    def check(self) -> None:
        """Raises for values that make no sense, naming the option."""
        super().check()
        check_networks("networks", self.networks)
        for name in ("epochs", "batch_size"):
            check_at_least(name, getattr(self, name), 1)
        check_several("widths", self.widths, 1)
        check_above("learning_rate", self.learning_rate, 0)
        check_at_least("l2", self.l2, 0)
        check_split(self.validation_share, self.test_share)
        check_sparsity(self.sparsity)
