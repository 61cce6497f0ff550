"""Slow, literal reference for the NP and HNP layers, transcribed from the paper's appendix.

Parameter sharing is written cell by cell from the tables; ``orbit_table`` computes the same
partition from the group action instead, so that each can be held against the other.  Layers
``i, s`` count from 1 as in the paper; units ``j, k, p, q`` count from 0.  An entry is
``W(i)[j, k]`` (``j`` in layer i, ``k`` in layer i - 1) or ``v(i)[j]``.

Misprints corrected here (each is marked again where it applies):
  M1  NP varphi: labels (i, i-1) at s = i and (i, i) at s = i+1 mean (i, i) and (i, i+1).  As
      printed, a^{i,i-1} would also tie s = i to the "other s" cell at s = i-1.
  M2  HNP vartheta, s = i+1, 1 < i < L-1: labels (1, 2) mean (i, i+1).
  M3  HNP varphi, s = i = 1: b^{1,1,k} means b^{1,1,q}; there is no k.
  M4  HNP varphi, s = i+1: the comparison is of j with q, not with p (both cells).
  M5  HNP vartheta, L = 2: the i = 2 and i = L columns (s = i-1) coincide, as do i = 1 and
      i = L-1 (s = i+1); both fixed positions are then needed.  phi, varphi and psi need no such
      change at L = 2: v(1) has no fixed axis, so only the weight's own fixed axis counts.
  M6  HNP, L = 1: the i = 1 and i = L columns coincide and no axis is permuted.  The tables do
      not cover it, except psi; every pair of entries is its own orbit.
Naming only: Eq. layer-full calls b^{i,i} the W(i)[*, k] term and c^{i,i} the W(i)[j, *] term,
the opposite of the vartheta tables, and c^i what the NP phi table calls b^{i,i-1}.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Label = tuple  # (block, letter, i, s, ("q", 0), ...): the trailing pairs are fixed positions
Cell = tuple[str, str]

# Each table function returns a cell: the letter of the parameter, and the fixed positions ("jq"
# for a^{i,s,j,q}) that tell parameters of the same (i, s) apart.

# ---- NP: Table theta-constraint --------------------------------------------------------------


def np_vartheta(depth: int, i: int, j: int, k: int, s: int, p: int, q: int) -> Cell:
    """Table theta-constraint, vartheta^{ijk}_{spq} (weight to weight)."""
    if s == i - 1:
        return ("b" if k == p else "a"), ""
    if s == i:
        if j == p:
            return ("d" if k == q else "b"), ""
        return ("c" if k == q else "a"), ""
    if s == i + 1:
        return ("c" if j == q else "a"), ""
    return "a", ""


def np_phi(depth: int, i: int, j: int, k: int, s: int, p: int) -> Cell:
    """Table theta-constraint, phi^{ijk}_{sp} (bias to weight)."""
    if s == i - 1:
        return ("b" if k == p else "a"), ""
    if s == i:
        return ("b" if j == p else "a"), ""
    return "a", ""


def np_varphi(depth: int, i: int, j: int, s: int, p: int, q: int) -> Cell:
    """Table theta-constraint, varphi^{ij}_{spq} (weight to bias); its labels follow s (M1)."""
    if s == i:
        return ("b" if j == p else "a"), ""
    if s == i + 1:
        return ("b" if j == q else "a"), ""
    return "a", ""


def np_psi(depth: int, i: int, j: int, s: int, p: int) -> Cell:
    """Table theta-constraint, psi^{ij}_{sp} (bias to bias)."""
    return ("b" if s == i and j == p else "a"), ""


# ---- HNP: Tables hnp-vartheta, hnp-phi, hnp-varphi, hnp-psi ----------------------------------


def hnp_vartheta(depth: int, i: int, j: int, k: int, s: int, p: int, q: int) -> Cell:
    """Table hnp-vartheta, vartheta^{ijk}_{spq} (weight to weight)."""
    if depth == 1:  # M6
        return "a", "jkpq"
    if s == i - 1:
        letter = "b" if k == p else "a"
        if i == 2:
            return letter, ("jq" if i == depth else "q")  # M5
        return letter, ("j" if i == depth else "")
    if s == i:
        if i == 1:
            return ("b" if j == p else "a"), "kq"
        if i == depth:
            return ("c" if k == q else "a"), "jp"
        if j == p:
            return ("d" if k == q else "b"), ""
        return ("c" if k == q else "a"), ""
    if s == i + 1:
        letter = "c" if j == q else "a"
        if i == 1:
            return letter, ("kp" if i == depth - 1 else "k")  # M5
        return letter, ("p" if i == depth - 1 else "")  # M2 (the interior cell)
    if i == 1:
        return "a", ("kp" if s == depth else "k")
    if i == depth:
        return "a", ("jq" if s == 1 else "j")
    if s == depth:
        return "a", "p"
    return "a", ("q" if s == 1 else "")


def hnp_phi(depth: int, i: int, j: int, k: int, s: int, p: int) -> Cell:
    """Table hnp-phi, phi^{ijk}_{sp} (bias to weight)."""
    if depth == 1:  # M6
        return "b", "jkp"
    if s == i - 1:
        return ("b" if k == p else "a"), ("j" if i == depth else "")
    if s == i:
        if i == depth:
            return "b", "jp"
        return ("b" if j == p else "a"), ("k" if i == 1 else "")
    if i == 1:
        return "a", ("kp" if s == depth else "k")
    if s == depth:
        return "a", "p"
    return "a", ("j" if i == depth else "")


def hnp_varphi(depth: int, i: int, j: int, s: int, p: int, q: int) -> Cell:
    """Table hnp-varphi, varphi^{ij}_{spq} (weight to bias)."""
    if depth == 1:  # M6
        return "b", "jpq"
    if s == i:
        if i == depth:
            return "b", "jp"
        return ("b" if j == p else "a"), ("q" if i == 1 else "")  # M3
    if s == i + 1:
        return ("b" if j == q else "a"), ("p" if i == depth - 1 else "")  # M4
    if i == depth:
        return "a", ("jq" if s == 1 else "j")
    if s == depth:
        return "a", "p"
    return "a", ("q" if s == 1 else "")


def hnp_psi(depth: int, i: int, j: int, s: int, p: int) -> Cell:
    """Table hnp-psi, psi^{ij}_{sp} (bias to bias)."""
    if s == i:
        return ("b", "jp") if i == depth else (("b" if j == p else "a"), "")
    if s == depth:
        return "a", "p"
    return "a", ("j" if i == depth else "")


_NAMES = {(3, 3): "vartheta", (3, 2): "phi", (2, 3): "varphi", (2, 2): "psi"}
_TABLES = {
    "np": {"vartheta": np_vartheta, "phi": np_phi, "varphi": np_varphi, "psi": np_psi},
    "hnp": {"vartheta": hnp_vartheta, "phi": hnp_phi, "varphi": hnp_varphi, "psi": hnp_psi},
}


def chain_entries(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """All of U's index tuples, in order: (i, j, k) of W1, ..., WL, then (i, j) of v1, ..., vL."""
    layers = range(1, len(sizes))
    weights = [(i, j, k) for i in layers for j in range(sizes[i]) for k in range(sizes[i - 1])]
    return weights + [(i, j) for i in layers for j in range(sizes[i])]


def parameter_table(sizes: Sequence[int], symmetry: str) -> tuple[list[Label], np.ndarray]:
    """Labels of the shared parameters, and the [D, D] number of the one at each (alpha, beta)."""
    entries, numbers = chain_entries(sizes), {}
    index = np.empty((len(entries), len(entries)), dtype=np.int64)
    for row, alpha in enumerate(entries):
        for column, beta in enumerate(entries):
            name = _NAMES[len(alpha), len(beta)]
            letter, fixed = _TABLES[symmetry][name](len(sizes) - 1, *alpha, *beta)
            at = {**dict(zip("ijk", alpha, strict=False)), **dict(zip("spq", beta, strict=False))}
            label = (name, letter, at["i"], at["s"], *((axis, at[axis]) for axis in fixed))
            index[row, column] = numbers.setdefault(label, len(numbers))
    return list(numbers), index


def orbit_table(sizes: Sequence[int], symmetry: str) -> np.ndarray:
    """[D, D] orbit numbers of index pairs, by propagating labels over adjacent transpositions."""
    dim, depth = len(chain_entries(sizes)), len(sizes) - 1
    weights, biases = unflatten_chain(torch.arange(dim).reshape(1, dim, 1), sizes)
    moves = []
    for layer in {"np": range(depth + 1), "hnp": range(1, depth)}[symmetry]:
        for unit in range(sizes[layer] - 1):
            order = list(range(sizes[layer]))
            order[unit], order[unit + 1] = order[unit + 1], order[unit]
            moved_w, moved_b = list(weights), list(biases)
            if layer > 0:
                moved_w[layer - 1] = moved_w[layer - 1][:, order]
                moved_b[layer - 1] = moved_b[layer - 1][:, order]
            if layer < depth:
                moved_w[layer] = moved_w[layer][:, :, order]
            moves.append(flatten_chain(moved_w, moved_b).flatten().numpy())
    orbits = np.arange(dim * dim).reshape(dim, dim)
    while True:
        before = orbits
        for move in moves:
            orbits = np.minimum(orbits, orbits[np.ix_(move, move)])
        if np.array_equal(before, orbits):
            return np.unique(orbits, return_inverse=True)[1].reshape(dim, dim)


# ---- Applying the layers ---------------------------------------------------------------------


def flatten_chain(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """[batch, n_i, n_{i-1}, c] weights and [batch, n_i, c] biases to ve(U), [batch, D, c]."""
    return torch.cat([w.flatten(1, 2) for w in weights] + list(biases), dim=1)


def unflatten_chain(u: Tensor, sizes: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """The inverse of ``flatten_chain``."""
    shapes = list(zip(sizes[1:], sizes[:-1], strict=True))
    parts = u.split([n * m for n, m in shapes] + list(sizes[1:]), dim=1)
    weights = [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=False)]
    return weights, list(parts[len(shapes) :])


def dense_layer(theta_params: Tensor, index: np.ndarray, u: Tensor) -> Tensor:
    """Eq. NF-Layer-flattened, T(U)_alpha = sum_beta theta^alpha_beta U_beta, with channels.

    ``theta_params`` is [P, c_out, c_in] and ``u`` [batch, D, c_in]; sums, not averages.
    """
    theta = theta_params[torch.as_tensor(index)]
    return torch.einsum("xyoi,byi->bxo", theta, u)


def invariant(weights: Sequence[Tensor], biases: Sequence[Tensor], symmetry: str) -> Tensor:
    """The invariant layers P (Sec. invariant) and P-tilde (Eq. pooling-nonio), with averages.

    Returns [batch, entries, c]: the W means, the v means, then for HNP W1[*, :], WL[:, *], vL.
    At L = 1 the HNP formula is applied as printed, although no averaging is then needed.
    """
    parts = [w.mean((1, 2)).unsqueeze(1) for w in weights]
    parts += [v.mean(1, keepdim=True) for v in biases]
    if {"np": False, "hnp": True}[symmetry]:
        parts += [weights[0].mean(1), weights[-1].mean(2), biases[-1]]
    return torch.cat(parts, dim=1)
