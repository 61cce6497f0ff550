"""Why a network that was refused has no graph: not always what its computation was refused at.

What prepares an LSTM or an attention, such as its first state or its heads, may be refused
before it is reached, with advice that would not help.
"""

from __future__ import annotations

from torch import fx, nn

from nfn_graph.converters.pytorch.modules import why_refused
from nfn_graph.converters.pytorch.names import REFUSED
from nfn_graph.converters.pytorch.targets import operator_name

_PRODUCTS = frozenset({"matmul", "bmm", "einsum"})
#: What may stand between the softmax of an attention and its product with the values.
_BETWEEN = frozenset({"dropout", "to", "type_as", "masked_fill", "mul", "contiguous", "view"})


def find_cause(network: nn.Module) -> str | None:
    """The module or product for which a network has no graph in any case; None if there is none.

    Args:
        network: The network, as torch.fx has traced it if it can.
    """
    for name, module in network.named_modules():
        reason = why_refused(module)
        if reason is not None:
            return f"{name} ({type(module).__name__}): {reason}"
    return _attention(network.graph) if isinstance(network, fx.GraphModule) else None


def _attention(graph: fx.Graph) -> str | None:
    weights: set[fx.Node] = set()
    for node in graph.nodes:
        reads = weights.intersection(node.all_input_nodes)
        name = operator_name(node.target)
        # Modules by their place: `softmax`, `attn_drop`.
        if "softmax" in name.lower() or (reads and (name in _BETWEEN or node.op == "call_module")):
            weights.add(node)
        if reads and name in _PRODUCTS and all(n.op != "get_attr" for n in node.all_input_nodes):
            return (
                f"{node.name}: Expected a product with a stored matrix (got {name} of two computed "
                f"values: {REFUSED['scaled_dot_product_attention']})"
            )
    return None
