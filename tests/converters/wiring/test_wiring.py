"""The algebra of axes: layers that are tied, split or turned into positions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nfn_graph.converters import ConversionError
from nfn_graph.converters.wiring import Wiring
from nfn_graph.converters.wiring.axes import (
    Factor,
    Layer,
    Segment,
    Segments,
    axis_size,
    layer_orders,
    layers_of,
    plain,
    product,
    resolve,
    solve,
    take,
)
from nfn_graph.converters.wiring.ties import tie

orders = layer_orders()


def layer(size: int) -> Layer:
    """A new layer."""
    return Layer(size, next(orders))


def axis(*sizes: int) -> Segments:
    """An axis of new layers."""
    return plain(*map(layer, sizes))


def entries(segments: Segments) -> list[tuple[int, int, int]]:
    """Returns the layer, the neuron and the position of every entry of an axis."""
    found: list[tuple[int, int, int]] = []
    for segment in resolve(segments):
        found += inside(segment.factors)
    return found


def inside(factors: Sequence[Factor]) -> list[tuple[int, int, int]]:
    """The same of a product in which one layer, or one after another, alternates."""
    if not factors:
        return [(0, 0, 0)]
    first, *rest = factors
    inner = inside(rest)
    size = len(inner)
    if isinstance(first, Layer):
        return [(id(first), i, place) for i in range(first.size) for place in range(size)]
    if isinstance(first, tuple):
        return [e for s in first for e in inside((*s.factors, *rest))]
    assert first is not None
    return [(n, i, b * count(inner, n) + p) for b in range(first) for n, i, p in inner]


def count(found: list[tuple[int, int, int]], which: int) -> int:
    """The positions of each neuron of a layer."""
    return 1 + max(position for n, _, position in found if n == which)


def cut_into_parts(total: int, cuts: Sequence[int]) -> list[int]:
    """Sizes that add up to a total."""
    bounds = sorted({0, total, *(c % total for c in cuts)})
    return [b - a for a, b in pairwise(bounds)]


cuts = st.lists(st.integers(0, 23), max_size=4)


@given(cuts, cuts)
def test_tied_axes_have_the_same_entries(first: list[int], second: list[int]) -> None:
    left, right = axis(*cut_into_parts(24, first)), axis(*cut_into_parts(24, second))
    tie(left, right)
    assert entries(left) == entries(right)
    assert len(layers_of(left)) == len({c % 24 for c in [*first, *second]} | {0})


@given(cuts, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]))
def test_a_plain_layer_takes_the_positions_of_its_partner(
    where: list[int], before: int, after: int
) -> None:
    inner = axis(*cut_into_parts(24, where))
    left = product(before, inner, after)
    right = axis(24 * before * after)
    tie(right, left)
    assert entries(left) == entries(right)
    assert set(layers_of(right)) == set(layers_of(inner))


@given(cuts, st.integers(0, 23), st.integers(1, 24))
def test_a_slice_has_the_entries_of_its_axis(where: list[int], start: int, length: int) -> None:
    whole = axis(*cut_into_parts(24, where))
    stop = min(start + length, 24)
    part = take(whole, start, stop)
    assert entries(part) == entries(whole)[start:stop]


def test_ties_are_transitive_and_remember_what_is_fixed() -> None:
    a, b, c = layer(4), layer(4), layer(4)
    c.is_input = True
    tie(plain(a), plain(b))
    assert not a.root.fixed
    tie(plain(b), plain(c))
    assert a.root is b.root is c.root
    assert a.root.fixed


def test_parts_of_one_layer_can_be_tied_to_each_other() -> None:
    whole = axis(6)
    tie(take(whole, 0, 4), take(whole, 2, 6))
    assert len(set(layers_of(whole))) == 1
    assert axis_size(resolve(whole)) == 6


def test_an_unknown_number_of_positions_follows_from_the_size() -> None:
    open_ = (Segment((layer(4), None)), Segment((layer(3),)))
    assert solve(open_, 4 * 5 + 3)[0].factors[1] == 5
    for total in (4 * 5 + 2, 3, 2):
        with pytest.raises(ConversionError, match="example_input"):
            solve(open_, total)
    with pytest.raises(ConversionError, match="example_input"):
        solve((Segment((None, layer(4), None)),), 24)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (axis(4), axis(5)),
        (product(axis(4), 6), product(4, axis(6))),
        (product(axis(4), 3), product(axis(6), 2)),
        (product(2, axis(2, 4)), product(4, axis(3))),
    ],
)
def test_axes_that_cannot_agree_are_refused(left: Segments, right: Segments) -> None:
    with pytest.raises(ConversionError, match="Expected two axes"):
        tie(left, right)


def test_errors_say_where() -> None:
    wiring = Wiring({"w": torch.randn(2, 3)})
    with pytest.raises(ConversionError, match=r"^node 3: .*'v'"), wiring.at("node 3"):
        wiring.parameter("v")


def test_one_tensor_has_one_meaning() -> None:
    """A vector that is added along neurons in one place and along positions in another."""
    wiring = Wiring({"w": torch.randn(4, 3), "v": torch.randn(4), "u": torch.randn(4, 4)})
    x = wiring.linear(wiring.input((2, 4, 3)), wiring.parameter("w"))
    x = wiring.channelwise(x, [wiring.parameter("v")], -1)
    with pytest.raises(ConversionError, match=r"axis 0 of 'v' .*positions"):
        wiring.combine(x, wiring.unsqueeze(wiring.parameter("v"), 1))


def test_an_output_is_needed() -> None:
    wiring = Wiring({"w": torch.randn(2, 3)})
    wiring.linear(wiring.input(), wiring.parameter("w"))
    with pytest.raises(ConversionError, match="output"):
        wiring.layout()


@pytest.mark.parametrize("flag", ["is_input", "is_output", "is_fixed"])
@pytest.mark.parametrize("flagged", [0, 1])
def test_what_is_fixed_stays_so_when_layers_are_tied(flag: str, flagged: int) -> None:
    layers = layer(6), layer(6)
    setattr(layers[flagged], flag, True)
    tie(plain(layers[0]), plain(layers[1]))
    assert getattr(layers[0].root, flag)
    for part in layers_of(take(plain(layers[1]), 2, 4)):
        assert getattr(part, flag)


def test_a_shape_that_contradicts_what_is_known_is_refused() -> None:
    wiring = Wiring({"w": torch.randn(4, 3)})
    weight = wiring.parameter("w")
    x = wiring.linear(wiring.input((2, 5, 3)), weight)
    for value, wrong in (
        (x, (2, 4)),
        (x, (2, 5, 1, 4)),
        (x, (2, 6, 4)),
        (x, (2, 5, 8)),
        (wiring.reduce(x), (1,)),
        (wiring.input((2, 3)), (2, 3, 1)),
        (weight, (3, 4)),
    ):
        with pytest.raises(ConversionError, match="Expected a result of shape"):
            wiring.annotate(value, wrong)
    assert wiring.annotate(x, (2, 5, 4)).shape == (2, 5, 4)
    assert wiring.annotate(wiring.unsqueeze(weight, 0), (7, 4, 3)).shape == (1, 4, 3)


def test_the_order_shows_also_in_parts_that_came_later() -> None:
    """The position of a maximum is used after the layer was split, or before."""
    for is_split_first in (True, False):
        wiring = Wiring({"w": torch.randn(6, 3), "v": torch.randn(2, 6)})
        x = wiring.linear(wiring.input((1, 3)), wiring.parameter("w"))
        place = wiring.places(x, [1], True)
        if is_split_first:
            wiring.slice(x, 1, 0, 2)
        wiring.combine(x, place)
        wiring.slice(x, 1, 0, 2)
        wiring.output(wiring.linear(x, wiring.parameter("v")))
        assert all(n.fixed for n in wiring.layout().spec.neurons)


@pytest.mark.parametrize(
    ("groups", "is_refused"), [(1, False), (2, False), (4, False), (3, True), (8, True)]
)
def test_groups_of_channels(groups: int, is_refused: bool) -> None:
    tensors = {"w": torch.randn(4, 3), "scale": torch.randn(4)}
    wiring = Wiring(tensors)
    x = wiring.linear(wiring.input((2, 3)), wiring.parameter("w"))
    if is_refused:
        with pytest.raises(ConversionError, match=f"{groups} groups of 4 channels"):
            wiring.group_norm(x, groups, [wiring.parameter("scale")])
    else:
        wiring.group_norm(x, groups, [wiring.parameter("scale")])


def test_products_of_values() -> None:
    wiring = Wiring({"w": torch.randn(4, 3), "v": torch.randn(4, 4)})
    x = wiring.linear(wiring.input((2, 5, 3)), wiring.parameter("w"))
    assert wiring.matmul(wiring.input((7, 5)), x).shape == (2, 7, 4)
    assert wiring.matmul(wiring.input((6, 1, 7, 5)), x).shape == (6, 2, 7, 4)
    assert wiring.matmul(wiring.permute(x, (0, 2, 1)), wiring.input((5,))).shape == (2, 4)
    assert wiring.matmul(wiring.input((2, 3)), wiring.input((3, 4))).shape is None
    assert wiring.matmul(x, wiring.permute(x, (0, 2, 1))).shape == (2, 5, 5)
    for first, second in (
        (x, wiring.input((4, 4))),
        (wiring.parameter("w"), wiring.parameter("v")),
        (wiring.input(), x),
    ):
        with pytest.raises(ConversionError):
            wiring.matmul(first, second)
