"""The families of transformers that are known by name. To add one, add a row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """The names of the tensors of a transformer, without `.weight` and `.bias`.

    Every block adds attention and dense layers to one residual stream. Whether norms come before
    or after changes nothing about what may be permuted, so it is not said.

    Args:
        name: What the family is called.
        block: The name of block `{}`.
        norms: Norms of the stream in a block.
        query: The weight of queries in a block; with `fused`, that of queries, keys and values.
        key: The weight of keys.
        value: The weight of values.
        out: The weight after attention.
        up: The first dense layer of a block.
        gate: The dense layer that `up` is multiplied with, if the family has one.
        down: The second dense layer.
        tables: Rows that are added to the stream: words, types of words, positions.
        added: Tensors that are added to the stream as they are: positions `[1, tokens, width]`.
        token: A tensor that stands before all others in the sequence.
        patches: The convolution or linear layer that makes the stream out of an input.
        final: Norms of the stream outside of blocks.
        pooler: A dense layer whose results the network returns beside the stream.
        outputs: Layers, one after another, that read the pooler or the stream. If a file has them,
            the network returns their results alone; otherwise the stream is an output and keeps
            its order. A `^` stands before names that never have the prefix.
        fused: Whether one tensor holds queries, keys and values, one after another.
        in_out: Whether weights are stored as `[in, out]`.
        rotary: Whether positions rotate queries and keys, whose dimensions then keep their order.
        prefixes: What all names may begin with.
        masks: Words in the names of tensors that are constants, such as masks.
    """

    name: str
    block: str
    norms: tuple[str, ...]
    query: str
    out: str
    up: str
    down: str
    key: str = ""
    value: str = ""
    gate: str = ""
    tables: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    token: str = ""
    patches: str = ""
    final: tuple[str, ...] = ()
    pooler: str = ""
    outputs: tuple[tuple[str, ...], ...] = ()
    fused: bool = False
    in_out: bool = False
    rotary: bool = False
    prefixes: tuple[str, ...] = ("",)
    masks: tuple[str, ...] = ()


FAMILIES = (
    Family(
        "BERT",
        block="encoder.layer.{}",
        norms=("attention.output.LayerNorm", "output.LayerNorm"),
        query="attention.self.query",
        key="attention.self.key",
        value="attention.self.value",
        out="attention.output.dense",
        up="intermediate.dense",
        down="output.dense",
        tables=(
            "embeddings.word_embeddings",
            "embeddings.position_embeddings",
            "embeddings.token_type_embeddings",
        ),
        final=("embeddings.LayerNorm",),
        pooler="pooler.dense",
        outputs=(("^classifier",), ("^qa_outputs",)),
        prefixes=("", "bert.", "roberta.", "0.auto_model."),
    ),
    Family(
        "GPT-2",
        block="h.{}",
        norms=("ln_1", "ln_2"),
        query="attn.c_attn",
        out="attn.c_proj",
        up="mlp.c_fc",
        down="mlp.c_proj",
        tables=("wte", "wpe"),
        final=("ln_f",),
        outputs=(("^lm_head",),),
        fused=True,
        in_out=True,
        prefixes=("", "transformer."),
        masks=("attn.bias", "attn.masked_bias"),
    ),
    Family(
        "Llama",
        block="layers.{}",
        norms=("input_layernorm", "post_attention_layernorm"),
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        out="self_attn.o_proj",
        up="mlp.up_proj",
        gate="mlp.gate_proj",
        down="mlp.down_proj",
        tables=("embed_tokens",),
        final=("norm",),
        outputs=(("^lm_head",),),
        rotary=True,
        prefixes=("", "model."),
        masks=("rotary_emb.inv_freq",),
    ),
    Family(
        "ViT",
        block="encoder.layer.{}",
        norms=("layernorm_before", "layernorm_after"),
        query="attention.attention.query",
        key="attention.attention.key",
        value="attention.attention.value",
        out="attention.output.dense",
        up="intermediate.dense",
        down="output.dense",
        added=("embeddings.position_embeddings",),
        token="embeddings.cls_token",
        patches="embeddings.patch_embeddings.projection",
        final=("layernorm",),
        pooler="pooler.dense",
        outputs=(("^classifier",),),
        prefixes=("", "vit."),
    ),
    Family(
        "ViT of timm",
        block="blocks.{}",
        norms=("norm1", "norm2"),
        query="attn.qkv",
        out="attn.proj",
        up="mlp.fc1",
        down="mlp.fc2",
        added=("pos_embed",),
        token="cls_token",
        patches="patch_embed.proj",
        final=("norm",),
        outputs=(("head",),),
        fused=True,
    ),
    Family(
        "ViT of vit-pytorch",
        block="transformer.layers.{}",
        norms=("0.fn.norm", "1.fn.norm"),
        query="0.fn.fn.to_qkv",
        out="0.fn.fn.to_out",
        up="1.fn.fn.net.0",
        down="1.fn.fn.net.2",
        added=("pos_embedding",),
        token="cls_token",
        patches="patch_to_embedding",
        outputs=(("mlp_head.0", "mlp_head.2"),),
        fused=True,
    ),
    Family(
        "nn.TransformerEncoder",
        block="layers.{}",
        norms=("norm1", "norm2"),
        query="self_attn.in_proj",
        out="self_attn.out_proj",
        up="linear1",
        down="linear2",
        final=("norm",),
        fused=True,
    ),
)
