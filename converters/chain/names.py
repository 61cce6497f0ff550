"""Interprets the keys of a state dict: which belong together, their order, other topologies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from nfn_graph.converters.checkpoint import PREFIXES
from nfn_graph.converters.errors import ConversionError

_BIASES = {"bias", "biases", "b"}
_ROLES = {"weight", "weights", "kernel", "w"} | _BIASES
_WORDS = re.compile(r"\d+|[A-Za-z]+")


def stem(key: str) -> str:
    """Returns a key without the words for weights and biases: `fc1_weight` gives `fc.1`."""
    module, words = _parts(key)
    return ".".join([*_WORDS.findall(module), *(w for w in words if w.lower() not in _ROLES)])


def is_bias(key: str) -> bool:
    """Whether a key is named as a bias."""
    return not _BIASES.isdisjoint(word.lower() for word in _parts(key)[1])


def _parts(key: str) -> tuple[str, list[str]]:
    """Returns the module of a key, and the words of its last part."""
    cut = max(key.rfind("."), key.rfind("/")) + 1
    return key[:cut], _WORDS.findall(key[cut:])


class Name(NamedTuple):
    """A key as words and numbers.

    Attributes:
        template: The words, with a placeholder for every number.
        numbers: The numbers.
        indices: For every number, whether it is the index of a container, like the first one in
            `layers.0.fc1`, and not part of a name, like the second one.
    """

    template: str
    numbers: tuple[int, ...]
    indices: tuple[bool, ...]

    @classmethod
    def of(cls, key: str) -> Name:
        """Splits a key into words and numbers."""
        found = list(re.finditer(r"\d+", key))
        indices = (
            key[m.start() - 1 : m.start()] in ("", ".", "/")
            and key[m.end() : m.end() + 1] in ("", ".", "/")
            for m in found
        )
        template = re.sub(r"\d+", "#", stem(key))
        return cls(template, tuple(int(m[0]) for m in found), tuple(indices))

    def precedes(self, other: Name) -> bool:
        """Whether the numbers place this name before another one with the same words."""
        return self.template == other.template and self.numbers < other.numbers

    def is_indexed_before(self, other: Name) -> bool:
        """Whether indices in a common container, which imply an order, place this name first."""
        numbers = zip(self.numbers, other.numbers, self.indices, other.indices, strict=False)
        words = zip(self.template.split("."), other.template.split("."), strict=False)
        for mine, theirs in words:
            if mine != theirs:
                return False
            if mine == "#":
                first, second, *are_indices = next(numbers)
                if first != second:
                    return first < second and all(are_indices)
        return False


def spelled(key: str) -> str:
    """Returns a key in lower case, with the words of `resBlock` separated."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower()


ASK_FOR_ARCH = "Pass the network as arch, on the meta device if it is large"

# Words in keys that indicate another topology, by their meaning.
_STATED = {
    "a recurrence over time is not part of a chain": (
        r"weight_[ih]h|w?_?(ih|hh|xh|hx)|[a-z]2[a-z]|rnn|lstm|gru|recurrent"
    ),
    "attention is not part of a chain": (
        r"in_proj_weight|[qkv]_proj|qkv|query|attn|attention|mha|transformer"
    ),
    "an addition around layers ties neurons that are not neighbours": (
        r"downsample|shortcut|skip|highway|res|residuals?|res_?(blocks?|layers?|units?|nets?)"
    ),
    "an embedding is a table of rows, not a weight between two layers": (
        r"emb|embed|embedd?ings?|embeds|embedder|wte|wpe|vocab|codebook|lookup"
    ),
    "a gate multiplies the outputs of two layers": (
        r"gates?|gating|router|experts?|film|se|squeeze|excitation|modulations?|modulators?"
    ),
    "a transposed convolution stores [in, out, ...]": (
        r"deconv|deconvolution|conv_?transposed?|transposed?_?conv|conv_?t|t_?conv|up_?conv"
    ),
    "this weight is computed from several tensors": (
        r"weight_[gv]|weight_orig|weight_mask|original|lora|hyper_?(nets?|networks?)?"
    ),
}
_STATED_PATTERN = {
    reason: re.compile(rf"(?<![a-z])({words})(?![a-z])") for reason, words in _STATED.items()
}
_PARALLEL = re.compile(
    r"(?<![a-z])((?:nets|networks|models|members|ensembles?|branches|towers|heads|critics|actors)"
    r"(?=[._]?\d)|(?:branch|tower|head|critic|actor)(?=_?\d))[._]?(\d+)"
)
# A Sequential with one of these names usually has activations between weights, unlike a list.
_PART = re.compile(r"(?<![a-z])(branch|tower|head|critic|actor)\.(\d+)")
_SIDE_BY_SIDE = (
    ({"actor", "policy", "pi", "action"}, {"critic", "value", "vf", "advantage", "adv"}),
    ({"advantage", "adv"}, {"value", "val"}),
    ({"generator", "gen"}, {"discriminator", "disc"}),
    ({"teacher"}, {"student"}),
    ({"online"}, {"target"}),
    ({"mu", "mean"}, {"logvar", "var", "sigma", "std", "logstd"}),
)
# Networks that enlarge their inputs, often by transposed convolutions.
_WIDENING = re.compile(
    r"(?<![a-z])(dec|decoders?|gen|generators?|ups?|up_?samplers?|up_?samples?|up_?sampling|"
    r"up_?(blocks?|layers?))(?![a-z])"
)
_LINEAR = "(lin|linear|fc|dense|proj|projection|conv)"
_FIRST, _LAST = (
    re.compile(rf"(?<![a-z])({_LINEAR}_?{end}|{end}_?{_LINEAR})(?![a-z])") for end in ("in", "out")
)
_BLOCK = re.compile(r"(^|\.)(block_?\d*|blocks?\.\d+)$")


class NamedWeight(NamedTuple):
    """A weight of a chain: its key, its numbers of neurons, and whether it may be transposed."""

    key: str
    inputs: int
    outputs: int
    may_be_transposed: bool


def check_names(keys: Iterable[str]) -> None:
    """Refuses keys of weights whose words indicate another topology than a chain."""
    branches: dict[str, dict[int, str]] = {}
    parts: dict[str, dict[int, str]] = {}
    words: dict[str, str] = {}
    for key in keys:
        name = spelled(key)
        for reason, pattern in _STATED_PATTERN.items():
            if pattern.search(name):
                raise _refusal(f"'{key}': {reason}")
        for branch, number in _PARALLEL.findall(name):
            branches.setdefault(branch, {}).setdefault(int(number), key)
        for part, number in _PART.findall(name):
            parts.setdefault(part, {}).setdefault(int(number), key)
        words.update(dict.fromkeys(re.findall("[a-z]+", name), key))
    lists = (numbered for numbered in parts.values() if any(n + 1 in numbered for n in numbered))
    for numbered in (*branches.values(), *lists):
        if len(numbered) > 1:
            first, second, *_ = numbered.values()
            raise _refusal(f"'{first}' and '{second}', which are named as parallel branches")
    for one, other in _SIDE_BY_SIDE:
        ends = [words[next(iter(found))] for names in (one, other) if (found := names & {*words})]
        if len({*ends}) == 2:
            raise _refusal(f"'{ends[0]}' and '{ends[1]}', which are named as parallel branches")


def check_chain(chain: Sequence[NamedWeight]) -> None:
    """Refuses weights that form a chain, but whose names and sizes allow something else."""
    for weight in chain:
        if weight.may_be_transposed and _WIDENING.search(spelled(weight.key)):
            raise _refusal(
                f"'{weight.key}' from {weight.inputs} to {weight.outputs} channels: a convolution, "
                f"or a transposed one, which stores [in, out, ...]"
            )
    if _FIRST.search(spelled(chain[0].key)) and _LAST.search(spelled(chain[-1].key)):
        for weight in chain[1:-1]:
            if weight.inputs == weight.outputs and re.search(r"\d", weight.key):
                raise _refusal(
                    f"'{weight.key}' between '{chain[0].key}' and '{chain[-1].key}', which reads "
                    f"and returns {weight.inputs} neurons: a part of the chain, or a layer with an "
                    f"addition around it"
                )
    _check_blocks(chain)


def _check_blocks(chain: Sequence[NamedWeight]) -> None:
    """Refuses modules of a list that may be residual blocks or parallel branches.

    These are modules that are called blocks, or are numbered and hold several weights, and that
    return as many neurons as they read. Nested numbers (`0.2.weight`) belong to `nn.Sequential`,
    which is a chain.
    """
    inside: dict[str, list[NamedWeight]] = {}
    for weight in chain:
        for module in _repeated_modules(weight.key):
            inside.setdefault(module, []).append(weight)
    for module, weights in inside.items():
        first, last = weights[0], weights[-1]
        if (len(weights) > 1 or _is_block(module)) and first.inputs == last.outputs:
            raise _refusal(
                f"'{module}' from '{first.key}' to '{last.key}', which reads and returns "
                f"{first.inputs} neurons: a part of the chain, or a residual block with an "
                f"addition around it, or one of several parallel branches"
            )


def _refusal(got: str) -> ConversionError:
    return ConversionError(f"Expected a chain of layers (got {got}). {ASK_FOR_ARCH}")


def _repeated_modules(key: str) -> Iterator[str]:
    """Yields the modules around a weight that are blocks, or are numbered among several."""
    parts = re.split(r"[./]", key)[:-1]
    start = next((i for i, part in enumerate(parts) if f"{part}." not in PREFIXES), len(parts))
    for end in range(start + 1, len(parts) + 1):
        module = ".".join(parts[:end])
        is_sequential = end < len(parts) and all(p.isdigit() for p in parts[start : end + 1])
        if (module[-1:].isdigit() or _is_block(module)) and not is_sequential:
            yield module


def _is_block(module: str) -> bool:
    return _BLOCK.search(spelled(module)) is not None
