"""Images of SIRENs from their graphs, and operations on images."""

from __future__ import annotations

import pytest
import torch
from siren_data import sirens
from torch import Tensor

from nfn_graph import Batch, WeightGraph
from nfn_graph.tasks.image_operations import Operation, edit_images
from nfn_graph.tasks.zoo.render import render_graphs
from nfn_graph.tasks.zoo.siren import pixel_grid, siren_computation, siren_forward

SHAPES = ((4, 4), (3,), (5, 6), (4, 4), (3, 3, 3), (4, 4))
W0 = (30.0, 20.0, 30.0, 30.0, 25.0, 10.0)
OFFSET = (0.5, 0.5, 0.0, 0.5, 0.5, 0.5)


def alone(graph: WeightGraph, w0: float, offset: float) -> Tensor:
    """The reference computes one network from its tensors with the formula of the zoo."""
    parameters = {key: x.unsqueeze(0) for key, x in graph.to_tensors().items()}
    grid = pixel_grid(6, 7, torch.float64)
    return siren_forward(parameters, grid, w0, offset).unflatten(-1, (6, 7))


@pytest.mark.parametrize("outputs", [1, 3])
def test_networks_of_all_shapes_together(outputs: int) -> None:
    graphs = sirens(*SHAPES, outputs=outputs, w0=W0, offset=OFFSET)
    found = render_graphs(Batch.from_data_list(graphs), (6, 7))
    assert found.shape == (6, outputs, 6, 7)
    for i, graph in enumerate(graphs):
        expected = alone(graph, W0[i], OFFSET[i])
        torch.testing.assert_close(found[i : i + 1], expected, atol=1e-12, rtol=0)


def test_one_shape_and_one_network() -> None:
    graphs = sirens((4, 5), (4, 5), offset=(0.5, 0.5))
    found = render_graphs(Batch.from_data_list(graphs), (6, 7))
    torch.testing.assert_close(found[1:], alone(graphs[1], 30.0, 0.5), atol=1e-12, rtol=0)
    single = render_graphs(graphs[0], (6, 7))
    torch.testing.assert_close(single, found[:1], atol=1e-12, rtol=0)


def test_gradients_reach_every_weight() -> None:
    """The result is that of each network alone."""
    batch = Batch.from_data_list(sirens(*SHAPES, w0=W0, offset=OFFSET))
    raw = batch.features()
    leaves = raw.map(lambda x: x.clone().requires_grad_())
    render_graphs(leaves.to_graph(), (6, 7)).square().sum().backward()
    slopes = leaves.map(lambda x: x.grad if x.numel() else x.detach()).to_graph()
    for i, graph in enumerate(sirens(*SHAPES)):
        own = graph.features().map(lambda x: x.clone().requires_grad_())
        alone(own.to_graph(), W0[i], OFFSET[i]).square().sum().backward()
        expected = {**own.weights, **own.neurons}
        for key, x in slopes[i].features().tensors():
            if x.numel():
                torch.testing.assert_close(x, expected[key].grad, atol=1e-9, rtol=1e-9)
                assert x.abs().max() > 0


def test_what_is_no_siren_of_an_image() -> None:
    classifier = WeightGraph.from_tensors([torch.rand(4, 3), torch.rand(2, 4)])
    with pytest.raises(ValueError, match=r"SIREN of an image.*input\[3\]"):
        siren_computation(classifier.layout, 30.0, 0.5)
    convolution = WeightGraph.from_tensors(
        [torch.rand(4, 2, 3, 3), torch.rand(2, 4)], [torch.rand(4), torch.rand(2)]
    )
    with pytest.raises(ValueError, match="SIREN of an image"):
        siren_computation(convolution.layout, 30.0, 0.5)


def picture(channels: int = 1) -> Tensor:
    """A bright square with a grey edge, away from the centre."""
    image = torch.zeros(1, channels, 9, 9)
    image[:, :, 2:6, 3:6] = 0.4
    image[:, :, 3:5, 4] = 1.0
    return image


def test_dilate_and_erode() -> None:
    image = picture()
    thick, thin = edit_images(image, "dilate"), edit_images(image, "erode")
    assert thick.sum() > image.sum() > thin.sum()
    assert (thick >= image).all() and (thin <= image).all()
    assert thick[0, 0, 2, 3] == 1.0 and thick[0, 0, 1, 2] == pytest.approx(0.4)
    assert edit_images(image, "dilate", 5).sum() > thick.sum()
    assert torch.equal(edit_images(image, "dilate", 1), image)


def test_contrast_blur_invert() -> None:
    image = picture()
    sharp = edit_images(image, "contrast", 2.0)
    assert sharp[0, 0, 0, 0] == 0 and sharp[0, 0, 3, 4] == 1
    assert sharp[0, 0, 2, 3] == pytest.approx(0.3)
    soft = edit_images(image, "blur")
    assert soft.var() < image.var() and soft.max() < 1
    torch.testing.assert_close(edit_images(image, "invert"), 1 - image)


def test_rotate() -> None:
    torch.testing.assert_close(
        edit_images(picture(), "rotate", 90), torch.rot90(picture(), 1, (2, 3)), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("name", ["dilate", "erode", "contrast", "blur", "invert", "rotate"])
def test_colours_and_types(name: Operation) -> None:
    image = torch.cat([picture(), 0.5 * picture(), picture().flip(2)], 1).double()
    found = edit_images(image, name)
    assert found.dtype == torch.float64 and found.shape == image.shape
    for i in range(3):
        own = edit_images(image[:, i : i + 1], name)
        torch.testing.assert_close(found[:, i : i + 1], own, atol=1e-6, rtol=0)
    beyond = edit_images(image * 3 - 1, name)
    assert beyond.min() >= 0 and beyond.max() <= 1


@pytest.mark.parametrize(
    ("name", "amount", "message"),
    [
        ("shear", 0, "--operation: dilate, erode"),
        ("dilate", 2.5, "number of pixels"),
        ("erode", -1, "number of pixels"),
        ("contrast", -1, "above 0"),
        ("invert", 2, "no --amount"),
    ],
)
def test_bad_operations(name: Operation, amount: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        edit_images(picture(), name, amount)
