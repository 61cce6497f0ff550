"""State dicts of well-known transformers, with networks of the same names as oracles."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nfn_graph import symmetry
from nfn_graph.cli import main
from nfn_graph.converters import ConversionError, from_state_dict, load, save, to_state_dict

Tensors = dict[str, Tensor]
WORDS = torch.tensor([[1, 5, 7, 2], [0, 9, 2, 2]])
IMAGE = torch.randn(2, 3, 8, 8, dtype=torch.float64)
# Four heads of three dimensions, or two heads of keys; the dense layers have 10 neurons.
WIDTH, INNER, HEADS, SIZE = 12, 10, 4, 3


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Attention with heads of `SIZE` dimensions; keys may have fewer heads than queries."""
    q, k, v = (x.unflatten(-1, (-1, SIZE)).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / SIZE**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Names:
    """The layers of a state dict by name."""

    def __init__(self, tensors: Tensors, prefix: str = "") -> None:
        self.tensors, self.prefix = tensors, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self[f"{name}.weight"], self.tensors.get(f"{self.prefix}{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self[f"{name}.weight"], self[f"{name}.bias"])


def bert(tensors: Tensors) -> Tensor:
    n = Names(tensors)
    x = n["embeddings.word_embeddings.weight"][WORDS]
    x = x + n["embeddings.position_embeddings.weight"][: WORDS.shape[1]]
    x = n.norm("embeddings.LayerNorm", x + n["embeddings.token_type_embeddings.weight"][0])
    for i in range(2):
        p = f"encoder.layer.{i}."
        parts = (n.linear(f"{p}attention.self.{part}", x) for part in ("query", "key", "value"))
        h = n.linear(f"{p}attention.output.dense", attention(*parts))
        x = n.norm(f"{p}attention.output.LayerNorm", x + h)
        h = n.linear(f"{p}output.dense", F.gelu(n.linear(f"{p}intermediate.dense", x)))
        x = n.norm(f"{p}output.LayerNorm", x + h)
    return torch.cat([x.flatten(), n.linear("pooler.dense", x[:, 0]).tanh().flatten()])


def question_answering(tensors: Tensors) -> Tensor:
    """Answers read the stream; files of old versions have a pooler that nothing reads."""
    own = {key.removeprefix("bert."): tensor for key, tensor in tensors.items()}
    stream = bert(own)[: WORDS.numel() * WIDTH].view(*WORDS.shape, WIDTH)
    return Names(tensors).linear("qa_outputs", stream)


def classified(tensors: Tensors) -> Tensor:
    """Classes of sequences read the pooler."""
    own = {key.removeprefix("bert."): tensor for key, tensor in tensors.items()}
    return Names(tensors).linear("classifier", bert(own)[WORDS.numel() * WIDTH :].view(2, WIDTH))


def gpt2(tensors: Tensors) -> Tensor:
    n = Names(tensors, "transformer.")
    is_turned = n["h.0.attn.c_attn.weight"].shape[0] != WIDTH
    x = n["wte.weight"][WORDS] + n["wpe.weight"][: WORDS.shape[1]]

    def conv1d(name: str, x: Tensor) -> Tensor:
        weight = n[f"{name}.weight"]
        return x @ (weight.T if is_turned else weight) + n[f"{name}.bias"]

    for i in range(2):
        q, k, v = conv1d(f"h.{i}.attn.c_attn", n.norm(f"h.{i}.ln_1", x)).chunk(3, -1)
        x = x + conv1d(f"h.{i}.attn.c_proj", attention(q, k, v, causal=True))
        h = F.gelu(conv1d(f"h.{i}.mlp.c_fc", n.norm(f"h.{i}.ln_2", x)))
        x = x + conv1d(f"h.{i}.mlp.c_proj", h)
    return n.norm("ln_f", x) @ tensors["lm_head.weight"].T


def rotated(x: Tensor) -> Tensor:
    """Rotary positions of heads with an even number of dimensions."""
    heads = x.unflatten(-1, (-1, 2 * SIZE))
    angles = torch.arange(x.shape[1])[:, None] * 0.3 ** torch.arange(SIZE, dtype=x.dtype)
    cos, sin = (f(torch.cat([angles, angles], -1))[:, None] for f in (torch.cos, torch.sin))
    turned = torch.cat([-heads[..., SIZE:], heads[..., :SIZE]], -1)
    return (heads * cos + turned * sin).flatten(2)


def llama(tensors: Tensors) -> Tensor:
    n = Names(tensors, "model.")

    def rms(name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], n[f"{name}.weight"], 1e-6)

    x = n["embed_tokens.weight"][WORDS]
    for i in range(2):
        h = rms(f"layers.{i}.input_layernorm", x)
        q, k, v = (n.linear(f"layers.{i}.self_attn.{part}_proj", h) for part in "qkv")
        q, k = (y.unflatten(-1, (-1, 2 * SIZE)) for y in (rotated(q), rotated(k)))
        v = v.unflatten(-1, (k.shape[2], -1))
        k, v = (y.repeat_interleave(q.shape[2] // k.shape[2], 2) for y in (k, v))
        y = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
        x = x + n.linear(f"layers.{i}.self_attn.o_proj", y.transpose(1, 2).flatten(2))
        h = rms(f"layers.{i}.post_attention_layernorm", x)
        gate = F.silu(n.linear(f"layers.{i}.mlp.gate_proj", h))
        h = gate * n.linear(f"layers.{i}.mlp.up_proj", h)
        x = x + n.linear(f"layers.{i}.mlp.down_proj", h)
    return rms("norm", x) @ tensors["lm_head.weight"].T


def vit(tensors: Tensors) -> Tensor:
    n = Names(tensors, "vit.")
    name = "embeddings.patch_embeddings.projection"
    x = F.conv2d(IMAGE, n[f"{name}.weight"], n[f"{name}.bias"], stride=4).flatten(2).mT
    x = torch.cat([n["embeddings.cls_token"].expand(2, -1, -1), x], 1)
    x = x + n["embeddings.position_embeddings"]
    for i in range(2):
        p = f"encoder.layer.{i}."
        h = n.norm(f"{p}layernorm_before", x)
        names = (f"{p}attention.attention.{part}" for part in ("query", "key", "value"))
        h = attention(*(n.linear(part, h) for part in names))
        x = x + n.linear(f"{p}attention.output.dense", h)
        h = F.gelu(n.linear(f"{p}intermediate.dense", n.norm(f"{p}layernorm_after", x)))
        x = x + n.linear(f"{p}output.dense", h)
    return F.linear(
        n.norm("layernorm", x)[:, 0], tensors["classifier.weight"], tensors["classifier.bias"]
    )


def _old_name(key: str) -> str:
    """A tensor of a ViT by the name that it had before version 5 of transformers."""
    for new, old in {
        "layers.": "encoder.layer.",
        "attention.q_proj": "attention.attention.query",
        "attention.k_proj": "attention.attention.key",
        "attention.v_proj": "attention.attention.value",
        "attention.o_proj": "attention.output.dense",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }.items():
        key = key.replace(new, old)
    return key


def timm(tensors: Tensors) -> Tensor:
    n = Names(tensors)
    x = F.conv2d(IMAGE, n["patch_embed.proj.weight"], n["patch_embed.proj.bias"], stride=4)
    x = torch.cat([n["cls_token"].expand(2, -1, -1), x.flatten(2).mT], 1) + n["pos_embed"]
    for i in range(2):
        q, k, v = n.linear(f"blocks.{i}.attn.qkv", n.norm(f"blocks.{i}.norm1", x)).chunk(3, -1)
        x = x + n.linear(f"blocks.{i}.attn.proj", attention(q, k, v))
        h = F.gelu(n.linear(f"blocks.{i}.mlp.fc1", n.norm(f"blocks.{i}.norm2", x)))
        x = x + n.linear(f"blocks.{i}.mlp.fc2", h)
    return n.linear("head", n.norm("norm", x)[:, 0])


def lucid(tensors: Tensors) -> Tensor:
    n = Names(tensors)
    patches = IMAGE.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(2, 4, 48)
    x = n.linear("patch_to_embedding", patches)
    x = torch.cat([n["cls_token"].expand(2, -1, -1), x], 1) + n["pos_embedding"]
    for i in range(2):
        p = f"transformer.layers.{i}."
        q, k, v = n.linear(f"{p}0.fn.fn.to_qkv", n.norm(f"{p}0.fn.norm", x)).chunk(3, -1)
        x = x + n.linear(f"{p}0.fn.fn.to_out", attention(q, k, v))
        h = F.gelu(n.linear(f"{p}1.fn.fn.net.0", n.norm(f"{p}1.fn.norm", x)))
        x = x + n.linear(f"{p}1.fn.fn.net.2", h)
    return n.linear("mlp_head.2", F.gelu(n.linear("mlp_head.0", x[:, 0])))


def encoder(tensors: Tensors) -> Tensor:
    """Torch's own module."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, batch_first=True, norm_first=True)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    module.load_state_dict(tensors)
    found: Tensor = module(IMAGE.view(2, 16, WIDTH))
    return found


def linear(name: str, outputs: int, inputs: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (outputs, inputs)}
    return {**shapes, f"{name}.bias": (outputs,)} if bias else shapes


def norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}


def named(query: str, key: str, value: str, out: str, up: str, down: str) -> Callable[[str], dict]:
    """The shapes of a block whose weights have these names."""

    def shapes(prefix: str) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for name in (query, key, value, out):
            found |= linear(prefix + name, WIDTH, WIDTH)
        return found | linear(prefix + up, INNER, WIDTH) | linear(prefix + down, WIDTH, INNER)

    return shapes


def fused(qkv: str, out: str, up: str, down: str, qkv_bias: bool = True) -> Callable[[str], dict]:
    """The same with one weight for queries, keys and values."""

    def shapes(prefix: str) -> dict[str, tuple[int, ...]]:
        found = linear(prefix + qkv, 3 * WIDTH, WIDTH, qkv_bias)
        found |= linear(prefix + out, WIDTH, WIDTH)
        return found | linear(prefix + up, INNER, WIDTH) | linear(prefix + down, WIDTH, INNER)

    return shapes


def blocks(prefix: str, shapes: Callable[[str], dict], *norms: str) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for i in range(2):
        start = prefix.format(i)
        found |= shapes(start)
        for name in norms:
            found |= norm(start + name)
    return found


def llama_block(prefix: str, keys: int = 12, values: int = 0) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    values = values or keys
    for name, size in (("q", 24), ("k", keys), ("v", values)):
        found |= linear(f"{prefix}self_attn.{name}_proj", size, WIDTH, bias=False)
    found |= linear(f"{prefix}self_attn.o_proj", WIDTH, 24 * values // keys, bias=False)
    for name in ("up", "gate"):
        found |= linear(f"{prefix}mlp.{name}_proj", INNER, WIDTH, bias=False)
    found |= linear(f"{prefix}mlp.down_proj", WIDTH, INNER, bias=False)
    names = ("input_layernorm", "post_attention_layernorm")
    return found | {f"{prefix}{name}.weight": (WIDTH,) for name in names}


BERT = named(
    *(f"attention.self.{n}" for n in ("query", "key", "value")),
    *("attention.output.dense", "intermediate.dense", "output.dense"),
)
VIT = named(
    *(f"attention.attention.{n}" for n in ("query", "key", "value")),
    *("attention.output.dense", "intermediate.dense", "output.dense"),
)
TURNED_GPT2 = blocks(
    "transformer.h.{}.", fused("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    "ln_1", "ln_2",
)  # fmt: skip
GPT2 = {key: shape[::-1] for key, shape in TURNED_GPT2.items()}
GPT2_ENDS = {
    "transformer.wte.weight": (10, WIDTH), "transformer.wpe.weight": (6, WIDTH),
    **norm("transformer.ln_f"), "lm_head.weight": (10, WIDTH),
}  # fmt: skip
NEW_VIT = named(
    *(f"attention.{n}_proj" for n in "qkvo"), *("mlp.fc1", "mlp.fc2"),
)  # fmt: skip
VIT_ENDS = {
    "vit.embeddings.cls_token": (1, 1, WIDTH),
    "vit.embeddings.position_embeddings": (1, 5, WIDTH),
    "vit.embeddings.patch_embeddings.projection.weight": (WIDTH, 3, 4, 4),
    "vit.embeddings.patch_embeddings.projection.bias": (WIDTH,),
    **norm("vit.layernorm"), **linear("classifier", 3, WIDTH),
}  # fmt: skip
BERT_SHAPES = {
    **{f"embeddings.{n}_embeddings.weight": (10, WIDTH) for n in ("word", "position")},
    "embeddings.token_type_embeddings.weight": (2, WIDTH),
    **norm("embeddings.LayerNorm"),
    **blocks("encoder.layer.{}.", BERT, "attention.output.LayerNorm", "output.LayerNorm"),
    **linear("pooler.dense", WIDTH, WIDTH),
}
SEQUENCE = (1, 5, WIDTH)


class Case(NamedTuple):
    """A network, the shapes of its tensors, and how many heads and free types it has."""

    run: Callable[[Tensors], Tensor]
    shapes: dict[str, tuple[int, ...]]
    heads: int
    free: int


CASES = {
    "BERT": Case(
        bert,
        BERT_SHAPES,
        HEADS,
        # The stream is an output. In a block: heads, their dimensions twice, the dense layer.
        2 * 4,
    ),
    **{
        # The pooler leads from the stream to itself, which is right for every output that is read.
        f"BERT, {output}": Case(
            run,
            {f"bert.{k}": shape for k, shape in BERT_SHAPES.items()} | linear(output, 3, WIDTH),
            HEADS,
            1 + 2 * 4,
        )
        for output, run in {"qa_outputs": question_answering, "classifier": classified}.items()
    },
    "GPT-2": Case(
        gpt2,
        GPT2_ENDS | GPT2,
        HEADS,
        1 + 2 * 4,
    ),
    "GPT-2 with weights [out, in]": Case(gpt2, GPT2_ENDS | TURNED_GPT2, HEADS, 1 + 2 * 4),
    "Llama": Case(
        llama,
        {
            "model.embed_tokens.weight": (10, WIDTH),
            **llama_block("model.layers.0."), **llama_block("model.layers.1."),
            "model.norm.weight": (WIDTH,), "lm_head.weight": (10, WIDTH),
        },
        HEADS,
        # In a block: heads of keys, heads of queries, dimensions of values, their pairs with the
        # heads of queries, the dense layer. Dimensions of queries keep their order.
        1 + 2 * 5,
    ),
    "Llama with one head of keys": Case(
        llama,
        {
            "model.embed_tokens.weight": (10, WIDTH),
            **llama_block("model.layers.0.", 6), **llama_block("model.layers.1.", 6),
            "model.norm.weight": (WIDTH,), "lm_head.weight": (10, WIDTH),
        },
        HEADS,
        # In a block: heads of queries, dimensions of values, their pairs, the dense layer.
        1 + 2 * 4,
    ),
    "Llama with smaller values": Case(
        llama,
        {
            "model.embed_tokens.weight": (10, WIDTH),
            **llama_block("model.layers.0.", 12, 6), **llama_block("model.layers.1.", 6, 2),
            "model.norm.weight": (WIDTH,), "lm_head.weight": (10, WIDTH),
        },
        HEADS,
        # The second block has one head of keys.
        1 + 5 + 4,
    ),
    "ViT": Case(
        vit,
        VIT_ENDS | blocks("vit.encoder.layer.{}.", VIT, "layernorm_before", "layernorm_after"),
        HEADS,
        1 + 2 * 4,
    ),
    "ViT of transformers 5": Case(
        lambda tensors: vit({_old_name(key): tensor for key, tensor in tensors.items()}),
        VIT_ENDS | blocks("vit.layers.{}.", NEW_VIT, "layernorm_before", "layernorm_after"),
        HEADS,
        1 + 2 * 4,
    ),
    "ViT of timm": Case(
        timm,
        {
            "cls_token": (1, 1, WIDTH), "pos_embed": SEQUENCE,
            "patch_embed.proj.weight": (WIDTH, 3, 4, 4), "patch_embed.proj.bias": (WIDTH,),
            **blocks("blocks.{}.", fused("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"),
                     "norm1", "norm2"),
            **norm("norm"), **linear("head", 3, WIDTH),
        },
        HEADS,
        1 + 2 * 4,
    ),
    "ViT of vit-pytorch": Case(
        lucid,
        {
            "pos_embedding": SEQUENCE, "cls_token": (1, 1, WIDTH),
            **linear("patch_to_embedding", WIDTH, 48),
            **blocks(
                "transformer.layers.{}.",
                fused("0.fn.fn.to_qkv", "0.fn.fn.to_out", "1.fn.fn.net.0", "1.fn.fn.net.2", False),
                "0.fn.norm", "1.fn.norm",
            ),
            **linear("mlp_head.0", 7, WIDTH), **linear("mlp_head.2", 3, 7),
        },
        HEADS,
        1 + 2 * 4 + 1,
    ),
    "nn.TransformerEncoder": Case(
        encoder,
        {
            key: tuple(tensor.shape)
            for key, tensor in nn.TransformerEncoder(
                nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, batch_first=True), 2,
                enable_nested_tensor=False,
            ).state_dict().items()
        },
        HEADS,
        2 * 4,
    ),
}  # fmt: skip


def tensors_of(name: str) -> Tensors:
    """Random tensors."""
    torch.manual_seed(0)
    shapes = CASES[name].shapes
    return {k: torch.randn(shape, dtype=torch.float64) * 0.5 for k, shape in shapes.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_symmetry_is_that_of_the_network(name: str) -> None:
    case, tensors = CASES[name], tensors_of(name)
    graph = from_state_dict(tensors, heads=case.heads)
    assert sum(not n.fixed for n in graph.spec.neurons) == case.free
    back = to_state_dict(graph)
    assert list(back) == list(tensors)
    assert all(torch.equal(back[key], tensor) for key, tensor in tensors.items())
    expected = case.run(tensors)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        permuted = to_state_dict(symmetry.sample(graph, "hnp", generator).apply(graph))
        error = (case.run(permuted) - expected).abs().max()
        assert error < 1e-9 * expected.abs().max().clamp(min=1)
    moved = sum(not torch.equal(permuted[key], tensor) for key, tensor in tensors.items())
    assert moved >= 10


@pytest.mark.parametrize("name", [n for n in CASES if "one head" not in n and "smaller" not in n])
def test_the_wrong_number_of_heads_is_another_symmetry(name: str) -> None:
    """The number of heads is required, because too few would exchange dimensions across heads."""
    case, tensors = CASES[name], tensors_of(name)
    graph = from_state_dict(tensors, heads=2)
    expected = case.run(tensors)
    permuted = to_state_dict(symmetry.sample(graph, "hnp").apply(graph))
    assert (case.run(permuted) - expected).abs().max() > 1e-6


def test_a_configuration_beside_the_file_says_how_many_heads(tmp_path: Path) -> None:
    tensors = tensors_of("Llama")
    torch.save(tensors, tmp_path / "model.pt")
    with pytest.raises(ConversionError, match=r"model\.pt'.*heads=.*Llama.*config\.json"):
        load(tmp_path / "model.pt")
    config = {"num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    graph = load(tmp_path / "model.pt")
    assert graph.spec == from_state_dict(tensors, heads=4).spec
    save(graph, tmp_path / "again.pt")
    again = torch.load(tmp_path / "again.pt")
    assert all(torch.equal(again[key], tensor) for key, tensor in tensors.items())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 4}))
    with pytest.raises(ConversionError, match=r"Expected 4 heads of 6 dimensions.*k_proj"):
        load(tmp_path / "model.pt")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConversionError, match=r"heads="):
        load(tmp_path / "model.pt")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(tensors_of("GPT-2"), tmp_path / "model.pt")
    assert main(["inspect", str(tmp_path / "model.pt")]) == 2
    assert "--heads" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "model.pt"), "--heads", "4"]) == 0


def test_what_is_missing_and_what_is_left_over_is_listed() -> None:
    tensors = tensors_of("BERT")
    del tensors["encoder.layer.1.output.dense.weight"]
    tensors["encoder.layer.0.adapter.weight"] = torch.randn(3, WIDTH)
    with pytest.raises(ConversionError) as caught:
        from_state_dict(tensors, heads=4)
    message = str(caught.value)
    assert "tensors of BERT" in message
    assert "no 'encoder.layer.1.output.dense'" in message
    assert "'encoder.layer.0.adapter.weight', which it does not have" in message


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConversionError, match=r"5 heads with equal numbers of dimensions"):
        from_state_dict(tensors_of("BERT"), heads=5)
    with pytest.raises(ValueError, match=r"positive number of heads"):
        from_state_dict(tensors_of("BERT"), heads=0)


def test_positions_that_no_table_holds_are_refused() -> None:
    """Slopes of heads and rotations leave no tensors, and fix the order of heads or dimensions."""
    tensors = tensors_of("BERT")
    del tensors["embeddings.position_embeddings.weight"]
    with pytest.raises(ConversionError, match=r"no 'embeddings\.position_embeddings'"):
        from_state_dict(tensors, heads=4)
    tensors = tensors_of("BERT")
    del tensors["embeddings.token_type_embeddings.weight"]
    from_state_dict(tensors, heads=4)


def test_networks_of_other_types_are_refused(tmp_path: Path) -> None:
    torch.save(tensors_of("BERT"), tmp_path / "model.pt")
    config = {"num_attention_heads": 4, "model_type": "bert"}
    for changed, reason in (
        ({}, None),
        ({"position_embedding_type": "absolute", "attn_logit_softcapping": 3.0}, None),
        ({"model_type": "roformer"}, r"'roberta'.*got roformer in config\.json.*arch"),
        ({"position_embedding_type": "rotary"}, r"bert with positions 'rotary'"),
        ({"model_type": ["bert"]}, r"\['bert'\]"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        for heads in (None, 4):
            if reason is None:
                load(tmp_path / "model.pt", heads=heads)
                continue
            with pytest.raises(ConversionError, match=reason):
                load(tmp_path / "model.pt", heads=heads)


def test_blocks_that_share_a_tensor_are_refused() -> None:
    """They could only be permuted together, like an embedding and its unembedding."""
    tensors = tensors_of("GPT-2")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    from_state_dict(tensors, heads=4)
    tensors["transformer.h.1.mlp.c_fc.weight"] = tensors["transformer.h.0.mlp.c_fc.weight"]
    with pytest.raises(ConversionError, match=r"h\.0\.mlp\.c_fc.*h\.1\.mlp\.c_fc.*same memory"):
        from_state_dict(tensors, heads=4)


def test_a_tensor_without_use_is_refused() -> None:
    tensors = tensors_of("GPT-2") | {"transformer.wte.bias": torch.randn(WIDTH)}
    with pytest.raises(ConversionError, match=r"'transformer\.wte\.bias', which it does not use"):
        from_state_dict(tensors, heads=4)


@pytest.mark.parametrize("number", ["99999", "9" * 5000])
def test_a_block_with_a_high_number_is_left_over(number: str) -> None:
    key = f"transformer.h.{number}.attn.c_attn.weight"
    tensors = tensors_of("GPT-2") | {key: torch.randn(WIDTH, 3 * WIDTH)}
    with pytest.raises(ConversionError, match=rf"'transformer\.h\.{number[:9]}.*does not have"):
        from_state_dict(tensors, heads=4)


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama", "ViT", "nn.TransformerEncoder"])
def test_tensors_of_other_shapes_and_types_are_refused(name: str) -> None:
    tensors = tensors_of(name)
    for key in [key for key in tensors if "1." not in key]:
        other = torch.randn(*tensors[key].shape[:-1], tensors[key].shape[-1] + 1)
        # Patches may have any size.
        wrong = [] if "projection.weight" in key else [other, other[..., None]]
        for changed in (*wrong, tensors[key].to(torch.int8)):
            with pytest.raises(ConversionError):
                from_state_dict(tensors | {key: changed}, heads=4)


def test_masks_are_carried() -> None:
    tensors = tensors_of("GPT-2")
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 6, 6).tril()
    graph = from_state_dict(tensors, heads=4)
    assert list(graph.layout.carried) == ["transformer.h.0.attn.bias"]


def test_a_table_of_words_can_be_left_out() -> None:
    tensors = tensors_of("BERT")
    graph = from_state_dict(tensors, heads=4, exclude=["embeddings.*"])
    assert not any(n.name.startswith("input") for n in graph.spec.neurons)
    permuted = to_state_dict(symmetry.sample(graph, "np").apply(graph))
    own = "embeddings.word_embeddings.weight"
    assert not torch.equal(permuted[own], tensors[own])
