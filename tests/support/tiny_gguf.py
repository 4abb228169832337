"""Small GGUF files with random weights."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants

from config.checkpoint.gguf_tokenizer import byte_alphabet

Weights = dict[str, npt.NDArray[Any]]

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 288, 64, 4, 2, 16, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ċ Ċ"]


def family_weights(architecture: str, layers: int = 2, tied: bool = True) -> Weights:
    """Tensors by GGUF name, with the shapes of Hugging Face."""
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    query, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(layers):
        own: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "ffn_norm.weight": (HIDDEN,),
            "attn_output.weight": (HIDDEN, query),
            "ffn_down.weight": (HIDDEN, MLP),
        }
        if architecture == "phi3":
            own |= {"attn_qkv.weight": (query + 2 * kv, HIDDEN), "ffn_up.weight": (2 * MLP, HIDDEN)}
        else:
            own |= {"ffn_up.weight": (MLP, HIDDEN), "ffn_gate.weight": (MLP, HIDDEN)}
            own |= {"attn_q.weight": (query, HIDDEN)}
            own |= dict.fromkeys(("attn_k.weight", "attn_v.weight"), (kv, HIDDEN))
        if architecture == "qwen2":
            own |= {"attn_q.bias": (query,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if architecture == "qwen3":
            own |= dict.fromkeys(("attn_q_norm.weight", "attn_k_norm.weight"), (HEAD_DIM,))
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    return {name: random.standard_normal(s, dtype=np.float32) for name, s in shapes.items()}


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    weights: Weights | None = None,
    quantized: dict[str, GGMLQuantizationType] | None = None,
    raw: Mapping[str, GGMLQuantizationType] = MappingProxyType({}),
    settings: dict[str, Any] | None = None,
    tokenizer: str | None = "gpt2",
    pre: str = "smollm",
) -> Path:
    """Write a GGUF file; `settings`: further metadata of the model (names without the family).
    Weights named in `raw` are stored as blocks of these types."""
    weights = family_weights(architecture) if weights is None else weights
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1 + max(int(n.split(".")[1]) for n in weights if n.startswith("blk.")))
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    for name, value in (settings or {}).items():
        add: dict[type, Callable[[str, Any], None]] = {
            str: writer.add_string,
            bool: writer.add_bool,
            list: writer.add_array,
            int: writer.add_uint32,
            float: writer.add_float32,
        }
        add[type(value)](f"{architecture}.{name}", value)
    if tokenizer == "gpt2":
        _add_byte_level(writer, pre)
    elif tokenizer == "llama":
        _add_sentencepiece(writer)
    elif tokenizer == "bert":
        _add_wordpiece(writer)
    for name, values in weights.items():
        kind = (quantized or {}).get(name)
        if name in raw:
            writer.add_tensor(name, values, raw_dtype=raw[name])
        elif kind is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_byte_level(writer: GGUFWriter, pre: str) -> None:
    pieces = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*SPECIAL, *sorted(byte_alphabet()), *pieces]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    plain = len(tokens) - len(SPECIAL)
    writer.add_token_types([TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * plain)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def _add_sentencepiece(writer: GGUFWriter) -> None:
    pieces = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "▁▁"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    kinds += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(pieces)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(number) for number in range(len(pieces))])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


WORDS = ["hello", "world", "##s", "##ing", "a", "##b", "é", ",", "日"]
"""The vocabulary of BERT after its special tokens."""
BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def _add_wordpiece(writer: GGUFWriter) -> None:
    words = [word[2:] if word.startswith("##") else f"▁{word}" for word in WORDS]
    writer.add_tokenizer_model("bert")
    writer.add_token_list([*BERT_SPECIAL, *words])
    kinds = [TokenType.CONTROL] * len(BERT_SPECIAL) + [TokenType.NORMAL] * len(words)
    writer.add_token_types(kinds)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    writer.add_mask_token_id(4)
