"""Training on batches of ever new sizes does not use more and more memory; see `soak.py`."""

from __future__ import annotations

import gc
import random
from collections import Counter

import pytest
import torch

import soak


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_objects_stay_behind() -> None:
    """Counts tensors and objects of the package after batches whose sizes never repeat."""
    training = soak.steps(random.Random(0))

    def alive() -> Counter[str]:
        gc.collect()
        kinds = [type(x) for x in gc.get_objects()]
        return Counter(
            kind.__qualname__
            for kind in kinds
            if issubclass(kind, torch.Tensor) or str(kind.__module__).startswith("nfn_graph")
        )

    for _ in range(100):
        next(training)
    before = alive()
    for _ in range(75):
        next(training)
    grown = {kind: n for kind, n in (alive() - before).items() if n > 0.3 * before[kind] + 50}
    assert grown == {}
