"""Registry of parsers by the names of --tool-call-parser and --reasoning-parser, and resolution of
`auto` by the chat template."""

import secrets
import string
from collections.abc import Mapping
from dataclasses import fields

from server.parsers import harmony
from server.parsers.reasoning import tags as reasoning
from server.parsers.reasoning.tags import ReasoningFormat
from server.parsers.tool import apertus as apertus_calls
from server.parsers.tool import elements as element_calls
from server.parsers.tool import gemma as gemma_calls
from server.parsers.tool import hy3 as hy3_calls
from server.parsers.tool import json as json_calls
from server.parsers.tool import pythonic as llama_calls
from server.parsers.tool import xml_families as xml_calls
from server.parsers.tool.base import ToolCallFormat, ToolCallReader

TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = {
    "hermes": json_calls.HERMES,
    "qwen25": json_calls.HERMES,
    "llama3_json": json_calls.LLAMA3_JSON,
    "llama4_json": json_calls.LLAMA3_JSON,
    "pythonic": llama_calls.PYTHONIC,
    "llama4_pythonic": llama_calls.LLAMA4_PYTHONIC,
    "mistral": json_calls.MISTRAL,
    "granite": json_calls.GRANITE,
    "granite-20b-fc": json_calls.GRANITE_20B,
    "granite4": json_calls.HERMES,
    "ernie45": json_calls.HERMES,
    "longcat": json_calls.LONGCAT,
    "gigachat3": json_calls.GIGACHAT,
    "cohere_command3": json_calls.COHERE,
    "cohere_command4": json_calls.COHERE,
    "inkling": json_calls.INKLING,
    "apertus": apertus_calls.APERTUS,
    "deepseek_v3": json_calls.DEEPSEEK,
    "deepseek_v31": json_calls.DEEPSEEK,
    "deepseek_v32": xml_calls.DSML,
    "deepseek_v4": xml_calls.DSML,
    "qwen3_coder": xml_calls.QWEN3_CODER,
    "qwen3_xml": xml_calls.QWEN3_CODER,
    "mimo": xml_calls.QWEN3_CODER,
    "step3p5": xml_calls.QWEN3_CODER,
    "glm45": xml_calls.GLM,
    "glm47": xml_calls.GLM,
    "ling3": xml_calls.GLM,
    "poolside_v1": xml_calls.GLM,
    "kimi_k2": json_calls.KIMI,
    "kimi_k3": xml_calls.KIMI_K3,
    "minimax_m2": xml_calls.MINIMAX,
    "minimax_m3": element_calls.MINIMAX_M3,
    # The parser that vLLM's plug-in for Gaudi adds.
    "minimax_m3_py": element_calls.MINIMAX_M3,
    "seed_oss": xml_calls.SEED,
    "jamba": json_calls.JAMBA,
    "hunyuan_a13b": json_calls.JAMBA,
    "internlm": json_calls.INTERNLM,
    "phi4_mini_json": json_calls.PHI4_MINI,
    "xlam": json_calls.XLAM,
    "lfm2": llama_calls.LFM2,
    "olmo3": llama_calls.OLMO3,
    "hunyuan": xml_calls.HUNYUAN,
    "hy_v3": hy3_calls.HY3,
    "dots": xml_calls.DOTS,
    "minicpm5": xml_calls.MINICPM5,
    "muse_glimmer": xml_calls.MUSE_GLIMMER,
    "step3": xml_calls.STEP3,
    "functiongemma": gemma_calls.FUNCTIONGEMMA,
    "gemma4": gemma_calls.GEMMA4,
    "openai": harmony.HARMONY_TOOL_CALLS,
}

GENERIC_TOOL_PARSER = "hermes"
"""Parser of the call format in the instructions of server/text/tool_template.py."""

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": reasoning.DEEPSEEK_R1,
    "deepseek_v3": reasoning.THINK,
    "deepseek_v4": reasoning.THINK,
    "qwen3": reasoning.THINK,
    "mimo": reasoning.THINK,
    "nemotron_v3": reasoning.THINK,
    "glm45": reasoning.THINK,
    "glm47": reasoning.THINK,
    "ling3": reasoning.THINK,
    "poolside_v1": reasoning.THINK,
    "olmo3": reasoning.THINK,
    "hy_v3": reasoning.HY3,
    "holo2": reasoning.DEEPSEEK_R1,
    "ernie45": reasoning.ERNIE,
    "cohere_command3": reasoning.COHERE,
    "cohere_command4": reasoning.COHERE,
    "inkling": reasoning.INKLING,
    "muse_glimmer": reasoning.MUSE_GLIMMER,
    "granite": reasoning.GRANITE,
    "mistral": reasoning.MISTRAL,
    "hunyuan_a13b": reasoning.HUNYUAN,
    "seed_oss": reasoning.SEED,
    "kimi_k2": reasoning.KIMI,
    "kimi_k3": reasoning.KIMI_K3,
    "minimax_m2": reasoning.DEEPSEEK_R1,
    "minimax_m2_append_think": reasoning.SHOWN_THINK,
    "minimax_m3": reasoning.MINIMAX_M3,
    "step3": reasoning.DEEPSEEK_R1,
    "step3p5": reasoning.DEEPSEEK_R1,
    "gemma4": reasoning.GEMMA4,
    "openai_gptoss": harmony.HARMONY_REASONING,
}

_CALLS_BY_TEMPLATE: tuple[tuple[str, str], ...] = (
    ("<|constrain|>", "openai"),
    ("]<]minimax[>[", "minimax_m3"),
    ("<|tool_call>", "gemma4"),
    ("<start_function_call>", "functiongemma"),
    ("<steptml:", "step3"),
    ("<arg_key{}>", "hy_v3"),
    (":opensource>", "hy_v3"),
    ("<tool_sep>", "hunyuan"),
    ("<\uff5cDSML\uff5c", "deepseek_v32"),
    ("<\uff5ctool\u2581call\u2581begin\uff5c>", "deepseek_v3"),
    ("<|tool_call_begin|>", "kimi_k2"),
    ("<|open|>", "kimi_k3"),
    ("<|content_invoke_tool_json|>", "inkling"),
    ("<atem:", "muse_glimmer"),
    ("<|START_ACTION|>", "cohere_command3"),
    ("<|tools_prefix|>", "apertus"),
    ("<dots_function_call>", "dots"),
    ("<longcat_tool_call>", "longcat"),
    ("<|function_call|>", "gigachat3"),
    ("function call<|role_sep|>", "gigachat3"),
    ("<function name=", "minicpm5"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|python_start|>", "llama4_pythonic"),
    ("<|action_start|>", "internlm"),
    ("functools[", "phi4_mini_json"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters":', "llama3_json"),
    ("<function_call>", "granite-20b-fc"),
    ("<|tool_call|>", "granite"),
    ("<tool_calls>", "jamba"),
    ("<function_calls>", "olmo3"),
    ("<tool_call>", "hermes"),
)
"""Text in a chat template, and its tool parser. The first match counts: most specific text
first."""

_THINKING_BY_TEMPLATE: tuple[tuple[str, str], ...] = (
    ("<|constrain|>", "openai_gptoss"),
    ("<|channel>", "gemma4"),
    ("<mm:think>", "minimax_m3"),
    ("<steptml:", "step3"),
    ("<|open|>", "kimi_k3"),
    ("<|content_thinking|>", "inkling"),
    ("to=self", "muse_glimmer"),
    ("<|START_THINKING|>", "cohere_command3"),
    ("<arg_key{}>", "hy_v3"),
    (":opensource>", "hy_v3"),
    ("<response>", "ernie45"),
    ("[THINK]", "mistral"),
    ("<seed:think>", "seed_oss"),
    ("\u25c1/think\u25b7", "kimi_k2"),
    ("Here is my thought process:", "granite"),
    ("<answer>", "hunyuan_a13b"),
    ("<|extra_4|>", "hunyuan_a13b"),
    ("think>", "qwen3"),
)


def tool_parser_of(template: str) -> str | None:
    """The name of the tool parser for a chat template; None if it is not recognised."""
    return _first(_CALLS_BY_TEMPLATE, template)


def reasoning_parser_of(template: str) -> str | None:
    """The name of the reasoning parser for a chat template; None if it is not recognised."""
    return _first(_THINKING_BY_TEMPLATE, template)


def _first(table: tuple[tuple[str, str], ...], template: str) -> str | None:
    return next((name for words, name in table if words in template), None)


def words_of(form: ToolCallReader | ReasoningFormat) -> frozenset[str]:
    """All texts that a parser searches for; some may be special tokens."""
    values = [getattr(form, field.name) for field in fields(form)]
    inner = [words_of(value) for value in values if isinstance(value, ToolCallReader)]
    words = [word for value in values for word in (value if isinstance(value, tuple) else (value,))]
    return frozenset(word for word in words if isinstance(word, str) and word).union(*inner)


def new_call_id(parser: str) -> str:
    """A new id for a call whose id the model did not write."""
    if parser == "mistral":
        # Mistral's templates accept only nine letters and digits.
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
