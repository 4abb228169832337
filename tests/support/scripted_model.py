"""A checkpoint that writes given texts: its weights map each token to the next token of a text."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CONTEXT = 200_000
START, END = "<|im_start|>", "<|im_end|>"
_TRAINED_TOKENS = 2_000
_PIECE_BYTES = 4
_LOGIT = 50.0
_TEMPLATE = """\
{%- set last = namespace(phrase='', has_reasoning=false) %}
{%- if tools %}{{ START + 'system\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{{- '\\n</tools>' + END + '\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set last.has_reasoning = true if message.reasoning_content else false %}
{%- endif %}
{%- if message.role in ('user', 'tool') %}
{%- if message.role == 'tool' %}{% set last.phrase = '' %}{% endif %}
{%- for phrase in PHRASES %}
{%- if phrase in message.content and (message.role == 'user' or last.has_reasoning) %}
{%- set last.phrase = phrase %}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- START + message.role + '\\n' }}
{%- if message.reasoning_content %}
{{- '<think>' + message.reasoning_content + '</think>' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- END + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ START + 'assistant\\n<|' + last.phrase + '|>' }}{% endif %}
"""


def write_scripted(folder: Path, answers: Mapping[str, str], prose: Iterable[str]) -> Path:
    """Write a float32 checkpoint with a context of CONTEXT tokens into `folder`; returns the
    folder.

    The keys of `answers` are phrases. The model answers with the text of the last phrase in user
    messages and tool results: the chat template ends the prompt with a token for this phrase. The
    answer to a tool result is empty if the result has no phrase, or the call no reasoning. The
    tokenizer is trained on `prose`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    encoder, paths = _tokenizer(answers, prose)
    encoder.save(str(folder / "tokenizer.json"))
    template = _TEMPLATE.replace("START", repr(START)).replace("END", repr(END))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": template.replace("PHRASES", json.dumps(list(answers))),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    _write_weights(folder, encoder.get_vocab_size(), encoder.get_vocab()[END], paths)
    return folder


def _tokenizer(
    answers: Mapping[str, str], prose: Iterable[str]
) -> tuple[Tokenizer, list[list[int]]]:
    """A byte-level tokenizer, and for each answer the tokens of its phrase and of its text. The
    tokens of a text are unique and do not occur in prompts."""
    encoder = Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_TRAINED_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    encoder.train_from_iterator(prose, trainer)
    trained = json.loads(encoder.to_str())["model"]
    vocab: dict[str, int] = trained["vocab"]
    texts: list[list[int]] = []
    for text in answers.values():
        pieces = _pieces(text, vocab)
        texts.append([*range(len(vocab), len(vocab) + len(pieces))])
        vocab.update(zip(pieces, texts[-1], strict=True))
    merges = [tuple(pair) for pair in trained["merges"]]
    encoder.model = models.BPE(vocab=vocab, merges=merges)
    phrases = [f"<|{phrase}|>" for phrase in answers]
    encoder.add_special_tokens([START, END, *phrases])
    ids = encoder.get_vocab()
    return encoder, [[ids[phrase], *text] for phrase, text in zip(phrases, texts, strict=True)]


def _pieces(text: str, vocab: Mapping[str, int]) -> list[str]:
    """Parts of `text` in the alphabet of ByteLevel, all distinct and not in `vocab`."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((written, _),) = split.pre_tokenize_str(text)
    pieces: list[str] = []
    start = 0
    for end in range(_PIECE_BYTES, len(written) + 1):
        piece = written[start:end]
        if len(piece) >= _PIECE_BYTES and piece not in vocab and piece not in pieces:
            pieces.append(piece)
            start = end
    # The rest is short or already a token.
    return [*pieces[:-1], pieces[-1] + written[start:]]


def _write_weights(folder: Path, vocab_size: int, end: int, paths: list[list[int]]) -> None:
    """Write weights: attention and MLP add nothing, each token of a path has its own dimension, and
    the head maps this dimension to the next token."""
    pairs = [pair for path in paths for pair in zip(path, [*path[1:], end], strict=True)]
    hidden = 64 * (len(pairs) // 64 + 1)
    embedding = torch.zeros(vocab_size, hidden)
    head = torch.zeros(vocab_size, hidden)
    # Shared dimension of all prompt tokens.
    embedding[:, 0] = 1
    head[end, 0] = _LOGIT / hidden**0.5
    for dimension, (token, following) in enumerate(pairs, 1):
        embedding[token] = torch.eye(hidden)[dimension]
        head[following, dimension] = _LOGIT / hidden**0.5
    layer, width = "model.layers.0", 16
    save_file(
        {
            "model.embed_tokens.weight": embedding,
            "lm_head.weight": head,
            "model.norm.weight": torch.ones(hidden),
            f"{layer}.input_layernorm.weight": torch.ones(hidden),
            f"{layer}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{layer}.self_attn.q_proj.weight": torch.zeros(width, hidden),
            f"{layer}.self_attn.k_proj.weight": torch.zeros(width, hidden),
            f"{layer}.self_attn.v_proj.weight": torch.zeros(width, hidden),
            f"{layer}.self_attn.o_proj.weight": torch.zeros(hidden, width),
            f"{layer}.mlp.gate_proj.weight": torch.zeros(width, hidden),
            f"{layer}.mlp.up_proj.weight": torch.zeros(width, hidden),
            f"{layer}.mlp.down_proj.weight": torch.zeros(hidden, width),
        },
        folder / "model.safetensors",
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": width,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "eos_token_id": end,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
