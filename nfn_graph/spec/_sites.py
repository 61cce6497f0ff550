r"""Sites: where the entries of a network meet, and thus the building blocks of the NF-Layer.

An *index* is something that a permutation moves: the neurons of a free layer. Every entry of a
tensor carries the indices of its axes and of their parents: a bias :math:`\{j\}`, a weight
:math:`\{j, k\}`, the weight of an attention head :math:`\{head, dim, r\}`. A *site* is a set of
indices that contains the parents of each. The sites of a weight :math:`\{j, k\}` are

==================  ==========================  ==========================================
site                its rows                    the paper's aggregate
==================  ==========================  ==========================================
:math:`\{j, k\}`    the weights themselves      :math:`W_{jk}`
:math:`\{j\}`       the target neurons          rows :math:`W_{j,\star}`
:math:`\{k\}`       the source neurons          columns :math:`W_{\star,k}`
:math:`\{\}`        the network                 the layer :math:`W_{\star,\star}`
==================  ==========================  ==========================================

A site's *summary* puts side by side the mean of every kind of entry that has the site. The
complete equivariant layer is one map of every site's summary to itself, so the sum of all squares
of summary sizes is the number of orbits of the group on pairs of entries. (The weights of a layer
with itself also read the weight in the other direction, which doubles their share.)

Means go up from finer to coarser sites (as sums, which are divided where they are read), and
messages come down the same way, along a tree for every kind of entry, so that nothing is counted
twice. The mean of a whole layer, for example, is the mean of the means at its target neurons, and
the message of the network to a weight reaches it through its target neuron only.

**NP and HNP differ only in a fold.** Under HNP, the neurons of fixed types (inputs, outputs) keep
their order. A fixed index is dropped, and its positions become taps, the values that no permutation
mixes: the first weight becomes taps of the first hidden neurons, the last bias becomes taps of the
network. Under NP no type is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import combinations
from typing import NamedTuple

from nfn_graph.messages import UserError
from nfn_graph.spec._types import (
    PRIME,
    Key,
    NetworkSpec,
    Symmetry,
    WeightType,
    module_name,
    type_label,
)

NETWORK = "network"


class Piece(NamedTuple):
    """The taps that one stored tensor contributes to a site.

    Attributes:
        store: The neuron type or weight type that it comes from.
        taps: The number of taps: those of the store times its fixed positions.
        diagonal: Whether the piece is the diagonal of a self weight, at the site of its neurons.

    Example:
        >>> folded = NetworkSpec.chain(2, input_size=3, output_size=1).fold("hnp")
        >>> [(piece.store, piece.taps) for piece in folded.site["hidden1"].pieces]
        [('hidden1', 1), (('input', 'weight', 'hidden1'), 3), (('hidden1', 'weight', 'output'), 1)]
    """

    store: Key
    taps: int
    diagonal: bool = False


class Below(NamedTuple):
    """Where a mean comes up from, and its message goes down to.

    Attributes:
        site: The number of a finer site.
        cover: Which cover of the finer site the mean goes up to, by its number in `covers`.
        part: The part of the finer site that is averaged further.

    Example:
        >>> folded = NetworkSpec.chain(2).fold("np")
        >>> folded.site["output"].parts[0].below  # the last weight, by its target neurons
        Below(site=1, cover=0, part=0)
    """

    site: int
    cover: int
    part: int


class Part(NamedTuple):
    """A slice of a site's summary: the mean of one kind of entry.

    Attributes:
        key: The key of the site whose entries are averaged; that of the site itself for its own
            entries.
        start: The first tap of the slice.
        taps: The number of taps.
        below: Where the mean comes up from, and its message goes down to. None for the site's own
            entries.
        kept: The indices of the entry that the site has. For a self or role weight, they
            distinguish the mean over the edges of a target neuron from that over the edges of a
            source neuron.

    Example:
        >>> folded = NetworkSpec.chain(2).fold("np")
        >>> [part.key for part in folded.site["output"].parts]  # the last weight, its bias
        [('hidden1', 'weight', 'output'), 'output']
    """

    key: Key
    start: int
    taps: int
    below: Below | None
    kept: tuple[str, ...]


@dataclass(frozen=True)
class Site:
    """A set of indices with its entries, and its connections to other sites.

    Attributes:
        key: The neuron type, the first weight type or `"network"` that the site is named
            after; `("*", ...)` for a site without entries of its own.
        indices: The indices, slowest first, which number the rows.
        pieces: The tensors that its own taps consist of.
        parts: The slices of its summary: means of finer entries, and last its own entries.
        covers: The numbers of the coarser sites that it sums into. Those of a weight are its target
            neurons, which come first, and its source neurons.
        senders: For every cover and every part of this site, the part of the cover that is its
            mean and sends it a message: the inverse of `Part.below`. None for a part whose mean
            goes up, and whose message comes down, through another cover.
        is_self: Whether its entries are the weights of a layer with itself, each of which also
            reads the weight in the other direction.

    Example:
        >>> print(NetworkSpec.chain(2).fold("np").site["hidden1"])
        {hidden1} [input->hidden1 at hidden1:1, hidden1->output at hidden1:1, hidden1:1]
    """

    key: Key
    indices: tuple[str, ...]
    pieces: tuple[Piece, ...]
    parts: tuple[Part, ...]
    covers: tuple[int, ...]
    senders: tuple[tuple[int | None, ...], ...]
    is_self: bool = False

    @cached_property
    def taps(self) -> int:
        """The taps of its own entries."""
        return self.parts[-1].taps

    @cached_property
    def summary_taps(self) -> int:
        """The taps of its summary, and therefore of the output of its map."""
        return self.parts[-1].start + self.parts[-1].taps

    @cached_property
    def is_leaf(self) -> bool:
        """Whether no finer site sums into this one, so that its summary is its own entries."""
        return len(self.parts) == 1

    @cached_property
    def read_taps(self) -> int:
        """The taps that its map reads."""
        return self.summary_taps * (2 if self.is_self else 1)

    @cached_property
    def name(self) -> str:
        """The name of its map in a module's parameters."""
        return "*".join(self.indices) if self.key[0] == "*" else module_name(self.key)

    def __str__(self) -> str:
        parts = []
        for part in self.parts:
            if not part.taps:
                continue
            mean = f" at {'*'.join(part.kept) or 'network'}" if part.below else ""
            parts.append(f"{type_label(part.key)}{mean}:{part.taps}")
        return f"{{{', '.join(self.indices)}}} [{', '.join(parts)}]"


@dataclass(frozen=True)
class FoldedSpec:
    """A spec in the folded view of one symmetry group, made by :meth:`NetworkSpec.fold`.

    Attributes:
        unfolded: The types before the fold. Under NP all of them are free, even if they are fixed
            in the networks' own spec.
        symmetry: The group, `"np"` or `"hnp"`.

    Example:
        >>> print(NetworkSpec.chain(2, input_size=3, output_size=1).fold("hnp"))
        FoldedSpec(hnp)
          {hidden1} [hidden1:5]
          {} [hidden1 at network:5, network:1]
    """

    unfolded: NetworkSpec
    symmetry: Symmetry

    @classmethod
    @lru_cache(maxsize=64)  # Every batch folds its spec, and most specs recur.
    def of(cls, spec: NetworkSpec, symmetry: Symmetry) -> FoldedSpec:
        """Folds a spec; see :meth:`NetworkSpec.fold`."""
        if symmetry == "np":
            return cls(spec.free, symmetry)._prepared()
        if symmetry != "hnp":
            raise UserError(f"Expected the symmetry 'np' or 'hnp' (got {symmetry!r})")
        for neuron in spec.neurons:
            if neuron.fixed and neuron.size is None:
                raise UserError(
                    f"Expected one size of the fixed neuron type '{neuron.name}' for 'hnp' "
                    f"(got networks of different sizes, or no size). Use 'np', or networks "
                    f"of one size."
                )
            if neuron.role:
                raise UserError(
                    f"Expected depth types for 'hnp' (got the role type '{neuron.name}': the fold "
                    f"would give its neurons taps that only some of its layers have). Use 'np'."
                )
        return cls(spec, symmetry)._prepared()

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """All sites, finer ones before coarser ones, the network last."""
        return _build(self)

    @cached_property
    def site(self) -> dict[Key, Site]:
        """The sites by key."""
        return {site.key: site for site in self.sites}

    @cached_property
    def taps(self) -> dict[Key, int]:
        """The taps of every kind of entry, in the order of the network's summary."""
        return {
            site.key: site.taps for site in self.sites if site.taps or isinstance(site.key, str)
        }

    @property
    def summary_taps(self) -> int:
        """The number of entries of the network's summary: one mean for every tap of every type."""
        return self.sites[-1].summary_taps

    @cached_property
    def num_orbits(self) -> int:
        """The number of orbits of the group on pairs of entries, if the spec is complete.

        It is the number of parameters per `c_out * c_in` of the layer, also for a spec with role
        types, whose layers share parameters.
        """
        return sum(site.summary_taps * site.read_taps for site in self.sites)

    @cached_property
    def is_complete(self) -> bool:
        """Whether the types distinguish all layers, so that the layer is the most general one."""
        return not any(n.role for n in self.unfolded.neurons)

    def path(self, part: Part) -> list[tuple[int, int]]:
        """The finer sites through which a mean comes up, last first.

        Each comes with the number of the cover that the mean goes up to, among its own covers.
        """
        steps = []
        while part.below is not None:
            below = part.below
            steps.append((below.site, below.cover))
            part = self.sites[below.site].parts[below.part]
        return steps

    def free(self, indices: Iterable[str]) -> tuple[str, ...]:
        """Selects the indices that the group permutes."""
        return tuple(i for i in indices if not self.unfolded.neuron[i.rstrip(PRIME)].fixed)

    @cached_property
    def _hash(self) -> int:
        return hash((self.unfolded, self.symmetry))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return {"unfolded": self.unfolded, "symmetry": self.symmetry}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._prepared()

    def _prepared(self) -> FoldedSpec:
        """Computes the cached attributes that layers read, which a compiled model cannot do."""
        _ = (self.site, self.taps, self.unfolded.taps, self.unfolded.weight)
        for site in self.sites:
            _ = (site.taps, site.summary_taps, site.is_leaf, site.read_taps, site.name)
        return self

    def __str__(self) -> str:
        return "\n  ".join([f"FoldedSpec({self.symmetry})", *map(str, self.sites)])


@dataclass
class _Draft:
    """A site before its connections to other sites are known."""

    key: Key
    indices: tuple[str, ...]
    pieces: list[Piece] = field(default_factory=list)


# What identifies a site: its indices, or the tensor if it joins layers of a role type, which the
# graph distinguishes but the spec does not.
_Place = frozenset[str] | Key


# A kind of entry, by the number of its own site, and its indices that another site keeps.
_Kept = tuple[int, tuple[str, ...]]


def _build(spec: FoldedSpec) -> tuple[Site, ...]:
    """Builds the table of sites."""
    drafts = _place_entries(spec)
    _add_coarser(spec.unfolded, drafts)
    # Finer sites first; in a flat spec the weights, then the neurons, then the network.
    order = sorted(drafts.items(), key=lambda d: (-len(d[1].indices), isinstance(d[1].key, str)))
    sites = [draft for _, draft in order]
    taps = [sum(piece.taps for piece in site.pieces) for site in sites]
    numbers = {place: number for number, (place, _) in enumerate(order)}
    # The entries that meet at every site, its own last.
    meeting: list[list[_Kept]] = [[] for _ in sites]
    for entry, site in enumerate(sites):
        for count in range(len(site.indices)) if taps[entry] else ():
            for kept in combinations(site.indices, count):
                number = numbers.get(frozenset(label.rstrip(PRIME) for label in kept))
                if number is not None:
                    meeting[number].append((entry, kept))
        meeting[entry].append((entry, site.indices))
    found = {kept: (number, i) for number, at in enumerate(meeting) for i, kept in enumerate(at)}
    ways = {kept: _way(kept, sites, found) for at in meeting for kept in at[:-1]}
    # For every site and every index that a mean is over: the cover, and the parts there by those
    # of this site. Without its last index, a weight has its target, which is its first cover.
    covers: list[dict[str, tuple[int, dict[int, int]]]] = [{} for _ in sites]
    for read, (finer, index, part) in ways.items():
        number, place = found[read]
        covers[finer].setdefault(index, (number, {}))[1][part] = place
    for number, site in enumerate(sites):
        indices = sorted(covers[number], key=site.indices.index, reverse=True)
        covers[number] = {index: covers[number][index] for index in indices}
    selves = {weight.key for weight in spec.unfolded.weights if spec.unfolded.is_self(weight)}
    table = []
    for site, at, above in zip(sites, meeting, covers, strict=True):
        parts: list[Part] = []
        for entry, labels in at:
            start = parts[-1].start + parts[-1].taps if parts else 0
            below = None
            if (entry, labels) in ways:
                finer, index, part = ways[entry, labels]
                below = Below(finer, list(covers[finer]).index(index), part)
            parts.append(Part(sites[entry].key, start, taps[entry], below, labels))
        table.append(
            Site(
                key=site.key,
                indices=site.indices,
                pieces=tuple(site.pieces),
                parts=tuple(parts),
                covers=tuple(number for number, _ in above.values()),
                senders=tuple(tuple(map(to.get, range(len(at)))) for _, to in above.values()),
                is_self=site.key in selves,
            )
        )
    return tuple(table)


def _way(
    read: _Kept, sites: list[_Draft], found: dict[_Kept, tuple[int, int]]
) -> tuple[int, str, int]:
    """The finer site from which a mean comes up, its index that the mean is over, its part.

    Several finer sites may have it. Neurons are preferred to pairs of neurons, and the mean over
    the target of a weight to that over its source.
    """
    entry, kept = read
    labels, ways = sites[entry].indices, []
    for place, label in enumerate(labels):
        finer = entry, tuple(i for i in labels if i in kept or i == label)
        if label not in kept and finer in found:
            number, part = found[finer]
            site = sites[number]
            index = label if label in site.indices else label.rstrip(PRIME)
            ways.append((not isinstance(site.key, str), place, (number, index, part)))
    return min(ways)[-1]


def _place_entries(spec: FoldedSpec) -> dict[_Place, _Draft]:
    """The sites that have entries, with the tensors that their taps consist of."""
    network = spec.unfolded
    drafts: dict[_Place, _Draft] = {}
    for weight in network.weights:
        place, indices = _place(spec, weight), spec.free(network.indices(weight.key))
        if len(indices) > 1:
            drafts.setdefault(place, _Draft(weight.key, indices))
    for neuron in network.neurons:
        indices = network.indices(neuron.name)
        if spec.free(indices) == indices:
            named = drafts.setdefault(frozenset(indices), _Draft(neuron.name, indices))
            # A type of pairs may coincide with the site of weights between its parents.
            if not isinstance(named.key, str):
                named.key, named.indices = neuron.name, indices
    drafts[frozenset()] = _Draft(NETWORK, ())
    fixed = {n.name: n.size or 0 for n in network.neurons if n.fixed}

    def piece(key: Key) -> Piece:
        positions = (fixed.get(index.rstrip(PRIME), 1) for index in network.indices(key))
        return Piece(key, network.taps[key] * math.prod(positions))

    for weight in network.weights:
        drafts[_place(spec, weight)].pieces.append(piece(weight.key))
        if network.is_self(weight) and not network.neuron[weight.source].fixed:
            diagonal = drafts[frozenset(network.indices(weight.source))]
            diagonal.pieces.append(Piece(weight.key, weight.taps, diagonal=True))
    for neuron in network.neurons:
        if neuron.taps:
            indices = spec.free(network.indices(neuron.name))
            if frozenset(indices) not in drafts:
                raise UserError(
                    f"Expected types {indices} to be the parents of pairs or connected by weights, "
                    f"since HNP folds the taps of '{neuron.name}' onto them (got neither). Use "
                    f"'np', which does not fold."
                )
            pieces = drafts[frozenset(indices)].pieces
            # The taps of fixed neurons come last at their site, those of free neurons first.
            pieces.insert(len(pieces) if neuron.fixed else 0, piece(neuron.name))
    return drafts


def _place(spec: FoldedSpec, weight: WeightType) -> _Place:
    """What two tensors share if they are taps of the same entries."""
    network = spec.unfolded
    if network.neuron[weight.source].role or network.neuron[weight.target].role:
        return weight.key
    return frozenset(spec.free(network.indices(weight.key)))


def _add_coarser(network: NetworkSpec, drafts: dict[_Place, _Draft]) -> None:
    """Adds all sites that lack an index of another and hold no entries."""
    waiting = sorted(drafts.values(), key=lambda draft: -len(draft.indices))
    for draft in waiting:
        parents = {p for i in draft.indices for p in network.neuron[i.rstrip(PRIME)].parents}
        for dropped in draft.indices:
            # A parent is dropped only after its children.
            indices = tuple(i.rstrip(PRIME) for i in draft.indices if i != dropped)
            if dropped not in parents and frozenset(indices) not in drafts:
                new = _Draft(("*", *indices), indices)  # type: ignore[arg-type]
                drafts[frozenset(indices)] = new
                waiting.append(new)
