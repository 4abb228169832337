"""ModelConfig: what a checkpoint says of itself. Reads config.json once; knows no tensors."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched: the fields of a checkpoint's rope_scaling, typed."""

    kind: str
    """default, linear, dynamic, llama3, yarn or longrope."""
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One checkpoint's facts, told apart by `architecture`.

    Fields only some families have keep neutral defaults (no window, multiplier 1).
    """

    path: str
    """Local folder with config.json, safetensors and tokenizer files (a GGUF file was converted)."""
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 1.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Biases on q, k, v."""
    attention_out_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None
    window_layers: tuple[bool, ...] = ()
    """One entry a layer: whether it looks only `sliding_window` back; empty: all do, if set."""
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    """Replaces 1/sqrt(head_dim)."""
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    """Logits are divided by it."""
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    generation_defaults: dict[str, float] = field(default_factory=dict)
    """temperature, top_p, top_k, min_p, repetition_penalty of generation_config.json, if there."""
