"""How published zoos were made, as options of the commands that build zoos.

`--recipe NAME` puts the options of a recipe before those of the command line, so every option that
is given as well counts instead. In Python, `InrZooOptions(out, recipe="dws",
**RECIPES["inr"]["dws"].options)` does the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nfn_graph.messages import UserError
from nfn_graph.tasks.option_checks import flag

_DWS_CODE = "AvivNavon/DWSNets, nn/inr.py"
_DWS_ISSUE = "AvivNavon/DWSNets, issue 6"
_NFN_PAPER = "Zhou et al. 2023, arXiv 2302.14040, appendix on INR classification"
_NFN_ISSUE = "AllanYangZhou/nfn, issue 17"
_INR2VEC = "CVLAB-Unibo/inr2vec, pcd_retrieval_and_classification/cfg/inrs_dataset.yaml"
_ZOO_CODE = "google-research/dnn_predict_accuracy, train_network.py"
_ZOO_README = "google-research/dnn_predict_accuracy, README.md"
_ZOO_PAPER = "Unterthiner et al. 2020, arXiv 2002.11448, quoted second-hand"
_PARK_DATA = "description of doi:10.5281/zenodo.12797219"
_PARK_CODE = "mkofinas/neural-graphs, cnn_generalization/dataset/cnn_sampler.py"
_PARK_LATER = (
    "mkofinas/neural-graphs, cnn_generalization/dataset/generate_cnn_park_config/base.yaml, which "
    "is that of a later zoo"
)
_LAYOUT = "shapes of the published files"


@dataclass(frozen=True)
class Recipe:
    """How the networks of a published zoo were made.

    Args:
        about: Which zoo it is.
        values: For every option its value, and where that is stated.
        differs: What of the original is not reproduced, or is not known.
    """

    about: str
    values: Mapping[str, tuple[Any, str]]
    differs: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """The options by name."""
        return {name: value for name, (value, _) in self.values.items()}

    @property
    def words(self) -> list[str]:
        """The options as words of a command line."""
        found: list[str] = []
        for name, value in self.options.items():
            option = flag(name)
            if isinstance(value, bool):
                found.append(option if value else f"--no-{option.removeprefix('--')}")
            else:
                found += [option, *map(str, value if isinstance(value, tuple) else (value,))]
        return found


#: The recipes, by the subcommand of `nfn-graph zoo` that follows them.
RECIPES: dict[str, dict[str, Recipe]] = {
    "inr": {
        "dws": Recipe(
            "MNIST and FashionMNIST INRs of DWSNets, one fit per image",
            {
                "widths": ((32,), _LAYOUT),
                "depths": ((2,), _LAYOUT),
                "w0": (30.0, _DWS_CODE),
                "init": ("dws", _DWS_CODE),
                "output_offset": (0.5, _DWS_CODE),
                "steps": (1000, _DWS_ISSUE),
                "stop_psnr": (40.0, _DWS_ISSUE),
                "learning_rate": (5e-4, _DWS_ISSUE),
                "points": (0, "all pixels are assumed; it is not stated"),
                "fits": (1, _LAYOUT),
            },
            ("The split is 55,000, 5,000 and 10,000 images: use --validation-share 0.0833.",),
        ),
        "nfn": Recipe(
            "MNIST, FashionMNIST and CIFAR-10 INRs of the paper, several fits per training image",
            {
                "widths": ((32,), _NFN_PAPER),
                "depths": ((2,), _LAYOUT),
                "w0": (30.0, "Sitzmann et al. 2020, whose SIREN is used"),
                "init": ("sitzmann", _NFN_ISSUE),
                "output_offset": (0.0, _NFN_ISSUE),
                "steps": (5000, _NFN_PAPER),
                "learning_rate": (5e-5, _NFN_PAPER),
                "points": (0, "all pixels are assumed; it is not stated"),
                "fits": (10, _NFN_PAPER),
            },
            (
                "For CIFAR-10, the original has 20 fits per training image: use --fits 20.",
                "The split is 45,000 and 5,000 images: use --images 50000 --validation-share 0.1.",
                "The range of the pixels is not stated; here it is [0, 1].",
            ),
        ),
        "inr2vec": Recipe(
            "unsigned distance fields of point clouds of inr2vec",
            {
                "kind": ("cloud", _INR2VEC),
                "widths": ((512,), _INR2VEC),
                "depths": ((4,), _INR2VEC),
                "w0": (30.0, "assumed; it is not stated in the configuration"),
                "init": ("sitzmann", "assumed; the original loads a file"),
                "same_init": (True, _INR2VEC),
                "steps": (500, _INR2VEC),
                "learning_rate": (1e-4, _INR2VEC),
                "points": (10_000, _INR2VEC),
                "samples": (500_000, _INR2VEC),
            },
            (
                "The original fits the sigmoid of the output to a scaled distance with the binary "
                "cross-entropy; here the output is fitted to the distance with the squared error.",
                "The original adds rescaled and jittered copies of the training shapes.",
            ),
        ),
    },
    "cnn": {
        "small-cnn-zoo": Recipe(
            "Small CNN Zoo: 4,970 parameters, grey images, the last of nine checkpoints",
            {
                "arch": ("cnn", _ZOO_README),
                "grey": (True, _ZOO_CODE),
                "widths": ((16,), _ZOO_README),
                "depths": ((3,), _ZOO_README),
                "padding": (0, _ZOO_CODE),
                "batch_size": (512, _ZOO_CODE),
                "epochs": ((86, 86), _ZOO_README),
                "checkpoints": ((1.0,), "the published split keeps the last checkpoint"),
                "activations": (("relu", "tanh"), _ZOO_PAPER),
                "inits": (
                    ("glorot_normal", "he_normal", "orthogonal", "normal", "truncated_normal"),
                    _ZOO_PAPER,
                ),
                "init_scale": ((1.0, 1.0), _ZOO_CODE),
                "init_std": ((1e-3, 0.5), _ZOO_PAPER),
                "optimisers": (("adam", "sgd", "rmsprop"), _ZOO_PAPER),
                "learning_rate": ((5e-4, 5e-2), _ZOO_PAPER),
                "l2": ((1e-8, 1e-2), _ZOO_PAPER),
                "dropout": ((0.0, 0.7), _ZOO_PAPER),
                "dropout_share": (1.0, _ZOO_CODE),
                "train_fractions": ((0.1, 0.25, 0.5, 1.0), _ZOO_PAPER),
            },
            (
                "SGD uses ten times the sampled learning rate, as in all zoos of nfn-graph.",
                "The original has 30,000 networks, half of them for testing: use --test-share.",
            ),
        ),
        "wild-park": Recipe(
            "CNN Wild Park: convolutions of many widths, kernels and activations, with skips",
            {
                "arch": ("cnn", _PARK_DATA),
                "depths": ((2, 3, 4, 5), _PARK_DATA),
                "widths": ((4, 8, 16, 32), _PARK_DATA),
                "kernels": ((3, 5, 7), _PARK_DATA),
                "activations": (
                    ("relu", "gelu", "tanh", "sigmoid", "leaky_relu", "none"),
                    _PARK_DATA,
                ),
                "per_layer": (True, _PARK_DATA),
                "skips": (True, _PARK_DATA),
                "stride": (1, _PARK_CODE),
                "padding": ("same", _PARK_CODE),
                "inits": (("pytorch",), _PARK_CODE),
                "init_scale": ((1.0, 1.0), _PARK_CODE),
                "epochs": ((200, 1000), _PARK_DATA),
                "checkpoint_epochs": (10, _PARK_DATA),
                "checkpoints": ((1.0,), "the last epoch need not be a multiple of ten"),
                "batch_size": (512, _PARK_LATER),
                "optimisers": (("adam",), f"{_PARK_LATER}: AdamW without weight decay"),
                "learning_rate": ((1e-3, 1e-3), _PARK_LATER),
                "l2": ((0.0, 0.0), _PARK_LATER),
                "dropout_share": (0.0, _PARK_CODE),
                "train_fractions": ((1.0,), _PARK_CODE),
            },
            (
                "The original has 2,800 networks with 117,241 checkpoints of CIFAR-10: use "
                "--networks 2800.",
                "The source does not state how the number of epochs was chosen; here it is "
                "sampled uniformly. The original has 42 checkpoints per network, and this recipe "
                "about 60.",
                "The source does not state whether the number of layers includes the dense one; "
                "here only convolutions count, as in the code.",
                "Pixels are scaled to [-1, 1]; the original standardizes every colour.",
                "As in the original, all checkpoints of a network are in one split. The sizes of "
                "the original splits are only stated in its split file, which we have not read.",
                "Almost no two networks have the same shape, so they train one by one.",
            ),
        ),
    },
}


def expanded(arguments: Sequence[str]) -> list[str]:
    """The words of `nfn-graph zoo ...` with those of a recipe, if there is a `--recipe`."""
    words = list(arguments)
    known = RECIPES.get(words[0], {}) if words else {}
    for word, after in pairwise([*words, ""]):
        option, equals, value = word.partition("=")
        name = value if equals else after
        if option == "--recipe" and name in known:
            return [words[0], *known[name].words, *words[1:]]
    return words


def check_recipe(command: str, options: Any) -> None:
    """Raises if options name a recipe and have none of its values."""
    if options.recipe is None:
        return
    recipe = RECIPES[command][options.recipe]
    default = type(options)(options.out)
    own = {k: v for k, v in recipe.options.items() if v != getattr(default, k)}
    if not any(getattr(options, name) == value for name, value in own.items()):
        raise UserError(
            f"Expected options with the values of the recipe '{options.recipe}', such as "
            f"{type(options).__name__}(out, recipe={options.recipe!r}, "
            f"**RECIPES[{command!r}][{options.recipe!r}].options) (got none of them)"
        )
