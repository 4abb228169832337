"""ServerConfig: how the HTTP side behaves. Facts only."""

import ipaddress
from dataclasses import dataclass

from config.errors import ConfigError

_AT_LEAST_ONE = (
    "api_server_count",
    "h11_max_header_count",
    "max_body_bytes",
    "max_queued_requests",
    "max_queued_prompt_tokens",
    "max_stop_strings",
    "responses_store_max_bytes",
    "stream_interval",
    "tokenizer_threads",
)

MIN_HEADER_BYTES = 1024
"""What an ordinary client's URL and headers need."""

TOOL_CALL_PARSERS = (
    *("auto", "none", "hermes", "qwen25", "llama3_json", "llama4_json", "pythonic"),
    *("llama4_pythonic", "mistral", "granite", "granite-20b-fc", "granite4", "deepseek_v3"),
    *("deepseek_v31", "deepseek_v32", "deepseek_v4", "qwen3_coder", "qwen3_xml", "mimo", "glm45"),
    *("glm47", "kimi_k2", "minimax_m2", "seed_oss", "jamba", "hunyuan_a13b", "internlm"),
    *("phi4_mini_json", "xlam", "lfm2", "hunyuan", "step3", "functiongemma", "gemma4", "openai"),
)
REASONING_PARSERS = (
    *("auto", "none", "deepseek_r1", "deepseek_v3", "qwen3", "glm45", "granite", "mistral"),
    *("hunyuan_a13b", "seed_oss", "kimi_k2", "minimax_m2", "step3", "gemma4", "openai_gptoss"),
)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Address, keys, limits and text handling of a front-end."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    cache_salt_per_key: bool = False
    """Whether prompts share cached blocks only with prompts of the same API key."""
    allowed_origins: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    """Names clients may ask for; empty: the model's own name."""
    api_server_count: int = 1
    max_body_bytes: int = 64 * 2**20
    h11_max_incomplete_event_size: int = 64 * 2**10
    """Bytes of a request's URL and headers."""
    h11_max_header_count: int = 100
    request_header_timeout_s: float = 10.0
    request_body_timeout_s: float = 30.0
    forwarded_allow_ips: str = "127.0.0.1"
    """Proxies whose X-Forwarded-For and X-Forwarded-Proto are believed, comma-separated."""
    max_queued_requests: int = 1024
    max_queued_prompt_tokens: int = 4_000_000
    shutdown_timeout_s: float = 30.0
    stream_interval: int = 1
    """Tokens gathered before a chunk is sent."""
    keep_alive_s: float = 0.0
    """Seconds between comments that keep a stream alive through proxies; 0: never."""
    responses_store_max_count: int = 10_000
    """Responses that are kept, for each front-end; 0: none."""
    responses_store_max_bytes: int = 256 * 2**20
    """Bytes of what is kept, for each front-end."""
    responses_store_max_age_s: float = 86_400.0
    chat_template: str | None = None
    """A file, or the template itself; None: the model's own."""
    trust_request_chat_template: bool = False
    special_tokens_as_text: bool = False
    """Take the text of a control token in a message for plain text; a prompt is taken as it is."""
    generation_config: str = "auto"
    """auto: the model's generation_config gives sampling defaults; vllm: neutral ones."""
    max_stop_strings: int = 4
    """Of one request; every token's text is searched for all of them."""
    enable_log_requests: bool = False
    """Log prompts too; the one line a request is always logged."""
    disable_access_log: bool = False
    enable_docs: bool = True
    enable_page: bool = True
    """The page at /, with figures and a box to chat."""
    enable_dev_endpoints: bool = False
    """Routes for developers (profiles, settings, sleep); they are never open without a key."""
    tool_call_parser: str = "auto"
    """How calls are written; auto: as the chat template says."""
    enable_auto_tool_choice: bool = True
    """Whether the model may choose to call a function."""
    reasoning_parser: str = "auto"
    """How thinking is marked; auto: as the chat template says."""
    skip_tokenizer_init: bool = False
    tokenizer_threads: int = 2
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}, it must be between 0 and 65535")
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")
        for name in (
            *("shutdown_timeout_s", "keep_alive_s"),
            *("responses_store_max_count", "responses_store_max_age_s"),
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 0")
        if self.h11_max_incomplete_event_size < MIN_HEADER_BYTES:
            raise ConfigError(
                f"h11_max_incomplete_event_size is {self.h11_max_incomplete_event_size}, it must "
                f"be at least {MIN_HEADER_BYTES}"
            )
        for name in ("request_header_timeout_s", "request_body_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be above 0")
        _check_addresses(self.forwarded_allow_ips)
        if self.enable_dev_endpoints and not self.api_keys:
            raise ConfigError("enable_dev_endpoints is on and api_keys holds 0 keys, it needs 1")
        if self.cache_salt_per_key and not self.api_keys:
            raise ConfigError("cache_salt_per_key is on and api_keys holds 0 keys, it needs 1")
        for name, known in (
            ("tool_call_parser", TOOL_CALL_PARSERS),
            ("reasoning_parser", REASONING_PARSERS),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, it must be one of {', '.join(known)}"
                )
        if self.generation_config not in ("auto", "vllm"):
            raise ConfigError(
                f"generation_config is {self.generation_config!r}, it must be auto or vllm"
            )


def _check_addresses(words: str) -> None:
    for word in words.split(","):
        word = word.strip()
        if word in ("", "*"):
            continue
        try:
            ipaddress.ip_network(word, strict=False)
        except ValueError:
            raise ConfigError(
                f"forwarded_allow_ips holds {word!r}, it must be addresses or networks "
                "(10.0.0.0/8) with commas between them, or *"
            ) from None
