"""The table of transformer families that are recognised by name. To add one, add a row."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Family:
    """The names of the tensors of a transformer, without `.weight` and `.bias`.

    Every block adds attention and dense layers to one residual stream. Whether norms come before or
    after them does not affect the symmetry, so it is not specified. Several names are separated by
    spaces.

    Args:
        name: The name of the family.
        block: The name of block `{}`.
        norms: Norms of the stream in a block.
        attention: The weights of queries, keys, values and the output of attention in a block; or
            two names, if one tensor holds queries, keys and values one after another.
        dense: The first and the second dense layer of a block; between them, the layer whose output
            multiplies that of the first, if the family has one.
        tables: Tables of rows that are added to the stream: words, positions, types of words.
        optional: Tables that a file may lack. Positions are not optional: without a table, they
            come from somewhere else and may fix the order of heads.
        added: Tensors that are added to the stream directly: positions `[1, tokens, width]`.
        token: A tensor that comes first in the sequence.
        patches: The convolution or linear layer that computes the stream from an input.
        final: Norms of the stream outside of blocks.
        pooler: A dense layer whose results the network returns beside the stream.
        outputs: Consecutive layers that read the pooler or the stream. If a file has them, the
            network returns only their results; otherwise the stream is an output and keeps its
            order. Names that never have the prefix start with `^`.
        in_out: Whether weights are stored as `[in, out]`.
        rotary: Whether positions rotate queries and keys, whose dimensions then keep their order.
        prefixes: The prefixes that all names may have.
        masks: Suffixes of the names of constant tensors, such as masks.
        models: The types in `config.json` of networks that have these names and compute nothing
            else; any type if empty.
    """

    name: str
    block: str
    norms: str
    attention: str
    dense: str
    tables: str = ""
    optional: str = ""
    added: str = ""
    token: str = ""
    patches: str = ""
    final: str = ""
    pooler: str = ""
    outputs: tuple[str, ...] = ()
    in_out: bool = False
    rotary: bool = False
    prefixes: tuple[str, ...] = ("",)
    masks: tuple[str, ...] = ()
    models: str = ""

    @property
    def is_fused(self) -> bool:
        """Whether one tensor holds queries, keys and values."""
        return len(self.attention.split()) == 2

    @property
    def query(self) -> str:
        """The weight of queries, or of queries, keys and values if `is_fused`."""
        return self.attention.split()[0]


_BERT_DENSE = "intermediate.dense output.dense"
_TIMM_DENSE = "mlp.fc1 mlp.fc2"
_VIT = Family(
    "ViT",
    block="encoder.layer.{}",
    norms="layernorm_before layernorm_after",
    attention="attention.attention.query attention.attention.key attention.attention.value "
    "attention.output.dense",
    dense=_BERT_DENSE,
    added="embeddings.position_embeddings",
    token="embeddings.cls_token",
    patches="embeddings.patch_embeddings.projection",
    final="layernorm",
    pooler="pooler.dense",
    outputs=("^classifier",),
    prefixes=("", "vit."),
    models="vit vit_msn dpt",
)
_GPT_2 = Family(
    "GPT-2",
    block="h.{}",
    norms="ln_1 ln_2",
    attention="attn.c_attn attn.c_proj",
    dense="mlp.c_fc mlp.c_proj",
    tables="wte wpe",
    final="ln_f",
    outputs=("^lm_head",),
    in_out=True,
    prefixes=("", "transformer."),
    masks=("attn.bias", "attn.masked_bias"),
    models="gpt2 imagegpt",
)
FAMILIES = (
    Family(
        "BERT",
        block="encoder.layer.{}",
        norms="attention.output.LayerNorm output.LayerNorm",
        attention="attention.self.query attention.self.key attention.self.value "
        "attention.output.dense",
        dense=_BERT_DENSE,
        tables="embeddings.word_embeddings embeddings.position_embeddings "
        "embeddings.token_type_embeddings",
        optional="embeddings.token_type_embeddings",
        final="embeddings.LayerNorm",
        pooler="pooler.dense",
        outputs=("^classifier", "^qa_outputs"),
        prefixes=("", "bert.", "roberta.", "0.auto_model."),
        models="bert roberta xlm-roberta camembert electra ernie splinter bert-generation "
        "data2vec-text",
    ),
    _GPT_2,
    replace(_GPT_2, name="GPT-2 with weights [out, in]", in_out=False),
    Family(
        "Llama",
        block="layers.{}",
        norms="input_layernorm post_attention_layernorm",
        attention="self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj",
        dense="mlp.up_proj mlp.gate_proj mlp.down_proj",
        tables="embed_tokens",
        final="norm",
        outputs=("^lm_head",),
        rotary=True,
        prefixes=("", "model."),
        masks=("rotary_emb.inv_freq",),
        models="llama mistral ministral ministral3 qwen2 gemma stablelm granite seed_oss ernie4_5 "
        "cwm",
    ),
    _VIT,
    replace(
        _VIT,
        name="ViT of transformers 5",
        block="layers.{}",
        attention="attention.q_proj attention.k_proj attention.v_proj attention.o_proj",
        dense=_TIMM_DENSE,
    ),
    Family(
        "ViT of timm",
        block="blocks.{}",
        norms="norm1 norm2",
        attention="attn.qkv attn.proj",
        dense=_TIMM_DENSE,
        added="pos_embed",
        token="cls_token",
        patches="patch_embed.proj",
        final="norm",
        outputs=("head",),
    ),
    Family(
        "ViT of vit-pytorch",
        block="transformer.layers.{}",
        norms="0.fn.norm 1.fn.norm",
        attention="0.fn.fn.to_qkv 0.fn.fn.to_out",
        dense="1.fn.fn.net.0 1.fn.fn.net.2",
        added="pos_embedding",
        token="cls_token",
        patches="patch_to_embedding",
        outputs=("mlp_head.0 mlp_head.2",),
    ),
    Family(
        "nn.TransformerEncoder",
        block="layers.{}",
        norms="norm1 norm2",
        attention="self_attn.in_proj self_attn.out_proj",
        dense="linear1 linear2",
        final="norm",
    ),
)
