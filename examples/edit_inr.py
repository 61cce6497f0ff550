"""Edit the image that a network holds by changing its weights.

SIRENs of two widths are fitted to digits. A neural functional learns a change of their weights,
`U + gamma * NFN(U)`, after which they show the digit dilated: the loss is the error of the rendered
image, and its gradient goes through the SIREN. It is tested on networks that it never saw.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import max_pool2d, mse_loss

from nfn_graph import NFN, Batch, DataLoader, WeightGraph
from nfn_graph.converters import from_state_dict
from nfn_graph.tasks.zoo.optimisers import stack
from nfn_graph.tasks.zoo.siren import (
    SirenShape,
    initialise_siren,
    pixel_grid,
    siren_forward,
)

W0 = 10.0


def fit_sirens(images: Tensor, width: int) -> list[WeightGraph]:
    """One SIREN 2-width-width-1 for each image `[8, 8]`, all fitted at once; `y` is the target."""
    shape, generator = SirenShape(2, (width, width), 1), torch.Generator().manual_seed(width)
    networks = stack([initialise_siren(shape, W0, generator) for _ in images])
    networks = {key: value.requires_grad_() for key, value in networks.items()}
    optimizer, grid = torch.optim.Adam(networks.values(), 5e-3), pixel_grid(8, 8)
    for _ in range(150):
        optimizer.zero_grad()
        error = siren_forward(networks, grid, W0) - images.flatten(1).unsqueeze(1)
        error.square().mean((1, 2)).sum().backward()
        optimizer.step()
    graphs = []
    for i, target in enumerate(max_pool2d(images.unsqueeze(1), 3, stride=1, padding=1)):
        state = {key: value[i].detach() for key, value in networks.items()}
        graph = from_state_dict(state, activation=f"sin:{W0}")
        graph.y = target.unsqueeze(0)
        graphs.append(graph)
    return graphs


def shown(batch: Batch) -> Tensor:
    """The images `[networks, 1, 8, 8]` that a batch of SIRENs holds."""
    outputs: Tensor = batch.run(pixel_grid(8, 8).T)
    return outputs.mT.unflatten(-1, (8, 8))


if __name__ == "__main__":
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images[:300], dtype=torch.float32) / 16
    graphs = [*fit_sirens(images[:150], 12), *fit_sirens(images[150:], 16)]
    train, test = torch.utils.data.random_split(graphs, [240, 60])

    editor = NFN(
        graphs[0].spec,
        channels=(16, 16, 1),
        io_encoding="sinusoidal",
        standardize=True,
        act="SiLU",
        edit_scale=0.01,
    )
    editor.standardize.fit(train)
    optimizer = torch.optim.Adam(editor.parameters(), 1e-2)
    for _ in range(6):
        for batch in DataLoader(train, batch_size=16, shuffle=True):
            optimizer.zero_grad()
            mse_loss(shown(editor(batch).to_graph()), batch.y).backward()
            optimizer.step()

    with torch.no_grad():
        (batch,) = DataLoader(test, batch_size=len(test))
        before = mse_loss(shown(batch), batch.y).item()
        after = mse_loss(shown(editor(batch).to_graph()), batch.y).item()
    print(f"error to the dilated digit: {before:.4f} before the edit, {after:.4f} after it")
    print(f"left of it: {after / before:.2f}")
