"""Grammars and output parsers of generated answers."""

from dataclasses import dataclass

from config.errors import UserError
from config.params.sampling import SamplingParams
from config.params.structured_output import FREE, GrammarSpec, ThinkingSpec
from server.generation.answer_parser import (
    CallParsing,
    ChoiceParsers,
    ParserConfig,
    forced_call_reader,
    tool_schemas,
)
from server.openai.schema.chat import ChatBody
from server.openai.schema.structured import part_of, spec_of_tags
from server.parsers.tool.base import ToolCallReader
from server.parsers.tool.structural_tag import ToolCallGrammar, object_schema
from server.text.tokenizer import Tokenizer

_NO_LEADING_WHITESPACE = ("json", "json_object")
"""Kinds of grammars that never start with whitespace: whitespace after the reasoning is skipped."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Grammar and output parsers of a request."""

    param: str
    """Request field that sets the grammar or the reasoning budget, for errors."""
    grammar: GrammarSpec | None
    parsers: ChoiceParsers | None
    """Output parsers; None: the output is plain text."""
    thinking_budget: int | None = None

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """`params` with the grammar and the reasoning budget."""
        if self.grammar is None and self.thinking_budget is None:
            return params
        return params.replace(
            structured_outputs=self.grammar, thinking_token_budget=self.thinking_budget
        )


def answer_format(
    parser_config: ParserConfig,
    tokenizer: Tokenizer,
    body: ChatBody,
    prompt: str,
    *,
    wants_reasoning: bool,
) -> AnswerFormat:
    """Create the answer format for `prompt`; `body` must have been validated. Raises UserError."""
    if body.thinking_token_budget is not None and parser_config.reasoning_parser is None:
        raise UserError(
            "thinking_token_budget requires a reasoning parser; start the server with "
            "--reasoning-parser NAME",
            param="thinking_token_budget",
        )
    constraint = body.constraint
    if constraint is None:
        return _free_text(parser_config, tokenizer, body, prompt)
    return _constrained(
        parser_config, tokenizer, body, prompt, *constraint, wants_reasoning=wants_reasoning
    )


def _free_text(
    parser_config: ParserConfig, tokenizer: Tokenizer, body: ChatBody, prompt: str
) -> AnswerFormat:
    """Format of free text with optional calls. Calls to strict functions follow their schemas."""
    is_strict = any(tool["function"].get("strict") for tool in body.visible_tools or ())
    call_format = None if body.visible_tools is None else parser_config.tool_call_format
    is_inside = parser_config.starts_inside(prompt, body.continued_text)
    parsers = parser_config.make_parsers(
        tokenizer,
        _call_parsing(body, call_format, finds_stray_calls=not is_strict),
        parser_config.reasoning_parsing(is_inside=is_inside),
    )
    budget = body.thinking_token_budget
    param, grammar = "thinking_token_budget", GrammarSpec(FREE)
    if is_strict:
        calls = _call_grammar(parser_config, body)
        param, grammar = "tools", spec_of_tags("tools", calls.part())
        if calls.whole is not None:
            _refuse_budget(budget)
            return AnswerFormat(param, grammar, parsers)
    elif budget is None:
        return AnswerFormat(param, None, parsers)
    reasoning = parser_config.reasoning_spec(
        prompt,
        body.continued_text,
        is_wanted=True,
        skips_blanks=grammar.kind != FREE,
        is_free=grammar.kind == FREE,
    )
    if reasoning is None and grammar.kind == FREE:
        return AnswerFormat(param, None, parsers)
    return AnswerFormat(
        param, _after_reasoning(reasoning, grammar), parsers, budget if reasoning else None
    )


def _constrained(
    parser_config: ParserConfig,
    tokenizer: Tokenizer,
    body: ChatBody,
    prompt: str,
    param: str,
    grammar: GrammarSpec,
    *,
    wants_reasoning: bool,
) -> AnswerFormat:
    """Format of a constrained answer. `grammar` constrains the text, or the calls if tool_choice
    requires a call. If the model may choose to call tools, the format also has a grammar for the
    calls."""
    skips_blanks = grammar.kind in _NO_LEADING_WHITESPACE
    call_reader: ToolCallReader | None = None
    if body.requires_call:
        call_reader = forced_call_reader(body.forced_name)
    elif body.visible_tools is not None:
        call_reader = parser_config.tool_call_format
        grammar = _or_calls(parser_config, body, param, grammar)
    reasoning = parser_config.reasoning_spec(
        prompt, body.continued_text, is_wanted=wants_reasoning, skips_blanks=skips_blanks
    )
    calls = _call_parsing(body, call_reader)
    if reasoning is None:
        parsers = parser_config.make_parsers(tokenizer, calls, None)
        return AnswerFormat(param, _after_reasoning(None, grammar), parsers)
    parsing = parser_config.reasoning_parsing(
        is_inside=reasoning.is_inside, keeps_whitespace=not reasoning.skips_blanks
    )
    parsers = parser_config.make_parsers(tokenizer, calls, parsing)
    budget = body.thinking_token_budget
    return AnswerFormat(param, _after_reasoning(reasoning, grammar), parsers, budget)


def _call_parsing(
    body: ChatBody, reader: ToolCallReader | None, *, finds_stray_calls: bool = False
) -> CallParsing | None:
    if reader is None:
        return None
    return CallParsing(
        reader=reader,
        tools=tool_schemas(body.visible_tools or ()),
        max_calls=body.max_calls,
        is_named=body.forced_name is not None,
        finds_stray_calls=finds_stray_calls,
    )


def grammar_after_prompt(
    parser_config: ParserConfig, prompt: str, grammar: GrammarSpec
) -> GrammarSpec:
    """`grammar`, extended by the reasoning that may precede it in an answer to `prompt`."""
    reasoning = parser_config.reasoning_spec(
        prompt, None, is_wanted=True, skips_blanks=grammar.kind in _NO_LEADING_WHITESPACE
    )
    return _after_reasoning(reasoning, grammar)


def _refuse_budget(budget: int | None) -> None:
    if budget is not None:
        raise UserError(
            "thinking_token_budget and strict tools cannot be combined with this model; set "
            "strict to false, or tool_choice to required",
            param="thinking_token_budget",
        )


def _after_reasoning(reasoning: ThinkingSpec | None, grammar: GrammarSpec) -> GrammarSpec:
    return GrammarSpec(grammar.kind, grammar.text, reasoning)


def _call_grammar(parser_config: ParserConfig, body: ChatBody) -> ToolCallGrammar:
    """Grammar of the calls that the model may choose to make; only strict functions have
    schemas."""
    functions = [tool["function"] for tool in body.visible_tools or ()]
    return parser_config.tool_call_grammar(
        {
            function["name"]: object_schema(function.get("parameters"))
            if function.get("strict")
            else None
            for function in functions
        }
    )


def _or_calls(
    parser_config: ParserConfig, body: ChatBody, param: str, grammar: GrammarSpec
) -> GrammarSpec:
    is_parallel = body.max_calls is None
    part = _call_grammar(parser_config, body).part_beside(
        part_of(param, grammar), is_parallel=is_parallel
    )
    if part is None:
        raise UserError(
            f"{param} cannot be combined with tools for this model, whose calls start without a "
            "marker; set tool_choice to none, or leave out one of the two",
            param=param,
        )
    return spec_of_tags(param, part)
