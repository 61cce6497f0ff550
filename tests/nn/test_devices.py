"""Checks that need no GPU: shapes and devices of fake tensors, and a record of all operations,
none of which may wait for the device or depend on its values."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from networks import NAMED_SPECS, batch_of, chain
from nfn_graph import NFN, Batch, EquivariantNFN, InvariantNFN, WeightFeatures
from nfn_graph.features import Incidence, _build, _incidence, _rows
from nfn_graph.features._incidence import _Cache

SYMMETRIES = ["np", "hnp"]
# Operations that wait for the device, sort, or have a shape that depends on values.
FORBIDDEN = (
    "_local_scalar_dense",
    "bincount",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "sort",
    "topk",
    "unique",
)


class Recorder(TorchDispatchMode):
    """Counts operations, and fails on those for which a GPU would have to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sent = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        self.names.append(name)
        if any(word in name for word in FORBIDDEN):
            raise AssertionError(f"Expected no operation that waits or sorts (got {name})")
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            raise AssertionError("Expected a known size of repeat_interleave (got none)")
        if name == "index" and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        ):
            raise AssertionError("Expected no index by a mask (got one)")
        out = func(*args, **kwargs)
        moved = [x.device.type for x in args if isinstance(x, torch.Tensor)]
        if name in ("_to_copy", "copy_") and isinstance(out, torch.Tensor):
            source = moved[-1] if moved else "cpu"
            if source != "cpu" and out.device.type == "cpu":
                raise AssertionError(f"Expected no copy to the host (got {name})")
            self.sent += source == "cpu" and out.device.type != "cpu"
        return out


def networks(count: int, mixed: bool) -> Batch:
    widths = [
        (2, 4 + (i % 3 if mixed else 0), 5 + (i % 4 if mixed else 0), 3) for i in range(count)
    ]
    return Batch.from_data_list([chain(w, dtype=torch.float32) for w in widths])


def model_for(batch: Batch, symmetry: str, invariant: bool = True) -> InvariantNFN | EquivariantNFN:
    options = {"out_features": 2, "head": (8,)} if invariant else {}
    return NFN(batch.spec, (4, 4), symmetry, io_encoding="sinusoidal", norm=True, **options)


def fake_features(batch: Batch, device: str) -> WeightFeatures:
    """The features of a batch on another device, where only shapes exist."""
    raw = batch.features()
    incidence = Incidence(raw.spec, raw.incidence.shapes, torch.device(device))

    def empty(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=device)

    return WeightFeatures({k: empty(x) for k, x in raw.tensors()}, raw.spec, incidence)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_forward_on_a_fake_gpu(symmetry, invariant, mixed):
    batch = networks(4, mixed)
    model = model_for(batch, symmetry, invariant)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        state = {
            name: torch.empty(x.shape, dtype=x.dtype, device="cuda")
            for name, x in (*model.named_parameters(), *model.named_buffers())
        }
        features = fake_features(batch, "cuda")
        with Recorder():
            out = torch.func.functional_call(model, state, (features,))
    tensors = [out] if invariant else [x for _, x in out.tensors()]
    assert all(x.device.type == "cuda" for x in tensors)
    expected = model(batch)
    shapes = [expected] if invariant else [x for _, x in expected.tensors()]
    assert [x.shape for x in tensors] == [x.shape for x in shapes]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_forward_and_backward_on_meta(symmetry, mixed):
    batch = networks(4, mixed)
    model = model_for(batch, symmetry).to("meta")
    features = batch.features().to("meta")
    with Recorder():
        out = model(features)
        out.sum().backward()
    assert out.shape == (4, 2)
    assert all(p.grad.device.type == "meta" for p in model.parameters() if p.grad is not None)
    assert sum(p.grad is not None for p in model.parameters()) > 10


def operations(batch: Batch, symmetry: str) -> list[str]:
    """All operations of a new batch: its incidence, the model, the gradients."""
    model = model_for(batch, symmetry)
    raw = batch.features()
    with Recorder() as recorder:
        incidence = Incidence(raw.spec, raw.incidence.shapes, raw.device)
        features = WeightFeatures(dict(raw.tensors()), raw.spec, incidence)
        model(features).sum().backward()
    return recorder.names


@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_the_number_of_operations_does_not_grow_with_the_networks(symmetry):
    few, many = networks(2, mixed=False), networks(40, mixed=True)
    assert operations(few, symmetry) == operations(many, symmetry)


@pytest.mark.parametrize("network", NAMED_SPECS)
def test_the_sizes_of_a_new_batch_go_to_the_device_in_one_copy(network):
    spec = NAMED_SPECS[network]
    raw = batch_of(spec).features()
    model = NFN(spec, (4, 4), in_channels=3, out_features=2, head=(8,)).to("meta")
    with Recorder() as recorder:
        incidence = Incidence(raw.spec, raw.incidence.shapes, torch.device("meta"))
    assert recorder.sent == 1
    tensors = {key: x.to("meta", torch.float32) for key, x in raw.tensors()}
    with Recorder() as recorder:
        model(WeightFeatures(tensors, raw.spec, incidence)).sum().backward()
    assert recorder.sent == 0


def test_nothing_is_kept_that_was_made_while_a_graph_is_captured(monkeypatch):
    """The memory belongs to the captured graph, and a copy would read from the host again."""
    monkeypatch.setattr(_incidence, "_CACHE", _Cache(8, 2**20))
    known = networks(2, mixed=True)
    layer = NFN(known.spec, (4,), "np")
    features = known.features()
    monkeypatch.setattr(_rows, "is_capturing", lambda device: True)
    monkeypatch.setattr(_build, "is_capturing", lambda device: True)
    assert known.features().incidence is features.incidence
    layer(features)
    assert not features.incidence._scales
    with pytest.raises(RuntimeError, match=r"got new sizes.*once before the capture"):
        networks(3, mixed=True).features()


@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_every_named_network_on_meta(symmetry):
    for spec in NAMED_SPECS.values():
        features = batch_of(spec).features().to("meta")
        model = NFN(spec, (2,), symmetry, in_channels=3, out_features=1, head=(4,)).to("meta")
        with Recorder():
            outputs = model(features.to(torch.float32))
            outputs.sum().backward()
        assert outputs.is_meta and outputs.shape[1:] == (1,)
        assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())


def test_the_recorder_finds_what_it_looks_for():
    x = torch.randn(4)
    for function in (x.sort, lambda: x[x > 0], x.sum().item, lambda: x.unique()):
        with Recorder(), pytest.raises(AssertionError, match="Expected no"):
            function()
    counts = torch.tensor([1, 2])
    with Recorder(), pytest.raises(AssertionError, match="known size"):
        counts.repeat_interleave(counts)
    with FakeTensorMode():
        moved = torch.empty(3, device="cuda")
        with Recorder(), pytest.raises(AssertionError, match="copy to the host"):
            moved.cpu()


def test_fake_tensors_do_not_stay_in_the_cache():
    batch = networks(3, mixed=True)
    shapes = batch.features().incidence.shapes[::-1]
    with FakeTensorMode():
        fake = Incidence.of(batch.spec, shapes, torch.device("cpu"))
    real = Incidence.of(batch.spec, shapes, torch.device("cpu"))
    assert not fake.is_lasting
    assert real.is_lasting
