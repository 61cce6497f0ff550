"""Settings that all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from nfn_graph import use_backend

settings.register_profile(
    "nfn_graph",
    deadline=None,
    derandomize=True,
    # The backend fixture below is the same for all examples of a test.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
# Runs more examples, and different ones every time.
settings.register_profile(
    "long", settings.get_profile("nfn_graph"), max_examples=1000, derandomize=False
)
settings.load_profile("nfn_graph")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--backend NAME`, which runs the tests on other kernels than the default ones."""
    parser.addoption("--backend", default="fused", help="plain or torch-scatter")


@pytest.fixture(autouse=True)
def settled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Gives every test the same random numbers, whatever ran before, and the chosen backend."""
    torch.manual_seed(0)
    with use_backend(request.config.getoption("--backend")):
        yield


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test world, which must not be written to; see :mod:`world`."""
    from world import make_world

    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    return folder


@pytest.fixture
def float64() -> Iterator[None]:
    """Creates tensors and modules in float64, because the published layers take no dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
