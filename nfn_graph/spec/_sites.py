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

Means go up from finer to coarser sites and messages come down the same way, along a tree for every
kind of entry, so that nothing is counted twice. The mean of a whole layer, for example, is the mean
of the means at its target neurons, and the message of the network to a weight reaches it through
its target neuron only.

**NP and HNP differ only in a fold.** Under HNP, the neurons of fixed types (inputs, outputs) keep
their order. A fixed index is dropped, and its positions become taps, the values that no permutation
mixes: the first weight becomes taps of the first hidden neurons, the last bias becomes taps of the
network. Under NP no type is fixed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

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


# A way to obtain a mean: its rank in preference, `Part.below`, and the part that is averaged.
_Way = tuple[tuple[bool, int], Below, Part]


class _Draft:
    """A site during the construction of the table."""

    def __init__(self, key: Key, indices: tuple[str, ...]) -> None:
        self.key = key
        self.indices = indices
        self.number = 0
        self.pieces: list[Piece] = []
        self.parts: list[Part] = []
        self.covers: list[_Draft] = []
        # The finer sites that sum into this one, and the number of this site among their covers.
        self.finer: list[tuple[_Draft, int]] = []


def _build(spec: FoldedSpec) -> tuple[Site, ...]:
    """Builds the table of sites: their entries, the coarser sites of each, parts and senders."""
    placed = _place_entries(spec)
    _close(spec.unfolded, placed)
    drafts = list(placed.values())
    weights = [draft for draft in drafts if not isinstance(draft.key, str)]
    neurons = [draft for draft in drafts if isinstance(draft.key, str)]
    # Finer sites first; in a flat spec the weights, then the neurons, then the network.
    drafts = sorted(weights + neurons, key=lambda draft: -len(draft.indices))
    for number, draft in enumerate(drafts):
        draft.number = number
        for cover, coarser in enumerate(draft.covers):
            coarser.finer.append((draft, cover))
    entries = {draft.key: draft for draft in drafts}
    for draft in drafts:
        _fill_parts(draft, entries)
    return _freeze(spec.unfolded, drafts)


def _freeze(network: NetworkSpec, drafts: list[_Draft]) -> tuple[Site, ...]:
    """Makes the final sites, without the covers that no mean goes up to."""
    senders: list[list[list[int | None]]] = [
        [[None] * len(draft.parts) for _ in draft.covers] for draft in drafts
    ]
    for draft in drafts:
        for place, part in enumerate(draft.parts):
            if part.below is not None:
                senders[part.below.site][part.below.cover][part.below.part] = place
    used = [
        [i for i, parts in enumerate(found) if any(part is not None for part in parts)]
        for found in senders
    ]

    def renumbered(part: Part) -> Part:
        if part.below is None:
            return part
        cover = used[part.below.site].index(part.below.cover)
        return part._replace(below=part.below._replace(cover=cover))

    selves = {weight.key for weight in network.weights if network.is_self(weight)}
    return tuple(
        Site(
            key=draft.key,
            indices=draft.indices,
            pieces=tuple(draft.pieces),
            parts=tuple(map(renumbered, draft.parts)),
            covers=tuple(draft.covers[i].number for i in kept),
            senders=tuple(tuple(senders[number][i]) for i in kept),
            is_self=draft.key in selves,
        )
        for number, (draft, kept) in enumerate(zip(drafts, used, strict=True))
    )


def _place_entries(spec: FoldedSpec) -> dict[object, _Draft]:
    """The sites that have entries, with the tensors that their taps consist of."""
    network = spec.unfolded
    drafts: dict[object, _Draft] = {}
    for weight in network.weights:
        place = _place(spec, weight)
        if isinstance(place, tuple) or len(place) > 1:
            indices = spec.free(network.indices(weight.key))
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

    def taps(key: Key) -> int:
        count = network.taps[key]
        for index in network.indices(key):
            count *= fixed.get(index.rstrip(PRIME), 1)
        return count

    for weight in network.weights:
        drafts[_place(spec, weight)].pieces.append(Piece(weight.key, taps(weight.key)))
        if network.is_self(weight) and not network.neuron[weight.source].fixed:
            diagonal = drafts[frozenset(network.indices(weight.source))]
            diagonal.pieces.append(Piece(weight.key, weight.taps, diagonal=True))
    for neuron in network.neurons:
        if neuron.taps:
            pieces = drafts[frozenset(spec.free(network.indices(neuron.name)))].pieces
            # The taps of fixed neurons come last at their site, those of free neurons first.
            free = not neuron.fixed
            pieces.insert(0 if free else len(pieces), Piece(neuron.name, taps(neuron.name)))
    return drafts


def _place(spec: FoldedSpec, weight: WeightType) -> frozenset[str] | Key:
    """The key that two tensors share if they are taps of the same entries."""
    network = spec.unfolded
    # The graph distinguishes the layers of a role type, the spec does not.
    if any(network.neuron[end].role for end in (weight.source, weight.target)):
        return weight.key
    return frozenset(spec.free(network.indices(weight.key)))


def _close(network: NetworkSpec, drafts: dict[object, _Draft]) -> None:
    """Adds the covers of every site, and the sites among them that hold no entries.

    A cover lacks one of the indices. Indices are dropped in order and covers are listed in reverse,
    so that the target of a weight, which keeps the first index, is its first cover.
    """
    waiting = sorted(drafts.values(), key=lambda d: -len(d.indices))
    while waiting:
        draft = waiting.pop(0)
        parents = {p for i in draft.indices for p in network.neuron[i.rstrip(PRIME)].parents}
        for index in draft.indices:
            if index in parents:
                continue  # A parent is dropped only after its children.
            indices = tuple(i.rstrip(PRIME) for i in draft.indices if i != index)
            place = frozenset(indices)
            if place not in drafts:
                drafts[place] = _Draft(("*", *indices), indices)  # type: ignore[arg-type]
                waiting.append(drafts[place])
            draft.covers.insert(0, drafts[place])


def _fill_parts(draft: _Draft, entries: dict[Key, _Draft]) -> None:
    """Fills in the summary of a site, after those of its finer sites.

    Several finer sites may provide the mean of an entry; one of them is chosen.
    """
    found: dict[tuple[int, tuple[str, ...]], list[_Way]] = {}
    for finer, cover in draft.finer:
        dropped = _dropped(finer, draft, cover)
        for place, part in enumerate(finer.parts):
            if not part.taps:
                continue
            entry = entries[part.key]
            gone = _label(part, dropped)
            kept = tuple(label for label in part.kept if label != gone)
            # Prefer neurons to pairs of neurons, and the target of a weight to its source.
            preference = (not isinstance(finer.key, str), entry.indices.index(gone))
            below = Below(finer.number, cover, place)
            found.setdefault((entry.number, kept), []).append((preference, below, part))
    for (_, kept), ways in sorted(found.items(), key=lambda item: _order(item, entries)):
        _, below, part = min(ways, key=lambda way: way[:2])
        draft.parts.append(Part(part.key, _end(draft.parts), part.taps, below, kept))
    own = sum(piece.taps for piece in draft.pieces)
    draft.parts.append(Part(draft.key, _end(draft.parts), own, None, draft.indices))


def _order(item: tuple[tuple[int, tuple[str, ...]], list[Any]], entries: dict[Key, _Draft]) -> Any:
    """The sort key of a part: the order of the sites, and for a weight, target before source."""
    (number, kept), ways = item
    indices = entries[ways[0][2].key].indices
    return number, [indices.index(label) for label in kept]


def _end(parts: list[Part]) -> int:
    return parts[-1].start + parts[-1].taps if parts else 0


def _dropped(finer: _Draft, coarser: _Draft, cover: int) -> str:
    """The index that a site has and its cover lacks."""
    left = [i for i in finer.indices if i not in coarser.indices]
    if left and not left[0].endswith(PRIME):
        return left[0]
    # Both ends of such a weight have one type, and its covers are its target and its source.
    return finer.indices[1 - cover]


def _label(part: Part, dropped: str) -> str:
    """The name that an entry has for the index over which its mean is taken."""
    if dropped in part.kept:
        return dropped
    return next(k for k in part.kept if k.rstrip(PRIME) == dropped.rstrip(PRIME))
