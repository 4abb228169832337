"""Settings of the front end: HTTP, text and logs. See config.flags."""

from config.loading.flag import Flag
from config.server import REASONING_PARSERS, TOOL_CALL_PARSERS

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

SERVER = (
    Flag("server", "host", "HTTP", "Address to listen on; 0.0.0.0 for every interface"),
    Flag("server", "port", "HTTP", "Port to listen on; 0 takes a free one"),
    Flag("server", "api_server_count", "HTTP", "Front-end processes on the port"),
    Flag(
        "server",
        "api_keys",
        "HTTP",
        "Key that clients must bring; may be given several times",
        name="api-key",
        aliases=("api-keys",),
        variables=("VLLM_API_KEY",),
        is_secret=True,
    ),
    Flag(
        "server",
        "cache_salt_per_key",
        "HTTP",
        "Share cached prompt prefixes only among requests of one API key; needs --api-key",
    ),
    Flag(
        "server",
        "allowed_origins",
        "HTTP",
        "Web origin whose pages may call the server; a JSON list, or several times",
    ),
    Flag("server", "max_body_bytes", "HTTP", "Largest request body"),
    Flag(
        "server",
        "h11_max_incomplete_event_size",
        "HTTP",
        "Bytes of a request's URL and headers before 414 or 431 is answered",
    ),
    Flag(
        "server",
        "h11_max_header_count",
        "HTTP",
        "Headers of a request before 431 is answered",
    ),
    Flag(
        "server",
        "request_header_timeout_s",
        "HTTP",
        "Seconds that the headers of a request may take",
        name="request-header-timeout",
    ),
    Flag(
        "server",
        "request_body_timeout_s",
        "HTTP",
        "Seconds without a byte of a request's body before 408 is answered; also the time for a "
        "whole body that comes at under 1 KiB a second",
        name="request-body-timeout",
    ),
    Flag(
        "server",
        "forwarded_allow_ips",
        "HTTP",
        "Addresses and networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are "
        "believed, with commas between them; *: all",
        variables=("FORWARDED_ALLOW_IPS",),
    ),
    Flag("server", "max_queued_requests", "HTTP", "Requests that may wait before 503 is answered"),
    Flag(
        "server",
        "max_queued_prompt_tokens",
        "HTTP",
        "Prompt tokens that may wait before 503 is answered",
    ),
    Flag(
        "server",
        "shutdown_timeout_s",
        "HTTP",
        "Seconds that running requests have to finish after SIGTERM",
        name="shutdown-timeout",
    ),
    Flag("server", "stream_interval", "HTTP", "Tokens gathered before a chunk is sent"),
    Flag(
        "server",
        "keep_alive_s",
        "HTTP",
        "Seconds between comments that keep a stream alive through proxies; 0: never",
        name="keep-alive",
    ),
    Flag(
        "server",
        "responses_store_max_count",
        "HTTP",
        "Responses of /v1/responses that are kept for later, the oldest going first; 0: none",
    ),
    Flag(
        "server",
        "responses_store_max_bytes",
        "HTTP",
        "Size of the responses that are kept, in bytes (1G is 1 GiB)",
    ),
    Flag(
        "server",
        "responses_store_max_age_s",
        "HTTP",
        "Seconds for which a response is kept",
        name="responses-store-max-age",
    ),
    Flag(
        "server",
        "enable_dev_endpoints",
        "HTTP",
        "Serve the routes for developers: /start_profile, /stop_profile, /server_info, "
        "/reset_prefix_cache, /sleep, /wake_up; needs --api-key",
        variables=("VLLM_SERVER_DEV_MODE",),
    ),
    Flag(
        "server",
        "enable_docs",
        "HTTP",
        "Serve /docs and /openapi.json",
        switches={"disable-fastapi-docs": (False, True)},
    ),
    Flag(
        "server",
        "enable_page",
        "HTTP",
        "Serve the page at /: the server's figures, and a box to chat with the model",
    ),
)
TEXT = (
    Flag(
        "server",
        "served_model_names",
        "Text",
        "Name clients ask for; may be given several times; none: the model's own",
        name="served-model-name",
        aliases=("served-model-names",),
    ),
    Flag("server", "chat_template", "Text", "File, or the template itself; none: the model's own"),
    Flag(
        "server",
        "trust_request_chat_template",
        "Text",
        "Let a request bring its own chat template",
    ),
    Flag(
        "server",
        "special_tokens_as_text",
        "Text",
        "Take the text of a control token in a message for plain text",
    ),
    Flag(
        "server",
        "generation_config",
        "Text",
        "Sampling defaults: auto takes the checkpoint's, vllm neutral ones",
        choices=("auto", "vllm"),
    ),
    Flag(
        "server",
        "max_stop_strings",
        "Text",
        "Stop strings that a request may have",
        variables=("VLLM_MAX_STOP_STRINGS",),
    ),
    Flag(
        "server",
        "tool_call_parser",
        "Text",
        "How the model writes calls of functions; auto: as its chat template says, none: calls are "
        "text",
        choices=TOOL_CALL_PARSERS,
    ),
    Flag(
        "server",
        "enable_auto_tool_choice",
        "Text",
        "Let the model choose whether to call a function of the request",
    ),
    Flag(
        "server",
        "reasoning_parser",
        "Text",
        "How the model marks its thinking; auto: as its chat template says, none: thinking is text",
        choices=REASONING_PARSERS,
    ),
    Flag("server", "skip_tokenizer_init", "Text", "Serve token ids only, without a tokenizer"),
    Flag("server", "tokenizer_threads", "Text", "Threads that tokenise and render templates"),
)
LOGS = (
    Flag(
        "server",
        "log_level",
        "Logs",
        "Least level that is logged",
        aliases=("uvicorn-log-level",),
        variables=("VLLM_LOGGING_LEVEL",),
        choices=LOG_LEVELS,
        spellings={"warn": "warning"},
    ),
    Flag(
        "server",
        "enable_log_requests",
        "Logs",
        "Log prompts too; one line a request is always logged",
        switches={"disable-log-requests": (False, True)},
    ),
    Flag(
        "server",
        "disable_access_log",
        "Logs",
        "No line for each HTTP call",
        aliases=("disable-uvicorn-access-log",),
    ),
)
