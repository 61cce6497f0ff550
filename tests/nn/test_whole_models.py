"""Whole models: the order of layers, the paper's models, saving, copying and training."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from networks import chain, same
from nfn_graph import (
    NFN,
    Activation,
    Batch,
    ChannelNorm,
    Dropout,
    EquivariantNFN,
    FourierFeatures,
    InvariantNFN,
    IOEncoding,
    NFLinear,
    Pool,
    Residual,
    Standardize,
    WeightFeatures,
)


def batch_of(channels: int = 2) -> Batch:
    return Batch.from_data_list([chain((3, w, 4), channels=channels) for w in (2, 5)])


PAPER_MODELS = {
    "generalisation": ({"channels": (16, 16, 5), "out_features": 1, "head": (1000, 1000, 1000)}, 1),
    "classification": (
        {"channels": (8, 8, 8), "out_features": 10, "head": (50, 50), "head_dropout": 0.5,
         "io_encoding": "sinusoidal"}, 1),
    "tickets": ({"channels": (8, 8, 8, 10), "in_channels": 2}, 2),
    "editing": ({"channels": (8, 8, 1)}, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", PAPER_MODELS)
@pytest.mark.parametrize("symmetry", ["np", "hnp"])
def test_the_papers_models_train(name, symmetry):
    options, channels = PAPER_MODELS[name]
    batch = batch_of(channels)
    model = NFN(batch.spec, symmetry=symmetry, **options).double()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def loss() -> torch.Tensor:
        out = model(batch)
        if isinstance(out, torch.Tensor):
            assert out.shape == (2, options["out_features"])
            return (out - 1).square().mean()
        assert isinstance(out, WeightFeatures)
        assert out.channels == options["channels"][-1]
        return sum((x - 1).square().mean() for _, x in out.tensors() if x.numel())

    torch.manual_seed(0)
    model.eval()
    before = loss().item()
    model.train()
    for _ in range(15):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        # The last activation of an invariant model feeds its whole pool; every map is used.
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
    model.eval()
    assert loss().item() < 0.7 * before


MODEL_OPTIONS = {
    "plain": {},
    "norm": {"norm": True},
    "dropout": {"dropout": 0.5},
    "residual": {"residual": True},
    "pointwise": {"pointwise": True},
    "sums": {"aggr": "sum"},
    "act": {"act": "Tanh"},
    "fourier": {"fourier_features": 3, "fourier_scale": 0.1},
    "learned": {"io_encoding": "learned", "encode_layers": True},
    "sinusoidal": {"io_encoding": "sinusoidal", "encode_layers": True},
    "standardize": {"standardize": True},
}


def by_hand(spec, symmetry, channels, is_invariant, options):
    """The layers of an NFN, written out."""
    folded, width = spec.fold(symmetry), 2
    before, after = [], []
    if options.get("standardize"):
        before.append(Standardize(spec, 2).fit(batch_of(2)))
    if "fourier_features" in options:
        before.append(FourierFeatures(2, 3, 0.1))
        width = 6
    if "io_encoding" in options:
        before.append(IOEncoding(spec, width, options["io_encoding"], encode_layers=True))
        width = before[-1].out_channels
    for i, out in enumerate(channels):
        block = [ChannelNorm(folded, width)] if "norm" in options and i else []
        shared = {k: options[k] for k in ("pointwise", "aggr") if k in options}
        block.append(NFLinear(folded, width, out, **shared))
        if is_invariant or i < len(channels) - 1:
            block.append(Activation(nn.Tanh() if "act" in options else nn.ReLU()))
            block += [Dropout(0.5)] if "dropout" in options else []
        block = nn.Sequential(*block)
        after.append(Residual(block) if "residual" in options and width == out else block)
        width = out
    return nn.Sequential(*before).double(), nn.Sequential(*after).double()


@pytest.mark.parametrize("symmetry", ["np", "hnp"])
@pytest.mark.parametrize("is_invariant", [False, True])
@pytest.mark.parametrize("name", MODEL_OPTIONS)
def test_models_are_their_layers_in_order(name, is_invariant, symmetry):
    """Layers that are put together by hand with the same parameters give the same numbers."""
    options, channels = MODEL_OPTIONS[name], (4, 4, 2)
    batch = batch_of(2)
    extra = {"out_features": 3, "head": (5, 6), "pool": "max", "head_dropout": 0.5}
    model = NFN(
        batch.spec, channels, symmetry, in_channels=2, **options, **(extra if is_invariant else {})
    ).double()
    if model.standardize is not None:
        model.standardize.fit([batch])
    before, after = by_hand(batch.spec, symmetry, channels, is_invariant, options)
    mine = list(model.state_dict().values())
    theirs = [*before.state_dict().values(), *after.state_dict().values()]
    for value, source in zip(theirs, mine, strict=False):
        value.copy_(source)
    if is_invariant:
        kinds = [nn.Linear, nn.ReLU, nn.Dropout, nn.Linear, nn.ReLU, nn.Dropout, nn.Linear]
        assert [type(layer) for layer in model.head] == kinds
        assert [model.head[i].p for i in (2, 5)] == [0.5, 0.5]
        assert [model.head[i].out_features for i in (0, 3, 6)] == [5, 6, 3]
    torch.manual_seed(1)
    expected = after(before(batch.features()).fold(symmetry))
    if is_invariant:
        expected = model.head(Pool(expected.spec, "max")(expected).flatten(1))
    torch.manual_seed(1)
    actual = model(batch)
    assert torch.equal(actual, expected) if is_invariant else same(actual, expected)


def test_an_editing_model_adds_a_learned_fraction():
    batch = batch_of(1)
    model = NFN(batch.spec, (4, 1), "hnp", edit_scale=0.01).double()
    edited = model(batch)
    assert model.edit_scale.item() == pytest.approx(0.01)
    change = (edited - batch.features("hnp")) / model.edit_scale.detach()
    model.edit_scale = None
    assert same(change, model(batch), 1e-9)


def test_models_save_and_load():
    batch = batch_of(1)
    options = {
        "out_features": 2,
        "head": (8,),
        "standardize": True,
        "io_encoding": "learned",
        "norm": True,
    }
    model = NFN(batch.spec, (4, 4), "hnp", **options).double()
    model.standardize.fit([batch])
    again = NFN(batch.spec, (4, 4), "hnp", **options).double()
    with pytest.warns(UserWarning, match=r"model\.standardize\.fit"):
        assert not torch.equal(model(batch), again(batch))
    again.load_state_dict(model.state_dict())
    assert torch.equal(model(batch), again(batch))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_models_copy_and_pickle(duplicate):
    batch = batch_of(1)
    options = {"out_features": 2, "head": (8,), "io_encoding": "learned", "norm": True}
    model = NFN(batch.spec, (4, 4), "hnp", **options).double()
    expected = model(batch)
    again = duplicate(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(again(batch), expected)


def test_models_take_graphs_batches_and_features():
    batch = batch_of(1)
    model = NFN(batch.spec, (4,), "hnp", out_features=2, head=(8,), fourier_features=3).double()
    assert torch.equal(model(batch), model(batch.features()))
    assert (model(batch[0]) - model(batch)[:1]).abs().max() < 1e-12


def test_a_model_for_one_input_size_serves_np_networks_of_any():
    spec = chain((2, 3, 4)).spec
    model = NFN(spec, (4,), "np", out_features=1, head=(4,), io_encoding="sinusoidal").double()
    other = chain((9, 3, 5))
    assert model(other).shape == (1, 1)
    assert torch.equal(model(other.features()), model(other))


def test_models_have_one_type_of_output():
    batch = batch_of(1)
    scorer, editor = NFN(batch.spec, (4, 1), out_features=2), NFN(batch.spec, (4, 1))
    assert type(scorer) is InvariantNFN
    assert type(editor) is EquivariantNFN
    assert scorer.double()(batch).shape == (batch.num_graphs, 2)
    assert isinstance(editor.double()(batch), WeightFeatures)
    assert editor(batch).to_graph().spec == batch.spec


def test_models_can_keep_all_entries_of_the_pool():
    batch = batch_of(1)
    model = NFN(batch.spec, (4, 4), "hnp", out_features=2, head=(8,), pool_full=True).double()
    features = model.layers(batch.features("hnp"))
    expected = Pool(features.spec, full=True)(Activation("relu")(features))
    assert expected.shape[1] > Pool(features.spec).num_entries
    assert torch.allclose(model(batch), model.head(expected.flatten(1)))


def test_models_take_activations_as_pyg_does():
    batch = batch_of(1)
    outputs = []
    for act in ("silu", "SiLU", nn.functional.silu):
        torch.manual_seed(0)
        model = NFN(batch.spec, (4, 4), out_features=2, head=(8,), act=act).double()
        outputs.append(model(batch))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
