"""What a network computes, as JSON."""

from __future__ import annotations

from typing import Any

from nfn_graph.data import Computation, Neurons, Range, Ref, Step


def computation_to_json(computation: Computation) -> dict[str, Any]:
    """A computation as plain values."""
    if computation.reason is not None:
        return {"reason": computation.reason}
    return {
        "steps": [
            [step.operation, _pack(step.args), {name: _pack(arg) for name, arg in step.kwargs}]
            for step in computation.steps
        ],
        "outputs": [ref.step for ref in computation.outputs],
        "activations": [[n.name, n.value.step, n.axis] for n in computation.activations],
    }


def computation_from_json(document: dict[str, Any]) -> Computation:
    """The computation that :func:`computation_to_json` wrote down."""
    if "reason" in document:
        return Computation.unknown(str(document["reason"]))
    return Computation(
        tuple(
            Step(
                str(operation),
                tuple(map(_unpack, args)),
                tuple((name, _unpack(arg)) for name, arg in kwargs.items()),
            )
            for operation, args, kwargs in document["steps"]
        ),
        tuple(Ref(int(step)) for step in document["outputs"]),
        tuple(
            Neurons(str(name), Ref(int(step)), int(axis))
            for name, step, axis in document["activations"]
        ),
    )


def _pack(value: Any) -> Any:
    if isinstance(value, Ref):
        return {"ref": value.step}
    if isinstance(value, Range):
        return {"range": [_pack(bound) for bound in (value.start, value.stop, value.step)]}
    if value is ...:
        return {"ellipsis": True}
    return [_pack(item) for item in value] if isinstance(value, tuple) else value


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_unpack, value))
    if isinstance(value, dict):
        if "ref" in value:
            return Ref(int(value["ref"]))
        return Range(*map(_unpack, value["range"])) if "range" in value else ...
    return value
