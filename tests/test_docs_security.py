"""Limits of docs/limits.md, docs/security.md, docs/images.md and docs/api.md equal the limits in
code."""

from pathlib import Path

import pytest

from config import expressions, traffic, whole_files
from config.checkpoint import gguf_metadata, safetensors_files
from config.checkpoint import tokenizer_bounds as tokenizer
from config.loading import sources
from config.lora import adapter, adapter_folder, gguf_adapter, peft_config
from config.model import json_fields as fields
from config.model import model_config
from config.params import sampling
from config.params import structured_output as grammar
from config.server import ServerConfig
from engine.core import adapter_reader
from engine.process import isolation as processes
from engine.scheduling import lora_slots
from engine.structured_output import bounds as grammar_bounds
from engine.structured_output import compilation, json_schema
from hpu.bucketing import file as bucket_file
from server.generation import validation
from server.http import auth, body, held_bodies, json_decoder, tls
from server.http import body_bounds as bounds
from server.http import protocol as http_protocol
from server.multimodal import decode, fetch, file_checks, image_processor, processor, video
from server.openai.responses import chat_request as responses
from server.openai.responses import store as stored
from server.openai.schema.chat import MAX_ECHO_CHARACTERS
from server.openai.schema.generation import MAX_STOP_CHARACTERS
from server.parsers.tool import argument_types, structural_tag
from server.pooling import scores
from server.process import api_server, open_files
from server.serving import job, prompts
from server.text import bounded_encoder, isolated_template, long_texts, messages, sandbox
from server.text import chat_template as template
from server.text import template_renderer as renderer

PAGE = " ".join(
    " ".join((Path(__file__).parents[1] / "docs" / name).read_text(encoding="utf-8").split())
    for name in ("security.md", "limits.md")
)
IMAGES = " ".join(
    (Path(__file__).parents[1] / "docs" / "images.md").read_text(encoding="utf-8").split()
)
API = " ".join((Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8").split())
DEFAULTS = ServerConfig()
KIB, MIB, GIB = 2**10, 2**20, 2**30


def isolation(limits: compilation.Limits) -> str:
    """A row of the isolation table without its first cell."""
    return (
        f"| {limits.cpu_s:g} s | {limits.wall_s:g} s | {limits.memory_bytes // MIB} MiB "
        f"| {limits.stack_bytes // MIB} MiB |"
    )


@pytest.mark.parametrize(
    "row",
    [
        f"| a grammar {isolation(compilation.LIMITS)}",
        f"| a template of a request {isolation(isolated_template.LIMITS)}",
        f"uses no CPU time for {processes.STUCK_S:g} s while a request waits",
        f"A new fork server may take {processes.START_TIMEOUT_S:g} s to read",
        f"ends after {template.TIME_LIMIT_S * template.MAX_WALL_FACTOR:g} s on a busy machine",
        f"On a thread it is stopped after {template.TIME_LIMIT_S:g} s of CPU time, or when memory "
        f"has grown by {template.MAX_GROWTH_BYTES // MIB} MiB. On the event loop it is stopped "
        f"after {template.INLINE_LIMIT_S * 1e3:g} ms",
        f"* URL and headers: {DEFAULTS.h11_max_incomplete_event_size // KIB} KiB,",
        f"* number of headers: {DEFAULTS.h11_max_header_count}, then 431",
        f"* TLS handshake, or headers: {DEFAULTS.request_header_timeout_s:g} s, then 408 or a",
        f"* time without a byte of the body: {DEFAULTS.request_body_timeout_s:g} s, then 408 ",
        f"* mean rate of a body: {http_protocol.MIN_BODY_BYTES_PER_S // KIB} KiB a second, then "
        "408 (`--request-body-timeout`)",
        f"the limit of open files (`ulimit -n`) less {open_files.RESERVED}; then 503, with TLS",
        f"that wait to be parsed: {http_protocol.MAX_WAITING_BYTES // MIB} MiB, then 503 *",
        f"* requests waiting on one connection: {http_protocol.MAX_PIPELINED} *",
        f"* idle time between requests: {api_server.KEEP_ALIVE_S} s, then a closed",
        f"* body: {DEFAULTS.max_body_bytes // MIB} MiB, then 413",
        f"* bodies received at once: {body.MAX_BUFFERED_BODIES} times the largest size "
        f"in total, then 503; {body.MAX_SMALL_BODIES * body.LARGE_BODY_BYTES // MIB} MiB more for "
        f"bodies of at most {body.LARGE_BODY_BYTES // MIB} MiB; shared, up to "
        f"{held_bodies.MAX_OVERCOMMIT} times as much",
        f"further bodies wait up to {held_bodies.MAX_WAIT_S:g} s, then 503, and at most "
        f"{held_bodies.MAX_WAITING:,} of a client wait",
        f"* connections that receive stored streams: {stored.MAX_FOLLOWERS_PER_RESPONSE} for a "
        f"response, {stored.MAX_FOLLOWERS_PER_CLIENT} for a client, then 503 *",
        f"* values in a body: {json_decoder.MAX_VALUES:,}, of them "
        f"{json_decoder.MAX_OBJECTS:,} strings",
        f"* requests that wait: {DEFAULTS.max_queued_requests}, then 503",
        f"* prompt tokens that wait: {DEFAULTS.max_queued_prompt_tokens:,}, then 503",
        f"* schema, pattern or grammar: {grammar.MAX_CHARACTERS:,} characters; times the sequences "
        f"{grammar.MAX_REQUEST_CHARACTERS:,} *",
        f"* JSON schema: {json_schema.MAX_NESTING} levels, {json_schema.MAX_SCHEMAS:,} "
        f"schemas, {json_schema.MAX_DEPTH:,} on a path, {json_schema.MAX_CHAIN} in a row",
        "* optional arguments (or pairs of arguments, if all are optional) of strict tools that a "
        f"model writes one by one: {structural_tag.MAX_ARGUMENT_PARTS:,} *",
        f"definitions counted for each argument: {structural_tag.MAX_ARGUMENT_KEYWORDS:,} *",
        f"* types of a tool argument: {argument_types.MAX_SCHEMA_NODES:,} subschemas, "
        f"{argument_types.MAX_SCHEMA_DEPTH} on a path, {argument_types.MAX_REQUEST_NODES:,} "
        "for a request",
        "a cross-encoder, times the texts; echoed message of a chat, times `n`: "
        f"{scores.MAX_REPEATED_CHARACTERS:,} characters *",
        f"echoed message of a chat, times `n`: {MAX_ECHO_CHARACTERS:,} characters *",
        f"* pattern: {grammar_bounds.MAX_PATTERN_SIZE:,} characters with repetitions expanded, "
        f"{grammar_bounds.MAX_PATTERN_OPTIONS:,} of them optional",
        f"* grammar: {grammar_bounds.MAX_RULES:,} rules, {grammar_bounds.MAX_RULE_DEPTH} on a "
        f"path, {grammar_bounds.MAX_EXPRESSIONS:,} expressions",
        f"* `logit_bias`, times the sequences: {sampling.MAX_LISTED_BIASES:,} entries",
        f"and `bad_words`, times the sequences: {sampling.MAX_LISTED_TOKENS:,} *",
        f"* `bad_words`, times the sequences: {sampling.MAX_LISTED_WORDS // 2:,} texts; "
        f"{sampling.MAX_BAD_WORDS // 2} in one list",
        f"* images of a request, times `n` above 1: {validation.MAX_IMAGE_BYTES // MIB} MiB",
        f"* grammars that wait to be compiled: {compilation.MAX_PENDING}, then 503",
        f"* arguments of a tool call in a message: {messages.MAX_ARGUMENTS_CHARACTERS:,} char",
        f"* log-probabilities of prompt tokens: {job.MAX_PROMPT_LOGPROBS:,}: tokens",
        f"* log-probabilities of output tokens, not streamed: {job.MAX_KEPT_LOGPROBS:,}: tok",
        f"* cached grammars: {compilation.MAX_CACHED + compilation.MAX_PENDING}, and "
        f"{compilation.MAX_CACHED_BYTES // MIB} MiB",
        f"* `prompt_name`, `previous_response_id`: {bounds.MAX_LABEL_CHARACTERS} characters *",
        "* fields with a schema, such as `tools` and `response_format`: "
        f"{bounds.MAX_FIELD_VALUES:,} values, {bounds.MAX_FIELD_CHARACTERS:,} characters",
        f"* `documents`, `chat_template_kwargs`: {bounds.MAX_FIELD_VALUES:,} values, "
        f"{bounds.MAX_RENDERED_CHARACTERS:,} characters",
        f"as text or JSON: {sandbox.MAX_WRITTEN_ITEMS:,} items, keys included",
        f"* references to items in the input: {responses.MAX_REFERENCES:,} *",
        f"* `lora_path`: {whole_files.MAX_PATH_CHARACTERS:,} characters",
        f"* `$ref` in the arguments of tools: {argument_types.MAX_REFERENCE_CHARACTERS:,} char",
        f"An enum counts a subschema for {argument_types.ENTRIES_PER_NODE} entries, a `$ref` for "
        f"{argument_types.CHARACTERS_PER_NODE} characters",
        f"* prompt rendered by a template: {renderer.MAX_CHARACTERS // MIB} Mi characters",
        "* items of a conversation before a response, and items that a response references: "
        f"{responses.MAX_CONVERSATION_BYTES // MIB} MiB of JSON",
        f"* stored responses: {DEFAULTS.responses_store_max_count:,}, "
        f"{DEFAULTS.responses_store_max_bytes // MIB} MiB, one day",
        f"* number in a JSON file of a checkpoint: {fields.MAX_FLOAT32:.1e}; ".replace("e+", "e")
        + f"{fields.MAX_NUMBER:,.0f} where its field scales or limits tensors; "
        + f"{model_config.MAX_THETA:.0e} for `rope_theta`".replace("e+", "e"),
        f"* JSON files of a checkpoint: {fields.MAX_JSON_BYTES // MIB} MiB; `tokenizer.json` "
        f"{tokenizer.MAX_TOKENIZER_BYTES // MIB} MiB",
        f"| a text of a tokenizer without bounds {isolation(bounded_encoder.LIMITS)}",
        f"a bound above {bounded_encoder.UNLIMITED_GROWTH}, for texts that the tokenizer may "
        f"lengthen to more than {bounded_encoder.MAX_DIRECT_BYTES // MIB} MiB",
        f"* bytes that a tokenizer may make of a byte: {tokenizer.MAX_GROWTH:,} *",
        f"* parts of a tokenizer: {tokenizer.MAX_STEPS} steps and "
        f"{tokenizer.MAX_PART_BYTES // MIB} MiB in each; {tokenizer.MAX_PADDING:,} tokens",
        f"* token of a vocabulary: {tokenizer.MAX_TOKEN_CHARACTERS:,} characters, "
        f"{tokenizer.MAX_TOKEN_TEXT_BYTES // KIB} KiB after",
        f"* vocabulary and merges of a tokenizer: {tokenizer.MAX_MERGES:,} each",
        f"* added tokens of a tokenizer: {tokenizer.MAX_ADDED_TOKENS:,}, of "
        f"{tokenizer.MAX_ADDED_CHARACTERS:,} characters",
        f"* tokens that a tokenizer adds to a text: {tokenizer.MAX_SPECIAL_TOKENS} #",
        f"* file of settings: {sources.MAX_FILE_BYTES // KIB} KiB, {sources.MAX_FILE_KEYS:,} "
        f"keys, {sources.MAX_FILE_DEPTH} levels, no aliases",
        f"* API keys, TLS files: {auth.MAX_FILE_BYTES // MIB} MiB, "
        f"{tls.MAX_FILE_BYTES // MIB} MiB; regular files only",
        f"traffic: {fields.MAX_JSON_BYTES // MIB} MiB, {fields.MAX_JSON_BYTES // MIB} MiB, "
        f"{bucket_file.MAX_FILE_BYTES // MIB} MiB, {traffic.MAX_TRAFFIC_BYTES // MIB} MiB; a pipe "
        f"must end within {whole_files.PIPE_TIMEOUT_S:g} s",
        f"* JSON files of a checkpoint: {fields.MAX_JSON_BYTES // MIB} MiB;",
        f"* header of a safetensors file: {safetensors_files.MAX_HEADER_BYTES // MIB} MiB; of an "
        f"adapter {adapter_folder.MAX_HEADER_BYTES // MIB} MiB, with names of "
        f"{adapter_folder.MAX_NAME_CHARACTERS:,} characters",
        f"* `adapter_config.json`: {adapter_folder.MAX_CONFIG_BYTES // MIB} MiB, "
        f"{adapter_folder.MAX_CONFIG_VALUES:,} values, {adapter_folder.MAX_CONFIG_OBJECTS:,} lists "
        f"and objects, {peft_config.MAX_TARGETS:,} `target_modules`",
        f"* regular expressions of one field of a file: {expressions.MAX_EXPRESSIONS:,}, each of "
        f"{expressions.MAX_EXPRESSION_CHARACTERS:,} characters, in total "
        f"{expressions.MAX_TOTAL_CHARACTERS:,}; counts in braces up to "
        f"{expressions.MAX_REPETITIONS:,}, in total {expressions.MAX_TOTAL_REPETITIONS:,}; "
        f"{expressions.MAX_MEMORY_BYTES // MIB} MiB for each {expressions.PROGRAM_EXPRESSIONS}; "
        f"{expressions.CPU_S:g} s of CPU time and "
        f"{expressions.CPU_S_PER_NAME * 1e3:g} ms for each name",
        f"* weights: finite, at most {adapter.MAX_VALUE:,.0f};",
        f"* adapters: {lora_slots.MAX_ADAPTERS:,} served; {adapter_reader.MAX_PENDING} wait",
        f"* metadata of a GGUF file: {gguf_metadata.MAX_METADATA_BYTES // MIB} MiB, "
        f"{gguf_metadata.MAX_ELEMENTS:,} array elements; of an adapter "
        f"{gguf_adapter.MAX_METADATA_BYTES // MIB} MiB, {gguf_adapter.MAX_ELEMENTS:,} array "
        "elements",
        f"* adapter in GGUF: {gguf_adapter.MAX_FILE_BYTES // GIB} GiB, "
        f"{gguf_adapter.MAX_NUMBERS:,} numbers",
    ],
)
def test_limits_of_the_page_equal_the_code(row: str) -> None:
    assert row in PAGE


@pytest.mark.parametrize(
    "row",
    [
        f"* pixels of an image or a frame: {decode.MAX_PIXELS:,}, and {decode.MAX_SIDE:,} on a "
        f"side; an image of more than {decode.KEPT_PIXELS:,} is scaled",
        f"* ratio of the sides of an image: {image_processor.MAX_RATIO} *",
        f"* scans of a progressive JPEG: {file_checks.MAX_SCANNED_PIXELS:,} pixels",
        f"* pixels of a BMP with run lengths: {file_checks.MAX_RUN_LENGTH_PIXELS:,} *",
        f"* chunks of a PNG: {file_checks.MAX_CHUNKS:,}, of them one colour profile",
        f"* EXIF data of an image: {file_checks.MAX_EXIF_BYTES:,} bytes",
        f"* pixels of the frames of a video together: {video.MAX_VIDEO_PIXELS:,} *",
        f"* frames of a video: {video.MAX_FRAMES} *",
        "* frames of an animation, unused frames included: "
        f"{video.MAX_ANIMATION_FRAMES:,}, and {video.MAX_ANIMATION_PIXELS:,} pixels",
        f"* decoding and preprocessing an image: {processor.IMAGE_LIMITS.cpu_s:g} s of processor "
        f"time, {processor.IMAGE_LIMITS.wall_s:g} s in all, "
        f"{processor.IMAGE_LIMITS.memory_bytes // GIB} GiB",
        f"* decoding and preprocessing a video: {processor.VIDEO_LIMITS.cpu_s:g} s of processor "
        f"time, {processor.VIDEO_LIMITS.wall_s:g} s in all, "
        f"{processor.VIDEO_LIMITS.memory_bytes // GIB} GiB",
        f"* images that an API server processes at once: {processor.MAX_RUNNING}, of them "
        f"{processor.MAX_RUNNING_PER_CLIENT} of a client",
        f"* images that wait to be processed: {processor.MAX_PENDING}, and "
        f"{processor.MAX_PENDING_BYTES // GIB} GiB",
        f"* fetches at once: {fetch.MAX_FETCHES}, of them {fetch.MAX_FETCHES_PER_CLIENT} of a "
        f"client; {fetch.MAX_WAITING_FETCHES} wait",
        f"* look-ups of host names at once: {fetch.MAX_LOOKUPS}, of them "
        f"{fetch.MAX_LOOKUPS_PER_CLIENT} of a client; {fetch.MAX_WAITING_FETCHES} wait",
        f"* headers of a response to a fetch: {fetch.MAX_HEADER_BYTES // KIB} KiB, and "
        f"{fetch.MAX_INTERIM_RESPONSES} interim responses",
        f"{DEFAULTS.max_images} and {DEFAULTS.max_videos} unless set; 0: none *",
        f"* bytes of an image or a video: {fetch.MAX_IMAGE_BYTES // MIB} MiB, "
        f"{fetch.MAX_VIDEO_BYTES // MIB} MiB *",
        f"`--image-fetch-timeout` ({DEFAULTS.image_fetch_timeout_s:g}) or `--video-fetch-timeout` "
        f"({DEFAULTS.video_fetch_timeout_s:g}) seconds",
        f"* pieces of a fetched body: {fetch.FREE_PIECES}, plus 1 for each "
        f"{fetch.MIN_PIECE_BYTES} bytes",
    ],
)
def test_limits_of_images_equal_the_code(row: str) -> None:
    assert row in IMAGES


@pytest.mark.parametrize(
    "row",
    [
        f"* messages or items: {bounds.MAX_MESSAGES:,} *",
        f"* parts of a message, `documents` of a chat: {bounds.MAX_PARTS:,} *",
        f"* parts of a message, `documents` of a chat: {bounds.MAX_DOCUMENTS:,} *",
        f"* tools: {bounds.MAX_TOOLS:,} *",
        f"* a text: {json_decoder.MAX_TEXT_BYTES // MIB} MiB of memory;",
        f"* a text that is only counted or converted: {prompts.COUNTED_CONTEXTS} contexts or "
        f"{prompts.MIN_COUNTED_TOKENS:,} tokens, whichever is more",
        f"It reads {long_texts.INITIAL_CHARACTERS} characters for each remaining token and for "
        f"{long_texts.MARGIN_TOKENS} more, up to {long_texts.MAX_CHARACTERS:,} if needed.",
        f"no blank lies within {long_texts.WORD_CHARACTERS:,} characters of the cut",
    ],
)
def test_limits_of_the_api_page_equal_the_code(row: str) -> None:
    assert row in API


def test_the_fields_of_stop_strings_have_the_limits_of_the_code() -> None:
    page = (Path(__file__).parents[1] / "docs" / "api-fields.md").read_text(encoding="utf-8")

    assert page.count(f"{DEFAULTS.max_stop_strings}, `--max-stop-strings`)") == 2
    assert page.count(f"each of up to {MAX_STOP_CHARACTERS:,} characters") == 2
