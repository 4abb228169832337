"""The settings of vLLM for Gaudi that shape its buckets. Data only."""

from collections.abc import Mapping

from config.loading.vendor_table import NOT_NEEDED, Knob

_MEANINGS: Mapping[str, str] = {
    "MIN": "least {}",
    "STEP": "step between {}",
    "MAX": "most {}",
    "PAD_MAX": "padding-aware: most padding of {}",
    "PAD_PERCENT": "padding-aware: most padding in percent of {}",
}
_QUERY = ("block", "block", "budget", "ceil(budget / 4)", "25")
_DIMENSIONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "PROMPT_BS": ("prompts in a prefill", ("1", "1", "max_prefill_bs", "ceil(max / 4)", "25")),
    "PROMPT_QUERY": ("new tokens of a prompt", _QUERY),
    "PROMPT_SEQ": ("new tokens of a prompt (older name)", _QUERY),
    "PROMPT_CTX": (
        "cached blocks of a prompt",
        ("0", "1", "(max_len - query_min) // block", "ceil(budget / block)", "25"),
    ),
    "DECODE_BS": ("sequences in a decode", ("1", "32", "max_num_seqs", "ceil(max / 4)", "25")),
    "DECODE_BLOCK": (
        "blocks in a decode",
        ("1", "block", "max(max_len * max_num_seqs // block, block)", "ceil(max / 4)", "25"),
    ),
}

BUCKET_KNOBS: tuple[Knob, ...] = (
    Knob("VLLM_BUCKETING_STRATEGY", "exp", "how buckets are chosen: exp, lin, pad"),
    Knob(
        "VLLM_EXPONENTIAL_BUCKETING",
        "unset (deprecated)",
        "true: exp, false: lin; wins over the strategy",
    ),
    Knob("VLLM_BUCKETING_FROM_FILE", "unset", "file with the buckets"),
    Knob(
        "VLLM_ENABLE_BUCKETING",
        "true",
        "pad to buckets at all",
        NOT_NEEDED,
        "`--bucketing-strategy exact` pads nothing",
    ),
    *(
        Knob(f"VLLM_{dimension}_BUCKET_{end}", default, _MEANINGS[end].format(what))
        for dimension, (what, defaults) in _DIMENSIONS.items()
        for end, default in zip(_MEANINGS, defaults, strict=True)
    ),
    # Read for blocks, 4096 tokens of each would become 4096 blocks of all.
    Knob(
        "VLLM_DECODE_SEQ_BUCKET_*",
        "unset (its oldest releases only)",
        "tokens of the longest sequence in a decode",
        NOT_NEEDED,
        "a decode's bucket counts the blocks of all its sequences: `VLLM_DECODE_BLOCK_BUCKET_*`",
    ),
)
