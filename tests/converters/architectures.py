"""Small networks of every supported kind, with an input and the layers that may be permuted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from nested_networks import (
    Attention,
    Causal,
    CrossCovariance,
    ResNeXt,
    UNet,
    ViT,
    Window,
    grouped,
)
from torch import Tensor, nn


@dataclass(frozen=True)
class Architecture:
    """A network to convert.

    Args:
        build: Function that creates the network with random weights.
        shapes: The shapes of its inputs.
        free: The sizes of the layers that may be permuted, in their order.
        needs_example: Whether its computation can only be followed with an example input.
    """

    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    free: tuple[int, ...]
    needs_example: bool = False

    def module(self) -> nn.Module:
        """The network in float64 and eval mode; no parameter or statistic is special."""
        module = self.build().double().eval()
        for tensor in module.state_dict().values():
            if tensor.is_floating_point() and tensor.dim() < 2:
                tensor += 0.2 * torch.rand_like(tensor)
        return module

    def inputs(self) -> tuple[Tensor, ...]:
        """Random inputs."""
        return tuple(torch.randn(shape, dtype=torch.float64) for shape in self.shapes)


class Lambda(nn.Module):
    """A network that consists of some modules and a function of them and the inputs."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        """Calls the function."""
        return self.function(self, *inputs)


class One(Lambda):
    """The same for one input, which torch.fx can follow."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        """Calls the function."""
        return self.function(self, x)


class Two(Lambda):
    """The same for two inputs."""

    def forward(self, x: Tensor, z: Tensor) -> Any:  # type: ignore[override]
        """Calls the function."""
        return self.function(self, x, z)


class BasicBlock(nn.Module):
    """The block of torchvision's ResNet-18."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = None
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Applies two convolutions and adds the identity or a projection."""
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """The layers of torchvision's ResNet-18, `width` channels wide."""

    def __init__(self, width: int = 64, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        for i, factor in enumerate((1, 2, 4, 8)):
            before, channels = width * max(factor // 2, 1), width * factor
            blocks = [BasicBlock(before, channels, 1 if i == 0 else 2)]
            blocks += [BasicBlock(channels, channels, 1)]
            setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class InvertedResidual(nn.Module):
    """The block of MobileNetV2: expand, depthwise, project, with an identity connection."""

    def __init__(self, in_channels: int, channels: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = in_channels * expand
        self.use_identity = stride == 1 and in_channels == channels
        self.conv = nn.Sequential(
            nn.Conv2d(in_channels, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block's result."""
        return x + self.conv(x) if self.use_identity else self.conv(x)


def mobilenet() -> nn.Module:
    """A MobileNet-style network."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU6(),
        InvertedResidual(4, 6, 2, 2),
        InvertedResidual(6, 6, 1, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(6, 5),
    )


def _tied() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.encoder(x))
        h = torch.tanh(m.again(torch.tanh(m.again(h))))
        return F.linear(h, m.encoder.weight.t(), m.bias)

    encoder, again = nn.Linear(6, 5), nn.Linear(5, 5)
    return One(run, encoder=encoder, again=again, alias=again, bias=nn.Parameter(torch.randn(6)))


def _option_a(m: Any, x: Tensor) -> Tensor:
    """A residual network whose shortcut pads channels with zeros."""
    x = F.relu(m.a(x))
    shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 2))
    return m.head(F.relu(shortcut + m.b(x)).mean((2, 3)))


def _squeeze_excite(m: Any, x: Tensor) -> Tensor:
    x = F.silu(m.a(x))
    gate = torch.sigmoid(m.up(F.silu(m.down(x.mean((2, 3)))))).view(x.size(0), -1, 1, 1)
    return m.head((x * gate).mean((2, 3)))


def _unet(m: Any, x: Tensor) -> Tensor:
    first = F.gelu(m.a(x))
    deep = F.gelu(m.b(F.max_pool2d(first, 2)))
    up = F.interpolate(deep, scale_factor=2)
    return m.out(torch.cat([up, first, x], 1))


def _dense(m: Any, x: Tensor) -> Tensor:
    x = m.a(x)
    x = torch.cat([x, m.b(F.gelu(m.norm1(x)))], 1)
    x = torch.cat([x, m.c(F.gelu(m.norm2(x)))], 1)
    return m.head(F.gelu(x).mean((2, 3)))


def _attention_map(m: Any, x: Tensor) -> Tensor:
    """Spatial attention: statistics over channels, which are invariant to permutations."""
    x = F.gelu(m.a(x))
    stats = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
    return m.head((x * torch.sigmoid(m.map(stats))).mean((2, 3)))


def _conv_permute(m: Any, x: Tensor) -> Tensor:
    x = m.prelu(m.conv(x)).permute(0, 3, 2, 1).contiguous()
    return m.out(F.gelu(m.dense(x.view(x.shape[0], -1))))


def _control_flow(m: Any, x: Tensor) -> Tensor:
    if x.shape[-1] > 3:
        x = F.avg_pool2d(x, 2)
    x = m.norm(m.a(x))
    return m.b(F.relu(x)).flatten(1)


def _siren(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers[:-1]:
        x = torch.sin(30.0 * layer(x))
    return m.layers[-1](x).squeeze(-1) + 0.5


S = nn.Sequential

ARCHITECTURES: dict[str, Architecture] = {
    "mlp": Architecture(
        lambda: S(
            nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 2)
        ),
        ((4, 3),),
        (6, 5),
    ),
    "flattened input": Architecture(
        lambda: S(nn.Flatten(), nn.Linear(18, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 2)),
        ((4, 2, 3, 3),),
        (5,),
    ),
    "siren": Architecture(
        lambda: One(
            _siren, layers=nn.ModuleList([nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 1)])
        ),
        ((4, 2),),
        (8, 8),
    ),
    "cnn with pooling": Architecture(
        lambda: S(
            nn.Conv2d(3, 5, 3, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 4, 3, padding=2),
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
        ),
        ((2, 3, 12, 12),),
        (5, 4),
    ),
    "cnn with flatten": Architecture(
        lambda: S(
            nn.Conv2d(3, 5, 3), nn.Sigmoid(), nn.Conv2d(5, 4, (3, 2)), nn.Flatten(),
            nn.BatchNorm1d(4 * 2 * 3), nn.Linear(4 * 2 * 3, 6), nn.ELU(), nn.Linear(6, 2),
        ),
        ((2, 3, 6, 6),),
        (5, 4, 6),
    ),
    "cnn with permute and flatten": Architecture(
        lambda: One(
            _conv_permute, conv=nn.Conv2d(3, 5, 3), prelu=nn.PReLU(5),
            dense=nn.Linear(5 * 4 * 3, 6), out=nn.Linear(6, 2),
        ),
        ((2, 3, 6, 5),),
        (5, 6),
    ),
    "batch norm": Architecture(
        lambda: S(
            nn.BatchNorm2d(3), nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(),
            nn.Conv2d(5, 4, 3), nn.BatchNorm2d(4, affine=False), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
        ),
        ((2, 3, 7, 7),),
        (5, 4),
    ),
    "other norms": Architecture(
        lambda: S(
            nn.Conv2d(3, 6, 3, bias=False), nn.InstanceNorm2d(6, affine=True), nn.GELU(),
            nn.Conv2d(6, 5, 3, bias=False), nn.GroupNorm(1, 5), nn.GELU(),
            nn.Conv2d(5, 4, 3), nn.LayerNorm([4, 2, 2]), nn.Flatten(), nn.Linear(16, 2),
        ),
        ((2, 3, 8, 8),),
        (6, 5, 4),
    ),
    "residual": Architecture(
        lambda: One(
            lambda m, x: m.out((h := m.a(x)) + m.c(F.relu(m.b(h)))),
            a=nn.Linear(3, 6), b=nn.Linear(6, 5), c=nn.Linear(5, 6), out=nn.Linear(6, 2),
        ),
        ((4, 3),),
        (6, 5),
    ),
    "residual with downsampling": Architecture(
        lambda: S(
            nn.Conv2d(3, 4, 3), BasicBlock(4, 4, 1), BasicBlock(4, 6, 2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2),
        ),
        ((2, 3, 8, 8),),
        (4, 4, 6, 6),
    ),
    "residual to the input": Architecture(
        lambda: One(
            lambda m, x: x + m.b(F.relu(m.a(x))), a=nn.Linear(3, 6), b=nn.Linear(6, 3)
        ),
        ((4, 3),),
        (6,),
    ),
    "self weights": Architecture(
        lambda: One(
            lambda m, x: m.out(((h := F.relu(m.a(x))) + m.own(h)).flatten(1)),
            a=nn.Conv2d(2, 5, 3), own=nn.Conv2d(5, 5, 3, padding=1), out=nn.Linear(5 * 9, 2),
        ),
        ((2, 2, 5, 5),),
        (5,),
    ),
    "depthwise": Architecture(
        lambda: S(
            nn.Conv2d(3, 5, 3), nn.Conv2d(5, 5, 3, padding=1, groups=5), nn.ReLU(),
            nn.Conv2d(5, 10, 3, groups=5), nn.BatchNorm2d(10), nn.ReLU(), nn.Conv2d(10, 4, 1),
            nn.ConvTranspose2d(4, 8, 2, groups=4), nn.ReLU(), nn.Conv2d(8, 2, 1),
        ),
        ((2, 3, 7, 7),),
        (5, 10, 4, 8),
    ),
    "prelu and scales": Architecture(
        lambda: One(
            lambda m, x: m.out(m.scale * m.one(m.each(m.a(x))) * m.temperature),
            a=nn.Linear(3, 6), each=nn.PReLU(6), one=nn.PReLU(), out=nn.Linear(6, 2),
            scale=nn.Parameter(torch.randn(6)), temperature=nn.Parameter(torch.tensor(1.5)),
        ),
        ((4, 3),),
        (6,),
    ),
    "concatenation": Architecture(
        lambda: Two(
            lambda m, x, z: m.out(
                F.relu(m.join(torch.cat([m.conv(x).flatten(1), torch.sin(m.dense(z))], 1)))
            ),
            conv=nn.Conv2d(2, 4, 3), dense=nn.Linear(3, 5), join=nn.Linear(4 * 4 + 5, 6),
            out=nn.Linear(6, 2),
        ),
        ((2, 2, 4, 4), (2, 3)),
        (4, 5, 6),
    ),
    "concatenation, then channels last": Architecture(
        lambda: One(
            lambda m, x: m.out(
                torch.cat([m.a(x), m.b(x)], 1).permute(0, 2, 3, 1).flatten(1)
            ),
            a=nn.Conv2d(2, 4, 3), b=nn.Conv2d(2, 3, 3), out=nn.Linear(7 * 4, 2),
        ),
        ((2, 2, 4, 4),),
        (4, 3),
    ),
    "slices": Architecture(
        lambda: One(
            lambda m, x: m.out(
                torch.cat([F.glu(m.a(x), 1) + (y := m.b(x))[:, 2:6], y[:, :2], y[:, 6:]], 1)
            ),
            a=nn.Linear(3, 8), b=nn.Linear(3, 9), out=nn.Linear(9, 2),
        ),
        ((4, 3),),
        (4, 2, 3),
        needs_example=True,
    ),
    "dense block": Architecture(
        lambda: One(
            _dense, a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(4, 3, 1), c=nn.Conv2d(7, 3, 1),
            norm1=nn.BatchNorm2d(4), norm2=nn.BatchNorm2d(7), head=nn.Linear(10, 2),
        ),
        ((2, 3, 4, 4),),
        (4, 3, 3),
    ),
    "u-net": Architecture(
        lambda: One(
            _unet, a=nn.Conv2d(3, 4, 3, padding=1), b=nn.Conv2d(4, 5, 3, padding=1),
            out=nn.Conv2d(12, 2, 1),
        ),
        ((2, 3, 8, 8),),
        (4, 5),
    ),
    "zero-padded shortcut": Architecture(
        lambda: One(
            _option_a, a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 7, 3, 2, 1), head=nn.Linear(7, 2)
        ),
        ((2, 3, 8, 8),),
        (4, 1, 2),
    ),
    "squeeze and excitation": Architecture(
        lambda: One(
            _squeeze_excite, a=nn.Conv2d(3, 6, 3), down=nn.Linear(6, 3), up=nn.Linear(3, 6),
            head=nn.Linear(6, 2),
        ),
        ((2, 3, 5, 5),),
        (6, 3),
    ),
    "spatial attention": Architecture(
        lambda: One(
            _attention_map, a=nn.Conv2d(3, 6, 3), map=nn.Conv2d(2, 1, 3, padding=1),
            head=nn.Linear(6, 2),
        ),
        ((2, 3, 5, 5),),
        (6, 1),
    ),
    "tied weights": Architecture(_tied, ((4, 6),), (5,)),
    "two heads": Architecture(
        lambda: One(
            lambda m, x: (m.first(h := F.relu(m.a(x))), {"second": m.second(h)}),
            a=nn.Linear(3, 6), first=nn.Linear(6, 2), second=nn.Linear(6, 1, bias=False),
        ),
        ((4, 3),),
        (6,),
    ),
    "one dimension": Architecture(
        lambda: S(
            nn.Conv1d(2, 5, 3, dilation=2), nn.BatchNorm1d(5), nn.ReLU(), nn.AvgPool1d(2),
            nn.ConvTranspose1d(5, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 2),
        ),
        ((2, 2, 12),),
        (5, 4),
    ),
    "three dimensions": Architecture(
        lambda: S(
            nn.Conv3d(2, 5, (2, 1, 2)), nn.ReLU(), nn.ConvTranspose3d(5, 4, 2, 2), nn.ReLU(),
            nn.Conv3d(4, 2, 1),
        ),
        ((2, 2, 3, 3, 3),),
        (5, 4),
    ),
    "generator": Architecture(
        lambda: One(
            lambda m, x: torch.tanh(m.out(F.relu(m.norm(m.up(m.dense(x).view(-1, 4, 3, 3)))))),
            dense=nn.Linear(5, 4 * 9), up=nn.ConvTranspose2d(4, 3, 4, 2), norm=nn.BatchNorm2d(3),
            out=nn.ConvTranspose2d(3, 1, 3),
        ),
        ((2, 5),),
        (4, 3),
    ),
    "pixel shuffle": Architecture(
        lambda: S(nn.Conv2d(3, 12, 3), nn.PixelShuffle(2), nn.ReLU(), nn.Conv2d(3, 2, 3)),
        ((2, 3, 6, 6),),
        (3,),
    ),
    "points": Architecture(
        lambda: One(
            lambda m, x: m.head(F.relu(m.b(F.relu(m.a(x)))).amax(1)),
            a=nn.Linear(3, 6), b=nn.Linear(6, 5), head=nn.Linear(5, 2),
        ),
        ((2, 7, 3),),
        (6, 5),
        needs_example=True,
    ),
    "weight norm": Architecture(
        lambda: S(
            nn.utils.parametrizations.weight_norm(nn.Linear(3, 6)), nn.ReLU(), nn.Linear(6, 2)
        ),
        ((4, 3),),
        (6,),
    ),
    "matmul": Architecture(
        lambda: One(
            lambda m, x: torch.relu(x @ m.first + m.shift) @ m.second,
            first=nn.Parameter(torch.randn(3, 6)), shift=nn.Parameter(torch.randn(6)),
            second=nn.Parameter(torch.randn(6, 2)),
        ),
        ((4, 3),),
        (6,),
    ),
    "control flow by shape": Architecture(
        lambda: One(
            _control_flow, a=nn.Conv2d(3, 5, 1), norm=nn.BatchNorm2d(5), b=nn.Conv2d(5, 2, 1)
        ),
        ((2, 3, 4, 4),),
        (5,),
        needs_example=True,
    ),
    "resnet-18": Architecture(
        lambda: ResNet18(4),
        ((1, 3, 32, 32),),
        (4, 4, 4, 8, 8, 8, 16, 16, 16, 32, 32, 32),
    ),
    "mobilenet": Architecture(mobilenet, ((1, 3, 16, 16),), (4, 8, 6, 18)),
    "attention": Architecture(Attention, ((2, 5, 3),), (8, 2, 8, 8), needs_example=True),
    "attention function": Architecture(
        lambda: Attention(style="function"), ((2, 5, 3),), (8, 2, 8, 8), needs_example=True
    ),
    "attention einsum": Architecture(
        lambda: Attention(style="einsum"), ((2, 5, 3),), (8, 2, 8, 8), needs_example=True
    ),
    "attention of batches": Architecture(
        lambda: Attention(style="bmm"), ((2, 5, 3),), (8, 2, 8, 8), needs_example=True
    ),
    "attention with slopes": Architecture(
        lambda: Attention(style="alibi"), ((2, 5, 3),), (8, 2, 8, 8), needs_example=True
    ),
    "masked attention": Architecture(
        lambda: One(
            lambda m, x: m.b(m.attend(*[m.a(x)] * 3, attn_mask=m.mask, need_weights=False)[0]),
            a=nn.Linear(3, 8), b=nn.Linear(8, 2),
            mask=nn.Buffer(torch.ones(5, 5).triu(1) > 0, persistent=False),
            attend=nn.MultiheadAttention(8, 2, batch_first=True),
        ),
        ((2, 5, 3),),
        (8, 2, 8, 8, 8),
    ),
    "rotary attention": Architecture(
        lambda: Attention(time=5), ((2, 5, 3),), (8, 2, 8), needs_example=True
    ),
    "grouped-query attention": Architecture(
        lambda: Attention(heads=4), ((2, 5, 3),), (8, 2, 4, 4, 8, 4, 8), needs_example=True
    ),
    **{
        f"grouped-query attention, {copies}": Architecture(
            lambda copies=copies: Attention(heads=4, copies=copies),
            ((2, 5, 3),), (8, 2, 4, 4, 8, 4, 8), needs_example=True,
        )
        for copies in ("expand", "axis", "flag")
    },
    "grouped-query attention, tile": Architecture(
        # The heads of queries come in another order: copies are permuted alike in all key heads.
        lambda: Attention(heads=4, copies="tile"),
        ((2, 5, 3),), (8, 2, 4, 2, 4, 8, 4, 8), needs_example=True,
    ),
    "multi-query attention, flag": Architecture(
        lambda: Attention(heads=4, shared=1, copies="flag"),
        ((2, 5, 3),), (8, 2, 4, 8, 2, 8), needs_example=True,
    ),
    "cross-covariance attention": Architecture(
        CrossCovariance, ((2, 5, 3),), (8, 2, 8, 8), needs_example=True
    ),
    "self and cross attention by one module": Architecture(
        lambda: Two(
            lambda m, x, y: m.out(
                (h := m.attend(*[m.a(x)] * 3)[0]) + m.attend(h, m.b(y), m.b(y))[0]
            ),
            a=nn.Linear(3, 8), b=nn.Linear(6, 8), out=nn.Linear(8, 2),
            attend=nn.MultiheadAttention(8, 2, batch_first=True),
        ),
        ((2, 5, 3), (2, 4, 6)),
        (8, 2, 8, 8),
    ),
    "multi-query attention": Architecture(
        lambda: Attention(heads=4, shared=1), ((2, 5, 3),), (8, 2, 4, 8, 2, 8), needs_example=True
    ),
    "cross attention": Architecture(
        lambda: Two(
            lambda m, x, y: m.out(m.attention(m.a(x), m.b(y), m.b(y))[0]),
            a=nn.Linear(3, 8), b=nn.Linear(6, 4), out=nn.Linear(8, 2),
            attention=nn.MultiheadAttention(8, 2, kdim=4, vdim=4, batch_first=True),
        ),
        ((2, 5, 3), (2, 4, 6)),
        (8, 4, 2, 8, 8, 8),
    ),
    "vision transformer": Architecture(ViT, ((2, 1, 4, 4),), (8, 2, 8, 8, 6), needs_example=True),
    "window attention": Architecture(Window, ((2, 3, 4, 4),), (8, 2, 8, 8, 6), needs_example=True),
    "causal transformer": Architecture(Causal, ((2, 4),), (8, 2, 8, 8), needs_example=True),
    "transformer encoder": Architecture(
        lambda: S(
            nn.Linear(3, 8), nn.TransformerEncoderLayer(8, 2, 6, batch_first=True), nn.Linear(8, 2)
        ),
        ((2, 5, 3),),
        (8, 2, 8, 8, 6),
    ),
    "transformer decoder": Architecture(
        lambda: Two(
            lambda m, x, y: m.out(m.layer(m.a(x), m.b(y))),
            a=nn.Linear(3, 8), b=nn.Linear(6, 8), out=nn.Linear(8, 2),
            layer=nn.TransformerDecoderLayer(8, 2, 6, batch_first=True, norm_first=True),
        ),
        ((2, 5, 3), (2, 4, 6)),
        (8, 8, 2, 8, 8, 2, 8, 8, 6),
    ),
    "grouped convolution": Architecture(
        lambda: grouped(nn.Conv2d, 9, 2, 2), ((2, 3, 4, 4),), (3, 6, 9)
    ),
    "grouped 1d convolution": Architecture(
        lambda: grouped(nn.Conv1d, 6, 2), ((2, 3, 4),), (3, 6, 6)
    ),
    "grouped 3d convolution": Architecture(
        lambda: grouped(nn.Conv3d, 6, 1, 2, 1), ((2, 3, 2, 2, 2),), (3, 6, 6)
    ),
    "grouped transposed convolution": Architecture(
        lambda: grouped(nn.ConvTranspose2d, 9, 2, 2), ((2, 3, 3, 3),), (3, 6, 9)
    ),
    "group norm": Architecture(
        lambda: S(nn.Conv2d(3, 6, 2), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 2, 1)),
        ((2, 3, 4, 4),),
        (2, 6),
    ),
    "channel shuffle": Architecture(
        lambda: S(
            nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1, groups=2), nn.ChannelShuffle(2),
            nn.ReLU(), nn.Conv2d(8, 8, 1, groups=2), nn.ReLU(), nn.Conv2d(8, 2, 1),
        ),
        ((2, 3, 3, 3),),
        (2, 4, 2, 8, 8, 4, 8, 8),
    ),
    "groups of groups": Architecture(
        lambda: S(
            nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 1, groups=4),
            nn.ReLU(), nn.Conv2d(8, 2, 1),
        ),
        ((2, 3, 3, 3),),
        (2, 4, 8, 8),
    ),
    "u-net with group norm": Architecture(UNet, ((2, 3, 4, 4),), (2, 4, 3, 6, 4)),
    "resnext": Architecture(ResNeXt, ((2, 3, 4, 4),), (5, 3, 6, 6)),
}  # fmt: skip
