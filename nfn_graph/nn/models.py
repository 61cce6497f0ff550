"""Complete neural functional networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nfn_graph.data import WeightGraph
from nfn_graph.features import WeightFeatures
from nfn_graph.messages import UserError
from nfn_graph.nn._chunked import ChunkedFeatures
from nfn_graph.nn._layer_checks import check_features, check_input, check_unfolded
from nfn_graph.nn.elementwise import Activation, Dropout, Residual
from nfn_graph.nn.encoding import FourierFeatures, IOEncoding
from nfn_graph.nn.linear import NFLinear
from nfn_graph.nn.norm import ChannelNorm, Standardize
from nfn_graph.nn.pool import Pool
from nfn_graph.ops import Reduce
from nfn_graph.ops._backends import current_backend, use_backend
from nfn_graph.spec import NetworkSpec, Symmetry

# It is used in annotations only, and Python 3.10 does not have it.
if TYPE_CHECKING:
    from typing import Unpack


class NFNOptions(TypedDict, total=False):
    """The options that invariant and equivariant models share.

    Attributes:
        in_channels: The number of channels of the graphs; 1 by default.
        pointwise: Whether the NF-Layers drop all aggregates (NFN_PT).
        io_encoding: The kind of :class:`IOEncoding`; None, the default, for no encoding.
        encode_layers: Whether the IO-encoding also encodes depths.
        fourier_features: The number of Gaussian Fourier features of the values; 0 by default.
        fourier_scale: The scale of the Fourier features; 10 by default.
        standardize: Whether to standardize the input; call `model.standardize.fit(graphs)`
            before training.
        norm: Whether to normalise channels before every NF-Layer but the first.
        dropout: The dropout probability after every activation; 0 by default.
        residual: Whether layers that keep the number of channels add their input.
        act: The activation; see :class:`Activation`. `"relu"` by default.
        aggr: The aggregate of the NF-Layers, `"mean"` (the default) or `"sum"`.
        recompute: Whether to keep only the input of every layer for the backward pass and to
            compute the rest again, which saves memory and costs time.
        max_parameters: The limit on the parameters of a layer; see :class:`NFLinear`.

    Example:
        >>> from nfn_graph import NFN, NetworkSpec, NFNOptions
        >>> options = NFNOptions(act="silu", dropout=0.1, norm=True)
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> model = NFN(spec, channels=(8, 8), out_features=1, **options)
    """

    in_channels: int
    pointwise: bool
    io_encoding: Literal["learned", "sinusoidal"] | None
    encode_layers: bool
    fourier_features: int
    fourier_scale: float
    standardize: bool
    norm: bool
    dropout: float
    residual: bool
    act: str | Callable[[Tensor], Tensor]
    aggr: Reduce
    recompute: bool
    max_parameters: int


class _Layers(nn.Module):
    """The NF-Layers of a model and the modules before and between them.

    With `ends_active`, an activation also follows the last NF-Layer.
    """

    def __init__(
        self,
        spec: NetworkSpec,
        channels: Sequence[int],
        symmetry: Symmetry,
        *,
        ends_active: bool,
        in_channels: int = 1,
        pointwise: bool = False,
        io_encoding: Literal["learned", "sinusoidal"] | None = None,
        encode_layers: bool = False,
        fourier_features: int = 0,
        fourier_scale: float = 10.0,
        standardize: bool = False,
        norm: bool = False,
        dropout: float = 0.0,
        residual: bool = False,
        act: str | Callable[[Tensor], Tensor] = "relu",
        aggr: Reduce = "mean",
        recompute: bool = False,
        max_parameters: int = 2**28,
    ) -> None:
        super().__init__()
        check_unfolded(spec)
        if not channels:
            raise UserError("Expected the channels of at least one NF-Layer (got none)")
        if symmetry == "np" and io_encoding != "learned":
            spec = spec.unsized  # The numbers of inputs and outputs are then arbitrary.
        Activation(act)  # Refuses an unknown name even if no layer uses it.
        self.spec = spec
        self.symmetry: Symmetry = symmetry
        self.folded = spec.fold(symmetry)
        self.in_channels = in_channels
        self.recompute = recompute
        self.standardize = Standardize(spec, in_channels) if standardize else None
        width = in_channels
        self.before = nn.Sequential()
        if fourier_features:
            self.before.append(FourierFeatures(width, fourier_features, fourier_scale))
            width = 2 * fourier_features
        if io_encoding is not None:
            encoding = IOEncoding(spec, width, io_encoding, encode_layers=encode_layers)
            self.before.append(encoding)
            width = encoding.out_channels
        self.layers = nn.Sequential()
        for i, (c_in, c_out) in enumerate(pairwise([width, *channels])):
            stage = nn.Sequential()
            if norm and i > 0:
                stage.append(ChannelNorm(self.folded, c_in))
            layer = NFLinear(
                self.folded,
                c_in,
                c_out,
                pointwise=pointwise,
                aggr=aggr,
                max_parameters=max_parameters,
            )
            stage.append(layer)
            if ends_active or i < len(channels) - 1:
                stage.append(Activation(act))
                if dropout:
                    stage.append(Dropout(dropout))
            self.layers.append(Residual(stage) if residual and c_in == c_out else stage)

    def _read(self, graph: WeightGraph | WeightFeatures) -> WeightFeatures:
        """Converts the input to features of the model's own spec, before the fold."""
        check_input(graph)
        if isinstance(graph, WeightGraph):
            return graph.features(spec=self.spec)
        check_features(graph, self.spec)
        return graph

    def _encode(self, features: WeightFeatures) -> WeightFeatures:
        """Standardizes, encodes and folds the input for the NF-Layers."""
        if self.standardize is not None:
            features = self.standardize(features)
        return self.before(features).fold(self.folded)

    def _run_layers(self, features: WeightFeatures) -> WeightFeatures:
        """Applies the NF-Layers."""
        if not (self.recompute and torch.is_grad_enabled()):
            return self.layers(features)
        options: dict[str, Any] = {"use_reentrant": False}
        if not torch.compiler.is_compiling():
            # The backward pass may run after the block that chose the kernels, in another thread.
            backend = current_backend()
            options["context_fn"] = lambda: (nullcontext(), use_backend(backend))
        for layer in self.layers:
            features = checkpoint(layer, features, **options)
        return features


class InvariantNFN(_Layers):
    r"""A model whose output does not depend on the order of the neurons:
    :math:`f(\sigma U) = f(U)`.

    It consists of NF-Layers with an activation after each, the invariant layer, and an MLP.

    Args:
        spec: The networks' own spec; `NetworkSpec.union` of several.
        channels: The output channels of each NF-Layer.
        symmetry: `"np"` or `"hnp"`.
        out_features: The number of outputs per network.
        head: The hidden sizes of the MLP.
        head_dropout: The dropout probability in the MLP.
        pool: The aggregate of the invariant layer.
        pool_full: Whether the invariant layer keeps its redundant entries; see :class:`Pool`.
        **options: See :class:`NFNOptions`.

    Shapes:
        - input: a graph, a batch, or features before the fold.
        - output: `[graphs, out_features]`.

    Example:
        >>> import torch
        >>> from nfn_graph import InvariantNFN, NetworkSpec
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4}).to(torch.float32)
        >>> model = InvariantNFN(spec, channels=(8, 8), out_features=10, head=(64,))
        >>> model(graph).shape
        torch.Size([1, 10])
    """

    def __init__(
        self,
        spec: NetworkSpec,
        channels: Sequence[int],
        symmetry: Symmetry = "np",
        *,
        out_features: int,
        head: Sequence[int] = (1000, 1000),
        head_dropout: float = 0.0,
        pool: Reduce = "mean",
        pool_full: bool = False,
        **options: Unpack[NFNOptions],
    ) -> None:
        super().__init__(spec, channels, symmetry, ends_active=True, **options)
        last, act = self.layers[-1], None
        # An activation inside the pool keeps one tensor less than an activation before it.
        if isinstance(last, nn.Sequential) and isinstance(end := last[-1], Activation):
            act = end
            del last[-1]
        self.pool = Pool(self.folded, pool, pool_full, act)
        sizes = [self.pool.num_entries * channels[-1], *head]
        self.head = mlp(sizes, out_features, head_dropout)

    def forward(
        self, graph: WeightGraph | WeightFeatures, chunk_edges: int | None = None
    ) -> Tensor:
        """Applies the model to a graph, a batch, or features before the fold.

        Args:
            graph: The input.
            chunk_edges: Without gradients, how many edges of one type to hold at a time, for
                networks whose features do not fit into memory; the result is the same.
        """
        features = self._encode(self._read(graph))
        if chunk_edges is not None:
            chunked = ChunkedFeatures(features, chunk_edges).apply(self.layers)
            return self.head(chunked.summary(self.pool))
        return self.head(self.pool(self._run_layers(features)).flatten(1))


class EquivariantNFN(_Layers):
    r"""A model whose output follows the order of the neurons:
    :math:`f(\sigma U) = \sigma f(U)`.

    It consists of NF-Layers with activations between them. The output has the view of the
    NF-Layers; `.to_graph()` turns it into networks.

    Args:
        spec: The networks' own spec; `NetworkSpec.union` of several.
        channels: The output channels of each NF-Layer.
        symmetry: `"np"` or `"hnp"`.
        edit_scale: The initial value of the learned factor :math:`\gamma` of a model that edits its
            input: :math:`U' = U + \gamma\,\mathrm{NFN}(U)`.
        **options: See :class:`NFNOptions`.

    Shapes:
        - input: a graph, a batch, or features before the fold.
        - output: features after the fold with `channels[-1]` channels.

    Example:
        >>> import torch
        >>> from nfn_graph import EquivariantNFN, NetworkSpec
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4}).to(torch.float32)
        >>> model = EquivariantNFN(spec, channels=(8, 1), edit_scale=0.01)
        >>> model(graph).to_graph()["input", "weight", "hidden1"].edge_attr.shape
        torch.Size([8, 1, 1])
    """

    def __init__(
        self,
        spec: NetworkSpec,
        channels: Sequence[int],
        symmetry: Symmetry = "np",
        *,
        edit_scale: float | None = None,
        **options: Unpack[NFNOptions],
    ) -> None:
        super().__init__(spec, channels, symmetry, ends_active=False, **options)
        if edit_scale is not None and channels[-1] != self.in_channels:
            raise UserError(
                f"Expected {self.in_channels} output channels of a model that edits its input "
                f"(got channels {tuple(channels)})"
            )
        self.edit_scale: nn.Parameter | None = None
        if edit_scale is not None:
            self.edit_scale = nn.Parameter(torch.tensor(edit_scale))

    def forward(
        self, graph: WeightGraph | WeightFeatures, chunk_edges: int | None = None
    ) -> WeightFeatures:
        """Applies the model to a graph, a batch, or features before the fold.

        Args:
            graph: The input.
            chunk_edges: Without gradients, how many edges of one type to hold at a time, for
                networks whose features do not fit into memory; the result is the same.
        """
        given = self._read(graph)
        features = self._encode(given)
        if chunk_edges is not None:
            features = ChunkedFeatures(features, chunk_edges).apply(self.layers).features()
        else:
            features = self._run_layers(features)
        if self.edit_scale is None:
            return features
        return given.fold(self.folded) + features * self.edit_scale


@overload
def NFN(
    spec: NetworkSpec,
    channels: Sequence[int],
    symmetry: Symmetry = "np",
    *,
    out_features: int,
    head: Sequence[int] = (1000, 1000),
    head_dropout: float = 0.0,
    pool: Reduce = "mean",
    pool_full: bool = False,
    **options: Unpack[NFNOptions],
) -> InvariantNFN: ...


@overload
def NFN(
    spec: NetworkSpec,
    channels: Sequence[int],
    symmetry: Symmetry = "np",
    *,
    out_features: None = None,
    edit_scale: float | None = None,
    **options: Unpack[NFNOptions],
) -> EquivariantNFN: ...


def NFN(
    spec: NetworkSpec,
    channels: Sequence[int],
    symmetry: Symmetry = "np",
    *,
    out_features: int | None = None,
    **options: Any,
) -> InvariantNFN | EquivariantNFN:
    """A complete model: NF-Layers and the modules before and after them.

    ======================  =============================================================
    `out_features` given    an :class:`InvariantNFN`, which returns `[graphs, out_features]`
    `out_features=None`     an :class:`EquivariantNFN`, which returns :class:`WeightFeatures`
    ======================  =============================================================

    The models of `Permutation Equivariant Neural Functionals
    <https://arxiv.org/abs/2302.14040>`_ (appendix D):

    ======================  =============================================================
    generalisation          `channels=(16, 16, 5), out_features=1, head=(1000, 1000, 1000)`
    INR classification      `channels=(512,) * 3, out_features=10, head=(1000, 1000),
                            head_dropout=0.5, io_encoding="sinusoidal"`
    winning tickets         `channels=(64, 64, 64, 10), in_channels=2`
    INR editing             `channels=(128, 128, 1), edit_scale=0.01`
    ======================  =============================================================

    Args:
        spec: The networks' own spec; `NetworkSpec.union` of several.
        channels: The output channels of each NF-Layer.
        symmetry: `"np"` or `"hnp"`.
        out_features: The number of outputs per network, for an invariant model.
        **options: See :class:`NFNOptions`, and the arguments of the two models.

    Example:
        >>> import torch
        >>> from nfn_graph import NFN, NetworkSpec
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4}).to(torch.float32)
        >>> NFN(spec, channels=(8, 8), symmetry="hnp", out_features=3)(graph).shape
        torch.Size([1, 3])
        >>> edited = NFN(spec, channels=(8, 1), symmetry="np")(graph)
        >>> edited.to_graph()["hidden1"].x.shape
        torch.Size([4, 1, 1])
    """
    if out_features is None:
        for name in ("head", "head_dropout", "pool", "pool_full"):
            if name in options:
                raise TypeError(f"Expected out_features with {name}= (got none)")
        return EquivariantNFN(spec, channels, symmetry, **options)
    if "edit_scale" in options:
        raise TypeError(f"Expected no out_features with edit_scale= (got {out_features})")
    return InvariantNFN(spec, channels, symmetry, out_features=out_features, **options)


def mlp(sizes: Sequence[int], out_features: int, dropout: float) -> nn.Sequential:
    """Makes an MLP: linear layers with ReLU and dropout between them."""
    layers: list[nn.Module] = []
    for first, second in pairwise(sizes):
        # It runs in place, since no gradient needs the result of a linear map.
        layers += [nn.Linear(first, second), nn.ReLU(inplace=True)]
        layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(sizes[-1], out_features))
