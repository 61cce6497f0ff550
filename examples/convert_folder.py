"""Convert a folder of checkpoints, read it as a PyG dataset, and get every file back.

CNNs of different widths are trained on digits and saved in three formats. `nfn-graph convert` (here
called from Python) finds out how their tensors hang together, refuses what has no graph with the
reason, and writes a store: few files for many networks. The way back is exact to the last bit.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import nn

from nfn_graph import DataLoader
from nfn_graph.cli import main as nfn_graph
from nfn_graph.converters import WeightDataset


def train_cnn(width: int, steps: int = 40) -> dict[str, torch.Tensor]:
    """The state dict of a CNN; the statistics of its norm belong to neurons, too."""
    network = nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    )
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    target = torch.tensor(digits.target)
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(steps):
        i = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x[i]), target[i]).backward()
        optimizer.step()
    return network.state_dict()


def save(states: dict[str, dict[str, torch.Tensor]], folder: Path) -> None:
    """Writes checkpoints in several formats, and one that has no graph."""
    folder.mkdir()
    for i, (name, state) in enumerate(states.items()):
        if i % 3 == 0:
            torch.save({"state_dict": state, "epoch": 3}, folder / f"{name}.pt")
        elif i % 3 == 1:
            save_file(state, folder / f"{name}.safetensors")
        else:
            np.savez(folder / f"{name}.npz", **{key: x.numpy() for key, x in state.items()})
    torch.save(nn.MultiheadAttention(8, 2).state_dict(), folder / "attention.pt")


def main(folder: Path) -> None:
    """There and back again."""
    files, store, back = folder / "checkpoints", folder / "store", folder / "back"
    states = {f"cnn{width}": train_cnn(width) for width in (8, 10, 12, 16, 20, 24)}
    save(states, files)

    nfn_graph(["convert", str(files), "--out", str(store), "--workers", "1"])
    for batch in DataLoader(WeightDataset(store), batch_size=3):
        print(f"a batch of {batch.num_graphs}, {len(batch['hidden1'].x)} hidden neurons together")

    nfn_graph(["export", str(store), "--out", str(back), "--format", "pt"])
    exact = 0
    for path in back.glob("*.pt"):
        found, state = torch.load(path, weights_only=True), states[path.name.split(".")[0]]
        exact += found.keys() == state.keys() and all(
            torch.equal(found[key], x) and found[key].dtype == x.dtype for key, x in state.items()
        )
    print(f"{exact} of {len(states)} came back bit for bit")


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
