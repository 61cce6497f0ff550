"""Settings that all tests share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "nfn_graph",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("nfn_graph")


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers in every run, whatever ran before."""
    torch.manual_seed(0)
