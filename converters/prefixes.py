"""The prefixes that wrappers add to the keys of a state dict."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable

from nfn_graph.converters.errors import ConversionError

#: Of DistributedDataParallel, of torch.compile, and of modules inside a LightningModule.
PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.")

# torch.compile may wrap a part of a network, too.
_COMPILED = re.compile(r"(?:^|(?<=\.))_orig_mod\.")


class Keys:
    """The keys of a checkpoint that those of a network stand for.

    They are the same behind one prefix: that of a wrapper, or of the attribute of a larger module.
    What has another prefix lies beside the network.

    Args:
        keys: The keys of the checkpoint.
        wanted: The keys of the network.

    Attributes:
        names: The checkpoint's key for every key of the network that it has.
        missing: Keys of the network that the checkpoint does not have.
        unknown: Keys of the checkpoint, behind the prefix, that the network does not have.
    """

    def __init__(self, keys: Iterable[str], wanted: Collection[str]) -> None:
        plain = {_plain(key): key for key in wanted}
        found: Counter[str] = Counter()
        by_plain: dict[str, list[str]] = {}
        for key in keys:
            name = _plain(key)
            by_plain.setdefault(name, []).append(key)
            starts = [0, *(match.end() for match in re.finditer(r"\.", name))]
            found.update({name[:start] for start in starts if name[start:] in plain})
        complete = [prefix for prefix, count in found.items() if count >= len(plain)]
        if len(complete) > 1:
            shown = " and ".join(repr(prefix) for prefix in sorted(complete)[:3])
            raise ConversionError(
                f"Expected the network's keys behind one prefix (got them behind {shown}). Pass "
                f"the tensors of one of them"
            )
        prefix = complete[0] if complete else max(found, key=lambda p: found[p], default="")
        self.names: dict[str, str] = {}
        self.unknown: list[str] = []
        for name, own in by_plain.items():
            if not name.startswith(prefix):
                continue
            if len(own) > 1:
                raise ConversionError(
                    f"Expected one tensor for '{name}' (got '{own[0]}' and '{own[1]}', which are "
                    f"the same without the prefix of a wrapper). Delete one of them"
                )
            if name[len(prefix) :] in plain:
                self.names[plain[name[len(prefix) :]]] = own[0]
            else:
                self.unknown.append(own[0])
        self.missing = [key for key in wanted if key not in self.names]

    @property
    def fit(self) -> bool:
        """Whether the network has these keys, all of them and no others."""
        return not self.missing and not self.unknown


def _plain(key: str) -> str:
    return _COMPILED.sub("", key)
