"""Models that read whole networks: neural functionals, and baselines to compare them with.

Each takes a batch of weight graphs and returns `[networks, out_features]`.
"""

from nfn_graph.tasks.models.build import (
    READ_BY,
    ModelName,
    ModelSettings,
    build_model,
    fit_inputs,
    sizes_of,
)

__all__ = ["READ_BY", "ModelName", "ModelSettings", "build_model", "fit_inputs", "sizes_of"]
