"""The limits in docs/security.md equal those of the code."""

from pathlib import Path

import pytest

from config import expressions
from config.checkpoint import gguf_metadata, safetensors_files
from config.lora import adapter, adapter_folder, peft_config
from config.model import json_fields as fields
from config.params import structured_output as grammar
from config.server import ServerConfig
from engine.core import adapter_reader
from engine.scheduling import lora_slots
from engine.structured_output import bounds as grammar_bounds
from engine.structured_output import compilation, json_schema
from server.http import json_decoder
from server.http import protocol as http_protocol
from server.process import open_files
from server.text import chat_template as template
from server.text import isolated_template
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
        f"| pattern | {grammar_bounds.MAX_PATTERN_SIZE:,} characters with repetitions expanded, "
        f"{grammar_bounds.MAX_PATTERN_OPTIONS:,} of them optional",
        f"| grammar | {grammar_bounds.MAX_RULES:,} rules, {grammar_bounds.MAX_RULE_DEPTH} on a "
        f"path, {grammar_bounds.MAX_EXPRESSIONS:,} expressions",
        f"| grammars that wait to be compiled | {compilation.MAX_PENDING}, then 503",
        f"| cached grammars | {compilation.MAX_CACHED + compilation.MAX_PENDING}, and "
        f"{compilation.MAX_CACHED_BYTES // MIB} MiB",
        f"| prompt rendered by a template | {renderer.MAX_CHARACTERS // MIB} Mi characters",
        f"| stored responses | {DEFAULTS.responses_store_max_count:,}, "
        f"{DEFAULTS.responses_store_max_bytes // MIB} MiB, one day",
        f"| JSON files of a checkpoint | {fields.MAX_JSON_BYTES // MIB} MiB;",
        f"| header of a safetensors file | {safetensors_files.MAX_HEADER_BYTES // MIB} MiB; of an "
        f"adapter {adapter_folder.MAX_HEADER_BYTES // MIB} MiB, with names of "
        f"{adapter_folder.MAX_NAME_CHARACTERS:,} characters",
        f"| `adapter_config.json` | {adapter_folder.MAX_CONFIG_BYTES // MIB} MiB, "
        f"{adapter_folder.MAX_CONFIG_VALUES:,} values, {adapter_folder.MAX_CONFIG_OBJECTS:,} lists "
        f"and objects, {peft_config.MAX_TARGETS:,} `target_modules`",
        f"| regular expressions of one field of a file | {expressions.MAX_EXPRESSIONS:,}, each of "
        f"{expressions.MAX_EXPRESSION_CHARACTERS:,} characters, in total "
        f"{expressions.MAX_TOTAL_CHARACTERS:,}; counts in braces up to "
        f"{expressions.MAX_REPETITIONS:,}, in total {expressions.MAX_TOTAL_REPETITIONS:,}; "
        f"{expressions.MAX_MEMORY_BYTES // MIB} MiB for each {expressions.PROGRAM_EXPRESSIONS}",
        f"| time to match them | {expressions.CPU_S:g} s of CPU time and "
        f"{expressions.CPU_S_PER_NAME * 1e3:g} ms for each name",
        f"| weights of an adapter | finite, at most {adapter.MAX_VALUE:,.0f};",
        f"| adapters | {lora_slots.MAX_ADAPTERS:,} served; {adapter_reader.MAX_PENDING} wait",
        f"| metadata of a GGUF file | {gguf_metadata.MAX_METADATA_BYTES // MIB} MiB, "
        f"{gguf_metadata.MAX_ELEMENTS:,} array elements",
    ],
)
def test_a_limit_of_the_page_equals_that_of_the_code(row: str) -> None:
    assert row in PAGE
