"""The limits in docs/security.md equal those of the code."""

from pathlib import Path

import pytest

from config.checkpoint import gguf_metadata, safetensors_files
from config.checkpoint import tokenizer_bounds as tokenizer
from config.model import json_fields as fields
from config.params import sampling
from config.params import structured_output as grammar
from config.server import ServerConfig
from engine.structured_output import bounds as grammar_bounds
from engine.structured_output import compilation, json_schema
from server.generation import validation
from server.http import body_bounds as bounds
from server.http import json_decoder
from server.http import protocol as http_protocol
from server.parsers.tool import argument_types
from server.process import open_files
from server.text import bounded_encoder, isolated_template
from server.text import chat_template as template
from server.text import template_renderer as renderer

PAGE = " ".join(
    (Path(__file__).parents[1] / "docs" / "security.md").read_text(encoding="utf-8").split()
)
DEFAULTS = ServerConfig()
KIB, MIB = 2**10, 2**20


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
        f"stopped after {template.TIME_LIMIT_S:g} s on a thread, and after "
        f"{template.INLINE_LIMIT_S * 1e3:g} ms",
        f"| URL and headers | {DEFAULTS.h11_max_incomplete_event_size // KIB} KiB,",
        f"| number of headers | {DEFAULTS.h11_max_header_count}, then 431",
        f"| time for the headers | {DEFAULTS.request_header_timeout_s:g} s, then 408",
        f"| time without a byte of the body | {DEFAULTS.request_body_timeout_s:g} s, then 408; "
        f"and {http_protocol.MIN_BODY_BYTES_PER_S // KIB} KiB a second",
        f"| the limit of open files, less {open_files.RESERVED}; then 503",
        f"| requests waiting on one connection | {http_protocol.MAX_PIPELINED} |",
        f"| body | {DEFAULTS.max_body_bytes // MIB} MiB, then 413",
        f"| {json_decoder.MAX_VALUES:,}, of them {json_decoder.MAX_OBJECTS:,} strings",
        f"| requests that wait | {DEFAULTS.max_queued_requests}, then 503",
        f"| prompt tokens that wait | {DEFAULTS.max_queued_prompt_tokens:,}, then 503",
        f"| schema, pattern or grammar | {grammar.MAX_CHARACTERS:,} characters",
        f"| JSON schema | {json_schema.MAX_NESTING} levels, {json_schema.MAX_SCHEMAS:,} "
        f"schemas, {json_schema.MAX_DEPTH:,} on a path, {json_schema.MAX_CHAIN} in a row",
        f"| types of a tool argument | {argument_types.MAX_SCHEMA_NODES:,} subschemas, "
        f"{argument_types.MAX_SCHEMA_DEPTH} on a path",
        f"| pattern | {grammar_bounds.MAX_PATTERN_SIZE:,} characters with repetitions expanded, "
        f"{grammar_bounds.MAX_PATTERN_OPTIONS:,} of them optional",
        f"| grammar | {grammar_bounds.MAX_RULES:,} rules, {grammar_bounds.MAX_RULE_DEPTH} on a "
        f"path, {grammar_bounds.MAX_EXPRESSIONS:,} expressions",
        f"times the sequences of the request | {sampling.MAX_LISTED_BIASES:,} entries",
        f"and `bad_words`, times the sequences | {sampling.MAX_LISTED_TOKENS:,} |",
        f"| `bad_words`, times the sequences | {sampling.MAX_LISTED_WORDS // 2:,} texts; "
        f"{sampling.MAX_BAD_WORDS // 2} in one list",
        f"grammar, times the sequences | {grammar.MAX_REQUEST_CHARACTERS:,} characters",
        f"several choices, times `n` | {validation.MAX_IMAGE_BYTES // MIB} MiB",
        f"| grammars that wait to be compiled | {compilation.MAX_PENDING}, then 503",
        f"| cached grammars | {compilation.MAX_CACHED + compilation.MAX_PENDING}, and "
        f"{compilation.MAX_CACHED_BYTES // MIB} MiB",
        f"| `metadata` | {bounds.MAX_METADATA_PAIRS} pairs, keys of "
        f"{bounds.MAX_METADATA_KEY_CHARACTERS} characters, values of "
        f"{bounds.MAX_METADATA_VALUE_CHARACTERS} |",
        f"| `safety_identifier` | {bounds.MAX_SAFETY_IDENTIFIER_CHARACTERS} characters |",
        f"`metadata.user_id` of `/v1/messages` | {bounds.MAX_USER_ID_CHARACTERS} characters |",
        f"`previous_response_id` | {bounds.MAX_LABEL_CHARACTERS} characters; the OpenAI API",
        f"| prompt rendered by a template | {renderer.MAX_CHARACTERS // MIB} Mi characters",
        f"| stored responses | {DEFAULTS.responses_store_max_count:,}, "
        f"{DEFAULTS.responses_store_max_bytes // MIB} MiB, one day",
        f"| JSON files of a checkpoint | {fields.MAX_JSON_BYTES // MIB} MiB; `tokenizer.json` "
        f"{tokenizer.MAX_TOKENIZER_BYTES // MIB} MiB",
        f"| a text of a tokenizer without bounds {isolation(bounded_encoder.LIMITS)}",
        f"a bound above {bounded_encoder.UNLIMITED_GROWTH}, for texts of which it may make more "
        f"than {bounded_encoder.MAX_DIRECT_BYTES // MIB} MiB",
        f"| bytes that a tokenizer may make of a byte | {tokenizer.MAX_GROWTH:,};",
        f"| parts of a tokenizer | {tokenizer.MAX_STEPS} steps and "
        f"{tokenizer.MAX_PART_BYTES // MIB} MiB in each; {tokenizer.MAX_PADDING:,} tokens",
        f"| token of a vocabulary | {tokenizer.MAX_TOKEN_CHARACTERS:,} characters, "
        f"{tokenizer.MAX_TOKEN_TEXT_BYTES // KIB} KiB after",
        f"| added tokens of a tokenizer | {tokenizer.MAX_ADDED_TOKENS:,}, of "
        f"{tokenizer.MAX_ADDED_CHARACTERS:,} characters",
        f"| tokens that a tokenizer adds to a text | {tokenizer.MAX_SPECIAL_TOKENS} |",
        f"| header of a safetensors file | {safetensors_files.MAX_HEADER_BYTES // MIB} MiB",
        f"| metadata of a GGUF file | {gguf_metadata.MAX_METADATA_BYTES // MIB} MiB, "
        f"{gguf_metadata.MAX_ELEMENTS:,} array elements",
    ],
)
def test_a_limit_of_the_page_equals_that_of_the_code(row: str) -> None:
    assert row in PAGE
