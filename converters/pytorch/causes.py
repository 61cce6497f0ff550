"""Why a network that was refused has no graph: not always what its computation was refused at.

What prepares an LSTM, such as its first state, may be refused before it is reached, with advice
that would not help.
"""

from __future__ import annotations

from torch import nn

from nfn_graph.converters.pytorch.modules import why_refused


def find_cause(network: nn.Module) -> str | None:
    """The module for which a network has no graph in any case; None if there is none.

    Args:
        network: The network, as torch.fx has traced it if it can.
    """
    for name, module in network.named_modules():
        reason = why_refused(module)
        if reason is not None:
            return f"{name} ({type(module).__name__}): {reason}"
    return None
