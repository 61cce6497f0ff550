"""The symmetry of a converted network is that of the function it computes, and is complete."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES, Architecture
from permuting import (
    assert_symmetric,
    distance,
    free_sizes,
    moving_only,
    only_export,
    outputs_of,
)

from nfn_graph import symmetry
from nfn_graph.converters import ConversionError, from_module, to_state_dict

ALL = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())


@ALL
def test_permuted_neurons_compute_the_same(architecture: Architecture) -> None:
    module, inputs = architecture.module(), architecture.inputs()
    assert_symmetric(from_module(module, inputs), module, inputs)


@ALL
def test_every_layer_is_free_that_can_be(architecture: Architecture) -> None:
    graph = from_module(architecture.module(), architecture.inputs())
    assert free_sizes(graph) == architecture.free


@ALL
def test_no_tensor_may_be_left_behind(architecture: Architecture) -> None:
    """Keeping the order of a single tensor while the rest is permuted changes the outputs."""
    module, inputs = architecture.module(), architecture.inputs()
    graph = from_module(module, inputs)
    expected = outputs_of(module, inputs)
    original = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    tried = 0
    for neuron in graph.spec.neurons:
        if neuron.name not in symmetry.layer_sizes(graph, "hnp"):
            continue
        one = moving_only(graph, neuron.name)
        if one is None:
            continue
        permuted = to_state_dict(one.apply(graph))
        keys = {placement.keys for placement in graph.layout.placements}
        changed = [k for k in keys if not torch.equal(permuted[k[0]], original[k[0]])]
        for shared in changed if len(changed) > 1 else []:
            key = shared[0]
            module.load_state_dict({**permuted, **{k: original[k] for k in shared}})
            assert distance(outputs_of(module, inputs), expected) > 1e-9, (neuron.name, key)
            tried += 1
    assert tried >= len(architecture.free)


@ALL
def test_the_tensors_come_back_bit_for_bit(architecture: Architecture) -> None:
    module = architecture.build().to(torch.float32)
    expected = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    inputs = tuple(x.float() for x in architecture.inputs())
    actual = to_state_dict(from_module(module, inputs))
    assert list(actual) == list(expected)
    for key, tensor in expected.items():
        assert actual[key].dtype == tensor.dtype
        assert actual[key].shape == tensor.shape
        assert torch.equal(actual[key], tensor)


@ALL
def test_the_shapes_are_only_needed_where_said(architecture: Architecture) -> None:
    module = architecture.module()
    if architecture.needs_example:
        with pytest.raises(ConversionError, match="example_input"):
            from_module(module)
        return
    expected = from_module(module, architecture.inputs()).layout
    assert from_module(module).layout == expected
    assert from_module(module.to("meta")).layout == expected


@ALL
def test_both_ways_of_following_a_module_agree(
    architecture: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.fx and torch.export describe the same network in different ways."""
    module, inputs = architecture.module(), architecture.inputs()
    expected = from_module(module, inputs).layout
    only_export(monkeypatch)
    assert from_module(module, inputs).layout == expected


@ALL
def test_verify_agrees(architecture: Architecture) -> None:
    module, inputs = architecture.module(), architecture.inputs()
    verified = from_module(module, inputs, verify=True)
    assert verified.layout == from_module(module, inputs).layout
