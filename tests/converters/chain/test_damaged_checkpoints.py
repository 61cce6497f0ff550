"""Checkpoints whose tensors were dropped, reordered, renamed, transposed or duplicated.

Without `arch`, they give the graph of the network that they are from, or an error; never another
graph. A graph is the same if every tensor is at the same place in it: the same neurons at the same
axes, the same taps. What no reader can see is not damage: a square weight that is transposed is
another square weight, a kernel `[1, n]` becomes that of a depthwise convolution, of a checkpoint
without a bias there is a network without that bias, and keys that are sorted do not show whether a
module stood before or behind a weight that is transposed.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st
from torch import Tensor, nn

from nfn_graph.converters import ConversionError, from_module, from_state_dict
from nfn_graph.data import Placement

Tensors = dict[str, Tensor]
Places = dict[str, Placement]


@dataclass(frozen=True)
class Network:
    """A chain of modules, and the names that its class gives them.

    Args:
        modules: The modules with tensors, in their order.
        names: Their names.
    """

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]

    def state_dict(self) -> Tensors:
        """The checkpoint as torch saves it."""
        named = zip(self.names, self.modules, strict=True)
        return {
            f"{name}.{key}": tensor
            for name, module in named
            for key, tensor in module.state_dict().items()
        }

    def places(self, *, flat_norms: bool = False) -> Places:
        """Where every tensor is in the graph of the network, found from its computation.

        Args:
            flat_norms: Whether what follows the last convolution acts on flat entries.
        """
        modules = list(self.modules)
        kernels = [i for i, m in enumerate(modules) if isinstance(m, nn.Conv2d)]
        linear = [i for i, m in enumerate(modules) if isinstance(m, nn.Linear)]
        example = torch.randn(2, *(modules[i].in_features for i in linear[:1]))
        if kernels:
            last = modules[kernels[-1]].out_channels
            positions = modules[linear[0]].in_features // last if linear else 1
            lost = sum(modules[i].kernel_size[0] - 1 for i in kernels)
            inputs = modules[kernels[0]].in_channels
            example = torch.randn(2, inputs, 1 + lost, positions + lost)
        flatten = linear[0] if kernels and linear else -1
        if flat_norms:
            flatten = kernels[-1] + 1 if kernels else 0
            modules[flatten:] = [
                nn.BatchNorm1d(m.num_features) if isinstance(m, nn.BatchNorm2d) else m
                for m in modules[flatten:]
            ]
        layers: list[nn.Module] = []
        names = {}
        for i, (name, module) in enumerate(zip(self.names, modules, strict=True)):
            layers += [nn.Flatten()] if i == flatten else []
            names[str(len(layers))] = name
            layers.append(module)
        network = nn.Sequential(*layers).eval()
        network(example)
        graph = from_module(network, example)
        return {_renamed(p.keys[0], names): p for p in graph.layout.placements}

    def replaced(self, at: int, *modules: nn.Module) -> Network:
        """The network with another module in the place of one, or with none."""
        return replace(
            self,
            modules=(*self.modules[:at], *modules, *self.modules[at + 1 :]),
            names=(*self.names[:at], *self.names[at : at + len(modules)], *self.names[at + 1 :]),
        )


def readings_of(network: Network) -> list[Places]:
    """Returns all places that the tensors of a network can have, if its modules fit."""
    found = []
    for flat_norms in (False, True):
        with contextlib.suppress(ConversionError, RuntimeError, ValueError, IndexError):
            found.append(network.places(flat_norms=flat_norms))
    return found


def _renamed(key: str, names: Mapping[str, str]) -> str:
    index, _, leaf = key.partition(".")
    return f"{names[index]}.{leaf}"


WORDS = [f"{first}{last}" for first in "abcd" for last in ("lpha", "eta", "amma", "elta")]
WIDTHS = st.sampled_from([1, 2, 3, 4, 4, 4, 6])


def _vectors(width: int, is_conv: bool) -> st.SearchStrategy[nn.Module | None]:
    makers = [nn.PReLU(width), nn.PReLU(), None, None]
    if is_conv:
        return st.sampled_from([nn.BatchNorm2d(width), *makers])
    # A LayerNorm of one neuron discards its input.
    norms = [nn.BatchNorm1d(width), *([nn.LayerNorm(width)] if width > 1 else [])]
    return st.sampled_from([*norms, *makers])


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Convolutions, then linear layers, with norms and slopes, under names of some style."""
    modules: list[nn.Module] = []
    convolutions, linear = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    assume(convolutions + linear)
    sizes = draw(st.lists(WIDTHS, min_size=convolutions + linear + 1, max_size=6))
    positions = draw(st.sampled_from([1, 2, 4]))
    if draw(st.booleans()) and (norm := draw(_vectors(sizes[0], convolutions > 0))):
        modules.append(norm)
    for i in range(convolutions + linear):
        inputs, outputs, bias = sizes[i], sizes[i + 1], draw(st.booleans())
        if i < convolutions:
            modules.append(nn.Conv2d(inputs, outputs, draw(st.sampled_from([1, 3])), bias=bias))
        else:
            inputs *= positions if i == convolutions > 0 else 1
            modules.append(nn.Linear(inputs, outputs, bias=bias))
        for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
            if vectors := draw(_vectors(outputs, i < convolutions)):
                modules.append(vectors)
    names = draw(names_of(modules))
    # Strategies share the modules that they choose from.
    modules = [copy.deepcopy(module) for module in modules]
    for i, tensor in enumerate(nn.ModuleList(modules).state_dict().values()):
        if tensor.is_floating_point():
            tensor.copy_(torch.linspace(i, i + 0.5, tensor.numel()).view(tensor.shape))
    return Network(tuple(modules), names)


@st.composite
def names_of(draw: st.DrawFn, modules: list[nn.Module]) -> tuple[str, ...]:
    """Returns indices of a Sequential, numbered words, or words without a meaning."""
    style = draw(st.sampled_from(["sequential", "by layer", "by kind", "words", "nested"]))
    event(style)
    if style == "sequential":
        gaps = [draw(st.integers(1, 2)) for _ in modules]
        return tuple(str(sum(gaps[:i])) for i in range(len(modules)))
    if style == "words":
        return tuple(draw(st.permutations(WORDS))[: len(modules)])
    kinds = {nn.Conv2d: "conv", nn.Linear: "fc", nn.PReLU: "act"}
    words = [kinds.get(type(module), "bn") for module in modules]
    layer, names = 0, []
    for i, (word, module) in enumerate(zip(words, modules, strict=True)):
        layer += isinstance(module, (nn.Conv2d, nn.Linear))
        count = layer if style != "by kind" else words[:i].count(word) + 1
        names.append(f"layers.{layer}.{word}" if style == "nested" else f"{word}{count}")
    assume(len({*names}) == len(names))
    return tuple(names)


def read(tensors: Tensors) -> Places | None:
    """Returns where a converter puts every tensor, or None if it refuses."""
    try:
        graph = from_state_dict(tensors, flatten="channels_first")
    except ConversionError as error:
        assert "\n" not in str(error)
        event("refused")
        return None
    event("read")
    return {p.keys[0]: p for p in graph.layout.placements}


def assert_one_of(found: Places | None, readings: list[Places], names: Mapping[str, str]) -> None:
    """Checks for a refusal, or for the same places under other keys.

    Args:
        found: Where a converter puts every tensor, if it does not refuse.
        readings: Where they can belong; none if there is no such network.
        names: The keys that tensors have in `readings`, by those in `found`.
    """
    if found is not None:
        places = {names.get(key, key): _place(p) for key, p in found.items()}
        assert places in [{key: _place(p) for key, p in other.items()} for other in readings]


def _place(p: Placement) -> tuple[Any, ...]:
    """A placement without its keys, and without axes of one entry, which may be split anyhow."""
    kept = [i for i, size in enumerate(p.view) if size > 1]
    return p.store, p.tap, *(tuple(x[i] for i in kept) for x in (p.view, p.axes, p.start, p.stop))


@given(networks())
def test_a_network_is_read_as_it_computes(network: Network) -> None:
    assert_one_of(read(network.state_dict()), [network.places()], {})


@given(networks(), st.randoms(use_true_random=False), st.sampled_from("trsm"))
def test_reordered(network: Network, rng: random.Random, how: str) -> None:
    items = list(network.state_dict().items())
    if how == "t":
        rng.shuffle(items)
    elif how == "m":
        order = rng.sample(network.names, len(network.names))
        items.sort(key=lambda item: order.index(item[0].rpartition(".")[0]))
    elif how == "s":
        items.sort()
    else:
        items.reverse()
    assert_one_of(read(dict(items)), [network.places()], {})


def other_names(tensors: Tensors, rng: random.Random, how: str) -> dict[str, str]:
    """New keys for the tensors, by the old ones."""
    names = {key: key for key in tensors}
    alike = [
        (a, b)
        for a in tensors
        for b in tensors
        if a < b
        and tensors[a].shape == tensors[b].shape
        and a.rpartition(".")[2] == b.rpartition(".")[2]
    ]
    if how == "nonsense":
        names[rng.choice(list(names))] = rng.choice(["foo", "foo.bar", "foo.weight", "99.bias"])
    elif how == "prefix":
        names = {key: f"module.{key}" for key in names}
    elif how == "swap tensors":
        assume(alike)
        a, b = rng.choice(alike)
        names[a], names[b] = b, a
    else:
        assume(alike)
        a, b = (key.rpartition(".")[0] for key in rng.choice(alike))
        for key in names:
            module, _, leaf = key.rpartition(".")
            names[key] = f"{ {a: b, b: a}.get(module, module) }.{leaf}"
    assume(len({*names.values()}) == len(names))
    return names


@given(
    networks(),
    st.randoms(use_true_random=False),
    st.sampled_from(["nonsense", "prefix", "swap tensors", "swap modules"]),
)
def test_renamed(network: Network, rng: random.Random, how: str) -> None:
    tensors = network.state_dict()
    names = other_names(tensors, rng, how)
    found = read({names[key]: tensor for key, tensor in tensors.items()})
    assert_one_of(found, [network.places()], {new: key for key, new in names.items()})


@given(networks(), st.randoms(use_true_random=False), st.booleans())
def test_transposed(network: Network, rng: random.Random, is_whole: bool) -> None:
    tensors = network.state_dict()
    weights = [key for key, x in tensors.items() if x.dim() > 1 and x.shape[0] != x.shape[1]]
    weights = [key for key in weights if tensors[key].dim() == 2 or tensors[key].shape[0] > 1]
    assume(weights and list(tensors) != sorted(tensors))
    chosen = weights if is_whole else [rng.choice(weights)]
    found = read({k: x.transpose(0, 1) if k in chosen else x for k, x in tensors.items()})
    for key in chosen:
        network = turned(network, network.names.index(key.rpartition(".")[0]))
    assert_one_of(found, readings_of(network), {})


def turned(network: Network, at: int) -> Network:
    """The network that stores the weight of a module the other way round."""
    module = network.modules[at]
    if isinstance(module, nn.Conv2d):
        sizes = module.out_channels, module.in_channels
        other = nn.Conv2d(*sizes, module.kernel_size[0], bias=False)
    else:
        assert isinstance(module, nn.Linear)
        other = nn.Linear(module.out_features, module.in_features, bias=False)
    other.bias = module.bias
    return network.replaced(at, other)


@given(
    networks(), st.randoms(use_true_random=False), st.sampled_from(["leaf", "ema", "copy", "next"])
)
def test_duplicated(network: Network, rng: random.Random, how: str) -> None:
    tensors = network.state_dict()
    keys = [key for key, x in tensors.items() if x.numel() > 1]
    assume(keys)
    key = rng.choice(keys)
    module, _, leaf = key.rpartition(".")
    copies = {
        "leaf": f"{key}_copy",
        "ema": f"ema.{key}",
        "copy": f"copy.{leaf}",
        "next": f"{int(module) + 1 if module.isdigit() else module + '9'}.{leaf}",
    }
    assume(copies[how] not in tensors)
    items = [*tensors.items(), (copies[how], tensors[key].clone())]
    if rng.random() < 0.5:
        at = list(tensors).index(key) + 1
        items.insert(at, items.pop())
    assert read(dict(items)) is None


def readings_without(network: Network, key: str) -> list[Places]:
    """Where the other tensors are in the network that has all of them but one, if there is one."""
    tensors = network.state_dict()
    name = key.rpartition(".")[0]
    mates = [k for k in tensors if k.rpartition(".")[0] == name and tensors[k].is_floating_point()]
    places = network.places()
    if key not in places:
        return [places]
    if mates == [key]:
        return readings_of(network.replaced(network.names.index(name)))
    if tensors[key].dim() > 1:
        return []
    gone = places.pop(key)
    return [
        {
            k: replace(p, tap=p.tap - (p.store == gone.store and p.tap > gone.tap))
            for k, p in places.items()
        }
    ]


@given(networks(), st.randoms(use_true_random=False))
def test_dropped(network: Network, rng: random.Random) -> None:
    tensors = network.state_dict()
    key = rng.choice(list(tensors))
    readings = readings_without(network, key)
    assert_one_of(read({k: x for k, x in tensors.items() if k != key}), readings, {})
