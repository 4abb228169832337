"""ServerConfig: settings of the supervisor and the API servers."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from config.errors import ConfigError, UserError
from config.json_text import json_setting_problem, parse_json
from config.log import FORMATS, TEXT, LogConfig
from config.model.model_config import GENERATION_FIELDS, GENERATION_LIMITS
from config.params.sampling import MAX_LOGPROBS, SamplingParams
from config.setting import check_settings, setting

MAX_IMAGES = 64
"""Default maximum number of images in a prompt."""
MAX_VIDEOS = 8
MAX_FRAMES = 768
"""Maximum number of frames of a video."""
RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
"""Chat template variables that are set by fields of the request, so chat_template_kwargs may not
set them."""
TOOL_TEMPLATES = ("auto", "none")
AUTO_OR_NONE = ("auto", "none")
"""Values of a parser flag besides the parser names, which server/parsers/ defines."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of the supervisor and the API servers."""

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0: every interface")
    port: int = setting(8000, "Port to listen on; 0: a free port", minimum=0, maximum=65535)
    uds: str | None = setting(
        None, "Unix socket to listen on, instead of --host and --port", metavar="FILE"
    )
    root_path: str = setting(
        "",
        "Path prefix that a proxy adds and does not remove, such as /gaudi",
        name="root-path",
    )
    ssl_certfile: str = setting(
        "",
        "Certificate chain in PEM; only HTTPS is served",
        metavar="FILE",
        group="TLS",
    )
    ssl_keyfile: str = setting(
        "",
        "Private key of --ssl-certfile in PEM",
        metavar="FILE",
        group="TLS",
    )
    ssl_keyfile_password: str = setting(
        "", "Password of --ssl-keyfile, if it is encrypted", group="TLS", is_secret=True
    )
    ssl_ca_certs: str = setting(
        "",
        "Issuers of client certificates in PEM, which clients then need",
        metavar="FILE",
        group="TLS",
    )
    api_server_count: int = setting(1, "API-server processes that share the port", minimum=1)
    api_keys: tuple[str, ...] = setting(
        (),
        "Key that clients must send; repeatable",
        name="api-key",
        aliases=("api-keys",),
        variables=("VLLM_API_KEY",),
        is_secret=True,
    )
    api_key_file: str = setting(
        "",
        "File of API keys, one per line; # begins a comment",
        metavar="FILE",
    )
    cache_salt_per_key: bool = setting(
        False,
        "Share cached prefixes only within an API key; needs --api-key",
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "Web origin whose pages may call the server (CORS); repeatable, or a JSON list"
    )
    max_body_bytes: int = setting(64 * 2**20, "Maximum bytes of a request body", minimum=1)
    h11_max_incomplete_event_size: int = setting(
        64 * 2**10,
        "Maximum bytes of URL and headers, then 414 or 431",
        minimum=1024,  # enough for the URL and headers of ordinary clients
    )
    h11_max_header_count: int = setting(100, "Maximum headers of a request, then 431", minimum=1)
    request_header_timeout_s: float = setting(
        10.0,
        "Seconds for the headers of a request",
        name="request-header-timeout",
    )
    request_body_timeout_s: float = setting(
        30.0,
        "Seconds without a byte of the body, or behind a rate of 1 KiB per second, until 408",
        name="request-body-timeout",
    )
    forwarded_allow_ips: str = setting(
        "127.0.0.1",
        "Proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted: addresses and "
        "networks, with commas; *: all",
        variables=("FORWARDED_ALLOW_IPS",),
    )
    max_queued_requests: int = setting(
        1024,
        "Maximum waiting requests per API server, then 503",
        minimum=1,
    )
    max_queued_prompt_tokens: int = setting(
        4_000_000,
        "Maximum waiting prompt tokens per API server, then 503",
        minimum=1,
    )
    shutdown_timeout_s: float = setting(
        30.0,
        "Seconds for running requests after SIGTERM",
        name="shutdown-timeout",
        minimum=0,
    )
    resume: bool = setting(
        True,
        "Restart an engine that dies, and continue its requests; off: the server stops "
        "with its last engine",
    )
    max_engine_restarts: int = setting(
        5,
        "Maximum consecutive restarts of an engine that dies within a minute of being ready",
        minimum=0,
    )
    engine_restart_wait_s: float = setting(
        30.0,
        "Maximum seconds before a restart of an engine: 0.5 before the second, then doubled",
        name="engine-restart-wait",
        minimum=0,
    )
    max_api_server_restarts: int = setting(
        5,
        "Maximum consecutive restarts of an API server that dies within a minute; needs "
        "--resume, and all engines on one host",
        minimum=0,
    )
    engine_timeout_s: float = setting(
        600.0,
        "Seconds until an engine with requests that sends nothing is killed; 0: no limit",
        name="engine-timeout",
        minimum=0,
    )
    stream_interval: int = setting(
        1,
        "Minimum tokens of a streamed chunk, except first and last",
        minimum=1,
    )
    keep_alive_s: float = setting(
        0.0,
        "Seconds between SSE comments that keep streams alive; 0: none",
        name="keep-alive",
        minimum=0,
    )
    responses_store_max_count: int = setting(
        10_000,
        "Maximum stored responses per API server; the oldest is evicted; 0: none",
        minimum=0,
    )
    responses_store_max_bytes: int = setting(
        256 * 2**20,
        "Maximum bytes of stored responses per API server",
        minimum=1,
    )
    responses_store_max_age_s: float = setting(
        86_400.0,
        "Seconds until a stored response is deleted",
        name="responses-store-max-age",
        minimum=0,
    )
    enable_dev_endpoints: bool = setting(
        False,
        "Serve the developer routes, such as /sleep; needs --api-key",
        variables=("VLLM_SERVER_DEV_MODE",),
    )
    enable_docs: bool = setting(
        True, "Serve /docs and /openapi.json", switches={"disable-fastapi-docs": (False, True)}
    )
    enable_page: bool = setting(True, "Serve the web page at /")
    allow_runtime_lora_updating: bool = setting(
        False,
        "Serve /v1/load_lora_adapter and /v1/unload_lora_adapter; needs --api-key, "
        "--lora-dir and --enable-lora",
        group="LoRA",
        variables=("VLLM_ALLOW_RUNTIME_LORA_UPDATING",),
    )
    lora_dir: str | None = setting(
        None,
        "Folder of all adapters that are loaded at run time",
        metavar="DIR",
        group="LoRA",
    )
    served_model_names: tuple[str, ...] = setting(
        (),
        "Names of the model, the first in answers; none: --model, and the last part of a path",
        metavar="NAME",
        group="Text",
        name="served-model-name",
        aliases=("served-model-names",),
        takes_several=True,
    )
    chat_template: str | None = setting(
        None,
        "Chat template, as a file or as text; none: the model's own",
        metavar="FILE",
        group="Text",
    )
    default_chat_template_kwargs: str = setting(
        "",
        'Variables of chat templates: {"enable_thinking": false}',
        metavar="JSON",
        group="Text",
    )
    trust_request_chat_template: bool = setting(
        False, "Allow requests to set chat_template", group="Text"
    )
    special_tokens_as_text: bool = setting(
        False,
        "Tokenize special tokens in chat messages as plain text",
        group="Text",
    )
    generation_config: str = setting(
        "auto",
        "Default sampling parameters: the model's generation_config (auto), or neutral "
        "values (vllm)",
        group="Text",
        choices=("auto", "vllm"),
    )
    override_generation_config: str = setting(
        "",
        'Default sampling parameters: {"temperature": 0.5}; max_new_tokens limits every '
        "output, max_tokens only outputs without a limit",
        metavar="JSON",
        group="Text",
    )
    max_logprobs: int = setting(
        MAX_LOGPROBS,
        "Maximum log-probabilities per token",
        group="Text",
        minimum=0,
        maximum=MAX_LOGPROBS,
    )
    return_tokens_as_token_ids: bool = setting(
        False,
        "Name tokens `token_id:5` in log-probabilities, unless a request decides",
        group="Text",
    )
    enable_force_include_usage: bool = setting(
        False, "End every stream with a chunk of the usage", group="Text"
    )
    max_stop_strings: int = setting(
        4,
        "Maximum stop strings of a request",
        group="Text",
        variables=("VLLM_MAX_STOP_STRINGS",),
        minimum=1,
    )
    tool_call_parser: str = setting(
        "auto",
        "Parser of tool calls; auto: by the chat template; none: calls stay text",
        group="Text",
        choices=AUTO_OR_NONE,
        has_kinds=True,
    )
    tool_template: str = setting(
        "auto",
        "Tools with a chat template that does not render them: as text in the system "
        "message (auto), or a 400 (none)",
        group="Text",
        choices=TOOL_TEMPLATES,
    )
    enable_auto_tool_choice: bool = setting(
        True, "Let the model decide whether to call tools", group="Text"
    )
    reasoning_parser: str = setting(
        "auto",
        "Parser of reasoning; auto: by the chat template; none: reasoning stays text",
        group="Text",
        choices=AUTO_OR_NONE,
        has_kinds=True,
    )
    skip_tokenizer_init: bool = setting(
        False, "Serve token ids only, without a tokenizer", group="Text"
    )
    tokenizer_threads: int = setting(
        2, "Threads that tokenize and render chat templates", group="Text", minimum=1
    )
    limit_mm_per_prompt: str = setting(
        "",
        'Maximum images and videos of a prompt: {"image": 4, "video": 1}, or image=4,video=1',
        metavar="JSON",
        group="Images",
    )
    allowed_media_domains: tuple[str, ...] = setting(
        (),
        "Host of images and videos over HTTPS; repeatable, or a JSON list; *: any "
        "public host; none: only data: URLs",
        group="Images",
        takes_several=True,
    )
    allowed_local_media_path: str = setting(
        "",
        "Folder for file: URLs of images and videos",
        metavar="DIR",
        group="Images",
    )
    image_fetch_timeout_s: float = setting(
        5.0,
        "Seconds to fetch an image",
        group="Images",
        name="image-fetch-timeout",
        variables=("VLLM_IMAGE_FETCH_TIMEOUT",),
        minimum=0.001,
    )
    video_fetch_timeout_s: float = setting(
        30.0,
        "Seconds to fetch a video",
        group="Images",
        name="video-fetch-timeout",
        variables=("VLLM_VIDEO_FETCH_TIMEOUT",),
        minimum=0.001,
    )
    media_io_kwargs: str = setting(
        "",
        'Frames of a video: {"video": {"num_frames": 32, "fps": 2}}; fps: maximum per '
        f"second; num_frames -1: all, up to {MAX_FRAMES}",
        metavar="JSON",
        group="Images",
    )
    mm_processor_kwargs: str = setting(
        "",
        'Arguments of the image processor: {"max_pixels": 1003520}',
        metavar="JSON",
        group="Images",
    )
    mm_processor_cache_gb: float = setting(
        4.0,
        "GiB for preprocessed images per API server; 0: none",
        group="Images",
        minimum=0,
    )
    log_level: str = setting(
        "info",
        "Minimum level of logged messages",
        group="Logs",
        aliases=("uvicorn-log-level",),
        variables=("VLLM_LOGGING_LEVEL",),
        choices=("debug", "info", "warning", "error", "critical"),
        spellings={"warn": "warning", "trace": "debug"},
    )
    log_format: str = setting(
        TEXT,
        "Format of log lines",
        group="Logs",
        choices=FORMATS,
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "OpenTelemetry collector of traces: http://host:4317 (gRPC) or "
        "http://host:4318/v1/traces; needs the extra otel",
        metavar="URL",
        group="Logs",
    )
    enable_log_requests: bool = setting(
        False,
        "Log the beginning of each prompt",
        group="Logs",
        switches={"disable-log-requests": (False, True)},
    )
    disable_access_log: bool = setting(
        False,
        "Do not log HTTP requests, except requests to the engine",
        group="Logs",
        aliases=("disable-uvicorn-access-log",),
    )
    disable_access_log_for_endpoints: tuple[str, ...] = setting(
        (),
        "Paths that are not logged, with commas: /health,/metrics",
        group="Logs",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("request_header_timeout_s", "request_body_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be above 0")
        _check_addresses(self.forwarded_allow_ips)
        _generation_overrides(self.override_generation_config)
        _object("mm_processor_kwargs", self.mm_processor_kwargs)
        for name in RESERVED_VARIABLES:
            if name in self.template_defaults:
                raise ConfigError(
                    f"default_chat_template_kwargs sets {name!r}, which the server sets from the "
                    "fields of a request: leave it out"
                )
        for kind, count in (("images", self.max_images), ("videos", self.max_videos)):
            if count < 0:
                raise ConfigError(f"limit_mm_per_prompt has {count} {kind}, it must be at least 0")
        _check_frames(*self.video_frames)
        if self.cache_salt_per_key and not self.has_api_keys:
            raise ConfigError(
                "cache_salt_per_key is on and api_keys has 0 keys, it must have at least 1"
            )
        if self.uds is not None and self.api_server_count > 1:
            raise ConfigError(
                f"uds is {self.uds} and api_server_count is {self.api_server_count}: one API "
                "server listens on a Unix socket"
            )
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(
                f"root_path is {self.root_path!r}, it must begin with /, such as /gaudi"
            )
        self._check_tls()

    def _check_tls(self) -> None:
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            given, missing = ("ssl_certfile", "ssl_keyfile")[:: 1 if self.ssl_certfile else -1]
            raise ConfigError(
                f"{given} is {getattr(self, given)} and {missing} is not set: set both"
            )
        for name in ("ssl_keyfile_password", "ssl_ca_certs"):
            if getattr(self, name) and not self.ssl_certfile:
                raise ConfigError(f"{name} is set and ssl_certfile is not: set ssl_certfile")

    @property
    def path_prefix(self) -> str:
        """Prefix of all paths, without a trailing slash; empty: no prefix."""
        return self.root_path.rstrip("/")

    @property
    def serves_dev_endpoints(self) -> bool:
        """Whether the developer routes are enabled: never without API keys."""
        return self.enable_dev_endpoints and self.has_api_keys

    @property
    def has_api_keys(self) -> bool:
        """Whether clients must send an API key."""
        return bool(self.api_keys or self.api_key_file)

    @property
    def max_images(self) -> int:
        """Maximum number of images in a prompt. Raises ConfigError."""
        return self._limit("image", MAX_IMAGES)

    @property
    def max_videos(self) -> int:
        """Maximum number of videos in a prompt. Raises ConfigError."""
        return self._limit("video", MAX_VIDEOS)

    def _limit(self, kind: str, default: int) -> int:
        limits = _object("limit_mm_per_prompt", self.limit_mm_per_prompt)
        if unknown := set(limits) - set(_LIMITED):
            raise ConfigError(
                f"limit_mm_per_prompt has {', '.join(sorted(unknown))}, it may have "
                f"{', '.join(_LIMITED)}"
            )
        count = limits.get(kind, default)
        if isinstance(count, dict):
            # vLLM's form, with the sizes for its profiling.
            count = count.get("count", default)
        if not isinstance(count, int) or isinstance(count, bool):
            raise ConfigError(f"limit_mm_per_prompt has {kind} {count!r}, it must be an integer")
        return count

    @property
    def video_frames(self) -> tuple[int, float]:
        """(maximum frames, maximum frames per second) of a video; -1: MAX_FRAMES, or no limit on
        frames per second. Raises ConfigError."""
        kinds = _object("media_io_kwargs", self.media_io_kwargs)
        video = kinds.get("video", {})
        if set(kinds) - {"video"} or not isinstance(video, dict) or set(video) - set(_FRAMES):
            raise ConfigError(
                f"media_io_kwargs is {self.media_io_kwargs!r}, it may have video, an object with "
                f"{' and '.join(_FRAMES)}"
            )
        values = {**_FRAMES, **video}
        for name, value in values.items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ConfigError(f"media_io_kwargs has {name} {value!r}, it must be a number")
        return int(values["num_frames"]), float(values["fps"])

    @property
    def image_options(self) -> dict[str, Any]:
        """Keyword arguments for the image processor."""
        return _object("mm_processor_kwargs", self.mm_processor_kwargs)

    @property
    def template_defaults(self) -> dict[str, Any]:
        """Default variables of the chat template, which a request may override. Raises
        ConfigError."""
        return _object("default_chat_template_kwargs", self.default_chat_template_kwargs)

    @property
    def log(self) -> LogConfig:
        """Log settings of all processes of the server."""
        return LogConfig(self.log_level, self.log_format)

    def sampling_defaults(self, of_model: Mapping[str, float]) -> dict[str, float]:
        """Default sampling parameters of requests: the model's generation_config, if
        `generation_config` is auto, overridden by override_generation_config."""
        recommended = of_model if self.generation_config == "auto" else {}
        return {**recommended, **_generation_overrides(self.override_generation_config)}


IGNORED_GENERATION = ("attn_temperature_tuning",)
"""Names in override_generation_config that are not sampling parameters. Scripts for Llama 4 on vLLM
set them, and vLLM ignores them too."""
_LIMITED = ("image", "video", "audio")
"""Kinds in limit_mm_per_prompt. Scripts for vLLM set audio, which no model here supports."""
_FRAMES = {"num_frames": 32, "fps": -1}
"""vLLM's default of num_frames; fps -1 means that fps sets no limit."""


def _check_frames(num_frames: int, fps: float) -> None:
    if num_frames != -1 and not 1 <= num_frames <= MAX_FRAMES:
        raise ConfigError(
            f"media_io_kwargs has num_frames {num_frames}, it must be 1 to {MAX_FRAMES}, or -1"
        )
    if fps != -1 and not fps > 0:
        raise ConfigError(f"media_io_kwargs has fps {fps:g}, it must be above 0, or -1")


_PAIR = r"\w+=(?:true|false|-?\d{1,18}(?:\.\d{1,18})?)"
_PAIRS = re.compile(rf"{_PAIR}(?:,{_PAIR})*")


_EXAMPLES = {
    "limit_mm_per_prompt": '{"image": 4, "video": 1}',
    "default_chat_template_kwargs": '{"enable_thinking": false}',
}


def _object(name: str, text: str) -> dict[str, Any]:
    """An object from JSON, or from name=value pairs as in older releases of vLLM: image=4,video=1.
    Raises ConfigError."""
    if _PAIRS.fullmatch(text):
        pairs = (pair.split("=") for pair in text.split(","))
        text = "{" + ",".join(f'"{key}":{value}' for key, value in pairs) + "}"
    try:
        value = parse_json(text or "{}", is_finite=True)
    except ValueError as error:
        problem = json_setting_problem(error, _EXAMPLES.get(name, '{"name": "value"}'))
        raise ConfigError(f"{name} is {text!r}, {problem}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is {text!r}, it must be a JSON object")
    return value


def _generation_overrides(text: str) -> dict[str, float]:
    name = "override_generation_config"
    values = {
        key: value for key, value in _object(name, text).items() if key not in IGNORED_GENERATION
    }
    if not set(values) <= set(GENERATION_FIELDS):
        allowed = ", ".join(GENERATION_FIELDS)
        raise ConfigError(f"{name} is {text!r}, it must be a JSON object of some of {allowed}")
    for limit in GENERATION_LIMITS:
        most = values.get(limit, 1)
        if type(most) is not int or most < 1:
            raise ConfigError(f"{name} has {limit} {most!r}, it must be an integer above 0")
    try:
        SamplingParams(**{key: values[key] for key in values if key not in GENERATION_LIMITS})
    except (UserError, TypeError) as error:
        raise ConfigError(f"{name} is {text!r}: {error}") from None
    return values


def _check_addresses(words: str) -> None:
    for word in words.split(","):
        word = word.strip()
        if word in ("", "*"):
            continue
        try:
            ipaddress.ip_network(word, strict=False)
        except ValueError:
            raise ConfigError(
                f"forwarded_allow_ips has {word!r}, it must be comma-separated addresses or "
                "networks (10.0.0.0/8), or *"
            ) from None
