"""The terms of a chat's answers: the form that they are held to, and what reads
them. Knows no route and no grammar."""

from dataclasses import dataclass

from config.errors import UserError
from config.params.sampling import SamplingParams
from config.params.structured_output import FREE, GrammarSpec, ThinkingSpec
from server.generation.answer_parser import (
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

_WITHOUT_BLANKS = ("json", "json_object")
"""Kinds of forms that no blank begins: those between thinking and form can be told from it."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How one request is answered."""

    field: str
    """Of the request, which asks for the form."""
    form: GrammarSpec | None
    answers: ChoiceParsers | None
    """What reads the answers; None: they are text."""
    thinking_budget: int | None = None

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """`params` under these terms."""
        if self.form is None and self.thinking_budget is None:
            return params
        return params.replace(
            structured_outputs=self.form, thinking_token_budget=self.thinking_budget
        )


def answer_format(
    forms: ParserConfig, tokenizer: Tokenizer, body: ChatBody, prompt: str
) -> AnswerFormat:
    """The terms of answers to `prompt`, made from `body`, which was checked. Raises UserError."""
    if body.thinking_token_budget is not None and forms.reasoning_parser is None:
        raise UserError(
            "thinking_token_budget needs a server that knows how its model thinks; start it with "
            "--reasoning-parser NAME",
            param="thinking_token_budget",
        )
    asked = body.form
    if asked is None:
        return _of_text(forms, tokenizer, body, prompt)
    return _of_form(forms, tokenizer, body, prompt, *asked)


def _of_text(
    forms: ParserConfig, tokenizer: Tokenizer, body: ChatBody, prompt: str
) -> AnswerFormat:
    """Text, and calls as the model likes, of which some may be held to their schemas."""
    tools = None if body.shown_tools is None else tool_schemas(body.shown_tools)
    answers = forms.make_parsers(tokenizer, prompt, tools, body.max_calls, body.begun_text)
    budget = body.thinking_token_budget
    field, form = "thinking_token_budget", GrammarSpec(FREE)
    if any(tool["function"].get("strict") for tool in body.shown_tools or ()):
        calls = _calls(forms, body)
        field, form = "tools", spec_of_tags("tools", calls.part())
        if calls.whole is not None:
            _refuse_budget(budget)
            return AnswerFormat(field, form, answers)
    elif budget is None:
        return AnswerFormat(field, None, answers)
    thinking = forms.reasoning_spec(
        prompt,
        body.begun_text,
        is_wanted=True,
        skips_blanks=form.kind != FREE,
        is_free=form.kind == FREE,
    )
    if thinking is None and form.kind == FREE:
        return AnswerFormat(field, None, answers)
    return AnswerFormat(field, _behind(thinking, form), answers, budget if thinking else None)


def _of_form(
    forms: ParserConfig,
    tokenizer: Tokenizer,
    body: ChatBody,
    prompt: str,
    field: str,
    form: GrammarSpec,
) -> AnswerFormat:
    """A form that the answer must have, or a call instead of it where the model may choose."""
    skips_blanks = form.kind in _WITHOUT_BLANKS
    family: ToolCallReader | None = None
    if body.must_call:
        family = forced_call_reader(body.forced_name)
    elif body.shown_tools is not None:
        family = forms.tool_call_format
        form = _or_calls(forms, body, field, form)
    thinking = forms.reasoning_spec(
        prompt, body.begun_text, is_wanted=body.wants_thinking, skips_blanks=skips_blanks
    )
    answers = forms.make_constrained_parsers(
        tokenizer,
        thinking,
        family,
        tool_schemas(body.shown_tools or []),
        max_calls=body.max_calls,
        is_named=body.forced_name is not None,
    )
    budget = None if thinking is None else body.thinking_token_budget
    return AnswerFormat(field, _behind(thinking, form), answers, budget)


def _refuse_budget(budget: int | None) -> None:
    if budget is not None:
        raise UserError(
            "thinking_token_budget and strict tools cannot be had together with this model; set "
            "strict to false, or tool_choice to required",
            param="thinking_token_budget",
        )


def _behind(thinking: ThinkingSpec | None, form: GrammarSpec) -> GrammarSpec:
    return GrammarSpec(form.kind, form.text, thinking)


def _calls(forms: ParserConfig, body: ChatBody) -> ToolCallGrammar:
    """The calls that the model may choose to make."""
    functions = [tool["function"] for tool in body.shown_tools or ()]
    return forms.tool_call_grammar(
        {
            one["name"]: object_schema(one.get("parameters")) if one.get("strict") else None
            for one in functions
        }
    )


def _or_calls(forms: ParserConfig, body: ChatBody, field: str, form: GrammarSpec) -> GrammarSpec:
    is_parallel = body.max_calls is None
    part = _calls(forms, body).part_beside(part_of(field, form), is_parallel=is_parallel)
    if part is None:
        raise UserError(
            f"{field} cannot be had beside tools with this model, whose calls begin without a mark "
            "that tells them from text; set tool_choice, or leave out one of the two",
            param=field,
        )
    return spec_of_tags(field, part)
