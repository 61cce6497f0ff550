"""Every backend computes the same layer."""

from __future__ import annotations

import os
import sys
import threading
from importlib.util import find_spec

import pytest
import torch

from networks import NAMED_SPECS, batch_of
from nfn_graph import NFN, NFLinear, Pool, use_backend
from nfn_graph.ops import current_backend
from nfn_graph.testing import assert_complete, assert_equivariant, assert_invariant

BACKENDS = [
    "plain",
    pytest.param(
        "torch-scatter",
        marks=pytest.mark.skipif(not find_spec("torch_scatter"), reason="needs torch-scatter"),
    ),
]
SYMMETRIES = ["np", "hnp"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("network", NAMED_SPECS)
def test_backends_agree(network, symmetry, backend):
    spec = NAMED_SPECS[network]
    batch = batch_of(spec)
    editor = NFN(spec, (4, 2), symmetry, in_channels=3).double()
    scorer = NFN(spec, (4,), symmetry, in_channels=3, out_features=2, head=(8,)).double()
    expected = [x for _, x in editor(batch).tensors()] + [scorer(batch)]
    grads = torch.autograd.grad(sum(x.square().sum() for x in expected), list(editor.parameters()))
    with use_backend(backend):
        actual = [x for _, x in editor(batch).tensors()] + [scorer(batch)]
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)
    theirs = torch.autograd.grad(sum(x.square().sum() for x in actual), list(editor.parameters()))
    for x, y in zip(grads, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_the_laws_hold_on_every_backend(symmetry, backend):
    for name in ("mlp", "self", "parallel"):
        spec = NAMED_SPECS[name]
        folded = spec.fold(symmetry)
        with use_backend(backend):
            assert_equivariant(NFLinear(folded, 3, 2).double(), batch_of(spec), symmetry)
            for reduce in ("mean", "sum", "max"):
                assert_invariant(Pool(folded, reduce), batch_of(spec), symmetry)
    spec = NAMED_SPECS["mlp"].fold(symmetry)
    with use_backend(backend):
        assert_complete(NFLinear(spec, 1, 1), spec)


@pytest.mark.skipif(not os.environ.get("CI"), reason="only CI must have torch-scatter")
def test_ci_does_not_skip_torch_scatter():
    assert find_spec("torch_scatter")


def test_the_choice_ends_with_its_block_and_stays_in_its_thread():
    seen = []
    with use_backend("plain"):
        thread = threading.Thread(target=lambda: seen.append(current_backend()))
        thread.start()
        thread.join()
        assert current_backend() == "plain"
    assert seen == ["fused"]
    assert current_backend() == "fused"


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"a backend of \['fused', 'plain', 'torch-scatter'\]"):
        use_backend("cuda").__enter__()


def test_a_missing_package_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_scatter", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"the package torch-scatter \(got none\)"):
        use_backend("torch-scatter").__enter__()
