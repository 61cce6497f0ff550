"""ONNX models with random changes to their nodes are read, or refused with a reason."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import checkpoints
import onnx
import pytest
from onnx_cases import SIZED_CASES, cases

from nfn_graph.converters import ConversionError, load
from nfn_graph.converters.onnx.operators import OPERATORS

MODELS = [
    *((nodes, tensors, shape, names.split()) for nodes, tensors, shape, names in cases().values()),
    *((nodes, tensors, shape, ["y"]) for nodes, tensors, shape, _ in SIZED_CASES.values()),
]
ATTRIBUTES = ("axis", "axes", "keepdims", "perm", "k", "starts", "ends", "value", "group")


def damage(graph: onnx.GraphProto, names: list[str], chance: random.Random) -> None:
    """Changes the kind, an input, an output or an attribute of one node, or removes the node."""
    node = chance.choice(list(graph.node))
    kind = chance.randrange(9)
    if kind == 0:
        node.op_type = chance.choice(sorted(OPERATORS))
    elif kind in (1, 2) and node.input:
        node.input[chance.randrange(len(node.input))] = chance.choice([*names, ""])
    elif kind == 3 and node.input:
        del node.input[-1]
    elif kind == 4:
        node.input.append(chance.choice(names))
    elif kind == 5 and node.attribute:
        attribute = chance.choice(list(node.attribute))
        number = chance.choice([-9, -1, 0, 1, 2, 7])
        if attribute.ints:
            attribute.ints[0] = number
        else:
            attribute.i = number
    elif kind == 6:
        value = chance.choice([[0], [1, 2], -1, 3, 0])
        node.attribute.append(onnx.helper.make_attribute(chance.choice(ATTRIBUTES), value))
    elif kind == 7 and node.output:
        del node.output[-1]
    elif len(graph.node) > 1:
        graph.node.remove(node)


@pytest.mark.parametrize("part", range(4))
def test_changed_nodes_are_read_or_refused_with_a_reason(part: int, tmp_path: Path) -> None:
    chance = random.Random(part)
    outcomes = {"read": 0, "refused": 0}
    for case in range(250):
        nodes, tensors, shape, outputs = chance.choice(MODELS)
        given = chance.choice([shape, shape, (None,) * len(shape), shape[:-1]])
        model = checkpoints.onnx_model(
            [copy.deepcopy(node) for node in nodes], tensors, {"x": given}, outputs
        )
        names = [name for node in nodes for name in (*node.input, *node.output)]
        for _ in range(chance.randint(1, 3)):
            damage(model.graph, names, chance)
        (tmp_path / "x.onnx").write_bytes(model.SerializeToString())
        try:
            load(tmp_path / "x.onnx")
            outcomes["read"] += 1
        except ConversionError as error:
            assert "\n" not in str(error), f"case {case} of part {part}"
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 10
