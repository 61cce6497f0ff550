"""Keras files that contain weights only, networks given as `arch`, and archives."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import checkpoints
import h5py
import pytest
import torch
from comparing import check_same_graph
from keras_networks import conv, dense, free_sizes, norm
from torch import Tensor, nn

from nfn_graph import WeightGraph, symmetry
from nfn_graph.converters import ConversionError, from_module, from_state_dict, load, to_module
from nfn_graph.converters.conversion.reading import find_files
from nfn_graph.converters.io import read_tensors, save

Layers = dict[str, dict[str, Any]]


def write_counted(path: Path, groups: dict[str, list[Any]]) -> None:
    """A file as Keras 3's `save_weights` writes it."""
    with h5py.File(path, "w") as file:
        for name, values in groups.items():
            group = file.create_group(f"layers/{name}/vars")
            for i, value in enumerate(values):
                group.create_dataset(str(i), data=value)


def of(layer: dict[str, Any]) -> list[Any]:
    return list(layer.values())


def check_back(graph: WeightGraph, path: Path) -> None:
    """The file comes back bit for bit, and permuted weights go into a copy of it."""
    original, again = read_tensors(path), path.with_stem("again")
    save(graph, again, template=path)
    written = read_tensors(again)
    assert list(written) == list(original)
    assert all(torch.equal(written[key], original[key]) for key in original)
    permuted = symmetry.sample(graph, "hnp").apply(graph)
    save(permuted, again, template=path)
    assert any(not torch.equal(read_tensors(again)[key], original[key]) for key in original)


REFUSED: dict[str, tuple[Layers, str]] = {
    "heads": (
        {
            "h": dense(nn.Linear(8, 6)),
            "z_mean": dense(nn.Linear(6, 4)),
            "z_log": dense(nn.Linear(6, 4)),
        },
        "'z_log', which reads 6 neurons, after 'z_mean', which returns 4.*arch=",
    ),
    "addition": (
        {"a": dense(nn.Linear(4, 4)), "add_1": {}, "b": dense(nn.Linear(4, 4))},
        "'add_1', which may combine",
    ),
    "unknown": (
        {"a": dense(nn.Linear(4, 4)), "mix": {}, "b": dense(nn.Linear(4, 4))},
        "'mix', which may combine",
    ),
    "inputs": ({"input_1": {}, "input_2": {}, "a": dense(nn.Linear(4, 4))}, "several inputs"),
    "names": (
        {"pi": dense(nn.Linear(4, 4)), "vf": dense(nn.Linear(4, 4))},
        "'pi.weight' and 'vf.weight', which are named as parallel branches",
    ),
    "named gru": (
        {"my_gru": {"kernel": torch.randn(4, 12), "bias": torch.randn(2, 12)}},
        "'my_gru'.*a recurrence over time",
    ),
    "own": (
        {"a": {"prototypes": torch.randn(4, 3)}},
        "a/a/prototypes:0.*unknown class",
    ),
    "may be depthwise": (
        {"a": {"kernel": torch.randn(3, 3, 4, 1)}},
        "'a/a/kernel:0'.*a convolution or of a depthwise",
    ),
    "group norm": (
        {
            "conv2d": conv(nn.Conv2d(1, 4, 3)),
            "group_normalization": {"gamma": torch.randn(4), "beta": torch.randn(4)},
        },
        "'group_normalization'",
    ),
}


class TestLayersInOrder:
    """`layer_names` lists all layers in the order of the model."""

    def test_the_order_of_equal_layers(self, tmp_path: Path) -> None:
        modules = [nn.Conv2d(1, 6, 3), *(nn.Conv2d(6, 6, 3) for _ in range(3)), nn.Conv2d(6, 1, 3)]
        layers: Layers = {"input_1": {}}
        names = ("conv2d_9", "first", "conv2d_10", "conv2d_2", "out")
        for name, module in zip(names, modules, strict=True):
            layers[name] = conv(module)
            layers[f"{name}_relu"] = {}
        checkpoints.write_keras(tmp_path / "x.h5", layers)
        graph = load(tmp_path / "x.h5")
        check_same_graph(graph, from_module(nn.Sequential(*modules)))
        check_back(graph, tmp_path / "x.h5")

    def test_models_inside_do_not_lose_tensors(self, tmp_path: Path) -> None:
        a, b, c = nn.Linear(8, 6), nn.Linear(6, 4), nn.Linear(4, 8)
        layers = {
            "input_1": {},
            "encoder": {
                **{f"dense_1/{k}": v for k, v in dense(a).items()},
                **{f"z_mean/{k}": v for k, v in dense(b).items()},
            },
            "decoder": {f"dense_2/{k}": v for k, v in dense(c).items()},
        }
        checkpoints.write_keras(tmp_path / "x.h5", layers)
        graph = load(tmp_path / "x.h5")
        assert len(read_tensors(tmp_path / "x.h5")) == 6
        check_same_graph(graph, from_module(nn.Sequential(a, b, c)))
        check_back(graph, tmp_path / "x.h5")

    def test_transposed_convolutions(self, tmp_path: Path) -> None:
        down, up = nn.Conv2d(1, 5, 3), nn.ConvTranspose2d(5, 1, 3)
        layers = {"conv2d": conv(down), "conv2d_transpose": conv(up)}
        checkpoints.write_keras(tmp_path / "x.h5", layers)
        for arch in (None, nn.Sequential(down, nn.ReLU(), up)):
            graph = load(tmp_path / "x.h5", arch=arch)
            check_same_graph(graph, from_module(nn.Sequential(down, up)))
            check_back(graph, tmp_path / "x.h5")
            save(graph, tmp_path / "without.h5")
            check_same_graph(load(tmp_path / "without.h5"), graph)

    @pytest.mark.parametrize("flatten", ["channels_first", "channels_last"])
    def test_flattened_channels(self, flatten: Any, tmp_path: Path) -> None:
        first, last = nn.Conv2d(2, 3, 3), nn.Linear(3 * 4, 2)
        layers: Layers = {
            "conv2d": conv(first),
            "batch_normalization": norm(nn.BatchNorm1d(3)),
            "max_pooling2d": {},
            "flatten": {},
            "dense": dense(last),
        }
        checkpoints.write_keras(tmp_path / "x.h5", layers)
        with pytest.raises(ConversionError, match="12 inputs of 'dense' are 3 channels times 4"):
            load(tmp_path / "x.h5")
        graph = load(tmp_path / "x.h5", flatten=flatten)
        entries = last.weight.detach().reshape(2, *((3, 4) if "first" in flatten else (4, 3)))
        taps = entries if "first" in flatten else entries.transpose(1, 2)
        edges = graph["hidden1", "weight", "output"].edge_attr[..., 0]
        assert torch.equal(edges, taps.reshape(6, 4))
        assert graph.spec.neuron["hidden1"].taps == 5

    @pytest.mark.parametrize("name", REFUSED)
    def test_what_may_be_no_chain_is_refused(self, name: str, tmp_path: Path) -> None:
        layers, message = REFUSED[name]
        checkpoints.write_keras(tmp_path / "x.h5", layers)
        with pytest.raises(ConversionError, match=rf"x\.h5.*{message}") as error:
            load(tmp_path / "x.h5")
        assert "\n" not in str(error.value)

    def test_weights_of_the_model_itself_are_not_dropped(self, tmp_path: Path) -> None:
        checkpoints.write_keras(tmp_path / "x.h5", {"dense": dense(nn.Linear(3, 2))})
        with h5py.File(tmp_path / "x.h5", "a") as file:
            own = file.create_group("top_level_model_weights")
            own.attrs["weight_names"] = [b"temperature:0"]
            own["temperature:0"] = torch.ones(1)
        assert "top_level_model_weights/temperature:0" in read_tensors(tmp_path / "x.h5")
        with pytest.raises(ConversionError, match="top_level_model_weights"):
            load(tmp_path / "x.h5")


class TestCountedLayers:
    """Keras 3 numbers the layers of each class, which leaves the order of the classes open."""

    def test_layers_of_a_class_are_in_order(self, tmp_path: Path) -> None:
        """This also holds from the eleventh layer on, which comes third in the file."""
        modules = [nn.Linear(4, 4) for _ in range(12)]
        names = ["dense", *(f"dense_{i}" for i in range(1, 12))]
        write_counted(
            tmp_path / "x.weights.h5",
            {name: of(dense(module)) for name, module in zip(names, modules, strict=True)},
        )
        expected = from_module(nn.Sequential(*modules))
        check_same_graph(load(tmp_path / "x.weights.h5"), expected)
        arch = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
        graph = load(tmp_path / "x.weights.h5", arch=arch)
        check_same_graph(graph, expected)
        to_module(graph, arch)
        assert torch.equal(arch[10].weight, modules[10].weight)

    def test_sizes_tell_where_a_norm_is(self, tmp_path: Path) -> None:
        a, b, values = nn.Linear(5, 8), nn.Linear(8, 2), norm(nn.BatchNorm1d(8))
        groups = {"batch_normalization": of(values), "dense": of(dense(a)), "dense_1": of(dense(b))}
        write_counted(tmp_path / "x.h5", groups)
        graph = load(tmp_path / "x.h5")
        expected = torch.stack([a.bias.detach(), *values.values()], 1)
        assert torch.equal(graph["hidden1"].x[..., 0], expected)
        check_back(graph, tmp_path / "x.h5")
        # The order of layers is stored in a file that has one.
        save(graph, tmp_path / "y.h5")
        check_same_graph(load(tmp_path / "y.h5"), graph)
        groups["dense_1"] = of(dense(nn.Linear(8, 8)))
        groups["dense_2"] = of(dense(b))
        write_counted(tmp_path / "x.h5", groups)
        with pytest.raises(ConversionError, match=r"2 places for 'batch_normalization'.*arch="):
            load(tmp_path / "x.h5")

    def test_a_functional_model_may_add(self, tmp_path: Path) -> None:
        """Its file lists its inputs, but no additions that are written with a plus."""
        groups = {
            "dense": of(dense(nn.Linear(3, 4))),
            "dense_1": of(dense(nn.Linear(4, 4))),
            "dense_2": of(dense(nn.Linear(4, 2))),
        }
        write_counted(tmp_path / "x.h5", groups)
        assert free_sizes(load(tmp_path / "x.h5")) == [4, 4]
        write_counted(tmp_path / "x.h5", {**groups, "input_layer": []})
        with pytest.raises(ConversionError, match=r"'dense' and at 'dense_1', which may be added"):
            load(tmp_path / "x.h5")
        write_counted(tmp_path / "x.h5", {**groups, "add": []})
        with pytest.raises(ConversionError, match="'add', which may combine"):
            load(tmp_path / "x.h5")

    def test_classes_of_one_shape_have_no_order(self, tmp_path: Path) -> None:
        groups = {
            "conv2d": of(conv(nn.Conv2d(4, 4, 1))),
            "conv2d_transpose": of(conv(nn.Conv2d(4, 4, 1))),
        }
        write_counted(tmp_path / "x.h5", groups)
        with pytest.raises(ConversionError, match="several readings"):
            load(tmp_path / "x.h5")
        arch = nn.Sequential(nn.ConvTranspose2d(4, 4, 1), nn.Conv2d(4, 4, 1))
        with pytest.raises(
            ConversionError, match=r"'conv2d' and 'conv2d_transpose'.*counted separately"
        ):
            load(tmp_path / "x.h5", arch=arch)


class Both(nn.Module):
    """A small network with most kinds of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.act = nn.PReLU(4)
        self.up = nn.ConvTranspose2d(4, 3, 3)
        self.depth = nn.Conv2d(3, 3, 2, groups=3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The head reads the mean over positions."""
        return self.head(self.depth(self.up(self.act(self.bn(self.conv(x))))).mean((2, 3)))


def both_layers(module: Both) -> Layers:
    state = {key: torch.rand_like(x) for key, x in module.state_dict().items() if x.dim()}
    names = {"gamma": "weight", "beta": "bias"}
    names |= {"moving_mean": "running_mean", "moving_variance": "running_var"}
    turned = {
        name: state[f"{name}.weight"].permute(2, 3, 1, 0).contiguous() for name in ("conv", "up")
    }
    return {
        "conv": {"kernel": turned["conv"], "bias": state["conv.bias"]},
        "bn": {keras: state[f"bn.{name}"] for keras, name in names.items()},
        "act": {"alpha": state["act.weight"].reshape(1, 1, 4)},
        "up": {"kernel": turned["up"], "bias": state["up.bias"]},
        "depth": {
            "depthwise_kernel": state["depth.weight"].permute(2, 3, 0, 1).contiguous(),
            "bias": state["depth.bias"],
        },
        "head": {"kernel": state["head.weight"].T.contiguous(), "bias": state["head.bias"]},
    }


class TestArch:
    """A PyTorch network determines what a file of weights means."""

    def test_the_way_into_the_module(self, tmp_path: Path) -> None:
        module = Both().double().eval()
        layers = both_layers(module)
        checkpoints.write_keras(tmp_path / "x.h5", layers)
        graph = load(tmp_path / "x.h5", arch=module)
        check_back(graph, tmp_path / "x.h5")
        assert to_module(graph, module) is module
        state = module.state_dict()
        assert torch.equal(state["act.weight"], layers["act"]["alpha"].flatten())
        assert torch.equal(state["up.weight"], layers["up"]["kernel"].permute(3, 2, 0, 1))
        check_same_graph(from_module(module), graph)
        x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
        expected = module(x)
        for _ in range(3):
            to_module(symmetry.sample(graph, "hnp").apply(graph), module)
            assert (module(x) - expected).abs().max() <= 1e-9 * expected.abs().max()

    def test_kernels_of_other_files_are_not_turned(self) -> None:
        """Names of Keras in a file that stores `[out, in]`: a square matrix would be transposed."""
        graph = from_state_dict({"a/kernel:0": torch.randn(3, 3)}, orientation="out_in")
        with pytest.raises(ConversionError, match="a module with the tensors"):
            to_module(graph, nn.Sequential(nn.Linear(3, 3, bias=False)))

    def test_the_way_from_an_archive(self, tmp_path: Path) -> None:
        """The configuration has the order that the counted layers do not have."""
        arch = nn.Sequential(nn.ConvTranspose2d(4, 4, 1), nn.Conv2d(4, 4, 1))
        layers = {"up": conv(arch[0]), "down": conv(arch[1])}
        config = checkpoints.sequential(("Conv2DTranspose", "up", {}), ("Conv2D", "down", {}))
        checkpoints.write_keras_archive(tmp_path / "x.keras", layers, config)
        check_same_graph(load(tmp_path / "x.keras", arch=arch), from_module(arch))

    def test_other_networks_are_refused(self, tmp_path: Path) -> None:
        checkpoints.write_keras(tmp_path / "x.h5", {"a": dense(nn.Linear(3, 2))})
        with pytest.raises(ConversionError, match=r"layer 'a' to be '0' of arch.*\(3, 2\)"):
            load(tmp_path / "x.h5", arch=nn.Sequential(nn.Linear(2, 3)))
        with pytest.raises(ConversionError, match=r"the 2 layers of arch.*got 1"):
            load(tmp_path / "x.h5", arch=nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))

    @pytest.mark.parametrize("is_theano", [False, True])
    def test_names_of_keras_1(self, is_theano: bool, tmp_path: Path) -> None:
        """Old names such as `dense_1_W`; the axes of a kernel came in one of two orders."""
        arch = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
        kernel = arch[0].weight.detach()
        values = of(norm(nn.BatchNorm1d(4)))
        groups = {
            "convolution2d_1": {
                "W": kernel if is_theano else kernel.permute(2, 3, 1, 0),
                "b": arch[0].bias.detach(),
            },
            "batchnormalization_1": dict(
                zip(("gamma", "beta", "running_mean", "running_std"), values, strict=True)
            ),
            "dense_1": {"W": arch[3].weight.detach().T, "b": arch[3].bias.detach()},
        }
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file.attrs["layer_names"] = [name.encode() for name in groups]
            for name, tensors in groups.items():
                group = file.create_group(name)
                group.attrs["weight_names"] = [f"{name}_{role}".encode() for role in tensors]
                for role, value in tensors.items():
                    group.create_dataset(f"{name}_{role}", data=value)
        graph = load(tmp_path / "x.h5", arch=arch, example_input=torch.empty(1, 2, 4, 4))
        edges = graph["input", "weight", "hidden1"].edge_attr[..., 0]
        assert torch.equal(edges, kernel.reshape(8, 9))
        to_module(graph, arch)
        assert torch.equal(arch[1].running_var, values[3])
        with pytest.raises(ConversionError, match=r"kernel of Keras 1.*two orders"):
            load(tmp_path / "x.h5")

    def test_orders_that_both_fit_are_refused(self, tmp_path: Path) -> None:
        arch = nn.Sequential(nn.Conv2d(3, 3, 3, bias=False))
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file.attrs["layer_names"] = [b"c"]
            file.create_group("c").attrs["weight_names"] = [b"c_W"]
            file["c/c_W"] = torch.randn(3, 3, 3, 3)
        with pytest.raises(ConversionError, match=r"'c/c_W'.*either order"):
            load(tmp_path / "x.h5", arch=arch)


class TestArchives:
    """`.keras` files: an archive of the configuration and the weights."""

    LAYERS: Layers = checkpoints.keras_mlp(checkpoints.mlp())
    CONFIG = checkpoints.sequential(*(("Dense", name, {}) for name in LAYERS))

    @pytest.mark.parametrize("pack", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    def test_only_the_weights_are_written(self, pack: int, tmp_path: Path) -> None:
        path, new = tmp_path / "x.keras", tmp_path / "y.keras"
        checkpoints.write_keras_archive(path, self.LAYERS, self.CONFIG, pack)
        graph = load(path)
        graph["hidden1"].x += 1
        save(graph, new, template=path)
        with zipfile.ZipFile(path) as before, zipfile.ZipFile(new) as after:
            assert after.testzip() is None
            assert after.namelist() == before.namelist()
            for name in ("metadata.json", "config.json"):
                assert after.read(name) == before.read(name)
        changed = {
            key
            for key, tensor in read_tensors(path).items()
            if not torch.equal(read_tensors(new)[key], tensor)
        }
        assert changed == {"layers/dense/vars/1"}

    def test_templates_are_of_the_same_format(self, tmp_path: Path) -> None:
        checkpoints.write_keras_archive(tmp_path / "x.keras", self.LAYERS, self.CONFIG)
        checkpoints.write_keras(tmp_path / "x.h5", self.LAYERS, self.CONFIG)
        graph = load(tmp_path / "x.keras")
        with pytest.raises(ConversionError, match=r"as template=\.\.\., to write .*y\.keras"):
            save(graph, tmp_path / "y.keras")
        with pytest.raises(ConversionError, match=r"format of .*y\.keras.*got .*x\.h5"):
            save(graph, tmp_path / "y.keras", template=tmp_path / "x.h5")
        with pytest.raises(ConversionError, match=r"format of .*y\.h5.*got .*x\.keras"):
            save(graph, tmp_path / "y.h5", template=tmp_path / "x.keras")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["x.h5", "x.keras"]

    def test_they_are_found_in_folders(self, tmp_path: Path) -> None:
        checkpoints.write_keras_archive(tmp_path / "x.keras", self.LAYERS, self.CONFIG)
        assert find_files([tmp_path]).files == [tmp_path / "x.keras"]

    def test_weights_of_other_layers_are_refused(self, tmp_path: Path) -> None:
        layers = dict(list(self.LAYERS.items())[:2])
        checkpoints.write_keras_archive(tmp_path / "x.keras", layers, self.CONFIG)
        with pytest.raises(ConversionError, match=r"3 layers of the class Dense \(got 2: dense, "):
            load(tmp_path / "x.keras")

    def test_errors_name_the_archive(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "x.keras", "w") as archive:
            archive.writestr("config.json", "{}")
            archive.writestr("model.weights.h5", bytes(200))
        with pytest.raises(ConversionError, match=r"x\.keras") as error:
            load(tmp_path / "x.keras")
        assert "model.weights.h5" not in str(error.value)
