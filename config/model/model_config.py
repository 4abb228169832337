"""ModelConfig: the configuration of a checkpoint."""

from dataclasses import dataclass, field
from pathlib import Path

from config.errors import ConfigError
from config.model.encoder import EncoderConfig
from config.model.json_fields import Fields
from config.model.moe import MoEConfig
from config.model.multimodal.vision import CrossFacts, VisionFacts
from config.model.quantization.base import QuantizationConfig

AUTO, NATIVE, TRANSFORMERS = MODEL_IMPLS = ("auto", "native", "transformers")
"""Values of EngineConfig.model_impl."""
MAX_NEW_TOKENS = "max_new_tokens"
"""Field of a generation config: limit on the output of every request."""
DEFAULT_MAX_TOKENS = "max_tokens"
"""Field of a generation config: output limit for requests that set no limit."""
GENERATION_LIMITS = (MAX_NEW_TOKENS, DEFAULT_MAX_TOKENS)
GENERATION_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *GENERATION_LIMITS,
)
DTYPES = ("bfloat16", "float16", "float32")
BLOCKS = "blocks.gguf.safetensors"
"""File with the quantized blocks of a converted GGUF file, next to the weights."""

MAX_LAYERS = 10_000
MAX_MTP_LAYERS = 64
MAX_POSITION = 2**24
"""Maximum of positions and windows. The longest published context is 10,485,760 tokens."""
MAX_WIDTH = 2**20
MAX_VOCAB = 2**24
MAX_TOKEN_ID = 2**32 - 1
MAX_TOP_K = 2**31 - 1
DEFAULT_THETA = 10000.0
MAX_THETA = 1e30
"""Maximum rope theta, well within float32, the dtype of the frequency computation."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The scaling fields of a checkpoint's rope_scaling or rope_parameters."""

    kind: str
    """rope_type, other than default. Built-in models support ROPE_TYPES of
    config/checkpoint/operations.py."""
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
class RopeConfig:
    """Rotary position embedding."""

    theta: float = DEFAULT_THETA
    scaling: RopeScaling | None = None
    partial: float = 1.0
    """Fraction of each head that is rotated."""
    sections: tuple[int, ...] = ()
    """Number of frequencies for each of the three position axes (M-RoPE), in frequency order;
    empty: positions have a single axis."""
    interleaves_sections: bool = False
    """Whether the frequencies of the three axes are interleaved: height has frequencies 1, 4, 7,
    ... and width 2, 5, 8, ..., each as many as its section, and time has all others."""

    def rotated_size(self, head_dim: int) -> int:
        """Number of leading elements of each head that are rotated."""
        return int(head_dim * self.partial)


LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""Layer types in config.json's spelling."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Configuration of a checkpoint. Fields that only some families have default to neutral values
    (no window, multiplier 1)."""

    path: str
    """Local folder of the checkpoint, or the path or hub id of a model whose weights are not
    loaded."""
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
    rope: RopeConfig = RopeConfig()
    local_rope: RopeConfig | None = None
    """Rope of sliding-window and chunked layers, if it differs from `rope`."""
    rope_layers: tuple[bool, ...] = ()
    """Whether each layer uses rope; empty: all layers do."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Whether q, k and v have biases."""
    attention_out_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    """Chunk size in tokens for layers with chunked attention, whose queries attend only to their
    own chunk."""
    layer_types: tuple[str, ...] = ()
    """Type of each layer, from LAYER_TYPES; empty: all layers use `sliding_window`, if it is
    set."""
    clip_qkv: float | None = None
    """Queries, keys and values are clamped to -clip_qkv and clip_qkv."""
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    """Scale of attention scores instead of 1/sqrt(head_dim)."""
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    """Divisor of the logits."""
    moe: MoEConfig | None = None
    """Set for mixtures of experts."""
    use_qk_norm: bool = False
    """Whether query and key heads are normalized, for families whose checkpoints differ."""
    num_mtp_layers: int = 0
    """Number of MTP layers that the files may contain after the last decoder layer. They are not
    loaded with the model."""
    is_causal: bool = True
    """Whether attention is causal."""
    quantization: QuantizationConfig | None = None
    """Quantization of the checkpoint's weights, or for estimates the quantization while loading
    (`facts_at_load`). None also for a method that the model's family handles itself, and for an
    unsupported method that `read_model_config` allowed."""
    encoder: EncoderConfig | None = None
    """Set for encoders of the BERT family."""
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    num_parameters: int | None = None
    """Number of parameters; None: not counted."""
    num_tower_parameters: int = 0
    """Number of elements of the vision tower, which is replicated on every card; without files,
    computed from the tower's code."""
    cached_numbers: int | None = None
    """Number of key and value elements cached per token over all layers, if they were counted:
    layers of a model that is not built in may share keys and values, or have several head sizes."""
    is_text_part: bool = False
    """Whether this is the text model of a multimodal checkpoint."""
    vision: VisionFacts | None = None
    """Set if the model supports images."""
    fields: Fields = field(default_factory=lambda: Fields({}, Path()), hash=False, repr=False)
    """Fields of config.json, also under their common names."""
    generation_defaults: dict[str, float] = field(default_factory=dict, hash=False)
    """GENERATION_FIELDS of generation_config.json, if present."""

    @property
    def cross_attention(self) -> CrossFacts | None:
        """Set if the model reads images with cross-attention layers."""
        return None if self.vision is None else self.vision.cross

    @property
    def is_encoder(self) -> bool:
        """Whether the model is an encoder of the BERT family."""
        return self.encoder is not None

    @property
    def other_quantization(self) -> str:
        """Method of quantized weights without `quantization`: the model's family reads the weights
        itself, or the method is not supported. Empty: no such weights."""
        own = self.fields.get("quantization_config", dict, {})
        return str(own["quant_method"]) if "quant_method" in own and not self.quantization else ""

    @property
    def is_quantized(self) -> bool:
        """Whether the weights are quantized, in the checkpoint or while loading (see
        `quantization`)."""
        return self.quantization is not None or bool(self.fields.raw.get("quantization_config"))

    def kv_heads_per_rank(self, num_ranks: int) -> int:
        """KV heads on each of `num_ranks` tensor-parallel ranks. Heads are replicated if there are
        fewer heads than ranks."""
        return max(1, self.num_kv_heads // num_ranks)


def check_limits(model_config: ModelConfig) -> None:
    """Raise ConfigError for sizes above the limits."""
    moe = model_config.moe
    for name, value, maximum in (
        ("layers", model_config.num_layers, MAX_LAYERS),
        ("tokens in its vocabulary", model_config.vocab_size, MAX_VOCAB),
        ("hidden features", model_config.hidden_size, MAX_WIDTH),
        ("inner features", model_config.intermediate_size, MAX_WIDTH),
        ("inner features in an expert", 0 if moe is None else moe.inner_size, MAX_WIDTH),
        ("inner features in the shared expert", 0 if moe is None else moe.shared_size, MAX_WIDTH),
        ("features in its query heads", model_config.num_heads * model_config.head_dim, MAX_WIDTH),
    ):
        if value > maximum:
            raise ConfigError(
                f"{model_config.path} has {value} {name}, at most {maximum} are supported"
            )
