"""The terms of a chat's answers: the form that they are held to, and what reads
them. Knows no route and no grammar."""

from dataclasses import dataclass

from config.errors import UserError
from config.grammar import FREE, GrammarSpec
from config.sampling import SamplingParams
from server.reading import Answers, Forms, schemas_of
from server.schema.chat import ChatBody
from server.text.tokenizer import Tokenizer

_WITHOUT_BLANKS = ("json", "json_object")
"""Kinds of forms that no blank begins: those between thinking and form can be told from it."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How one request is answered."""

    field: str
    """Of the request, which asks for the form."""
    form: GrammarSpec | None
    answers: Answers | None
    """What reads the answers; None: they are text."""
    thinking_budget: int | None = None

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """`params` under these terms."""
        return params.replace(
            structured_outputs=self.form, thinking_token_budget=self.thinking_budget
        )


def terms_of(forms: Forms, tokenizer: Tokenizer, body: ChatBody, prompt: str) -> Terms:
    """The terms of answers to `prompt`, made from `body`, which was checked. Raises UserError."""
    tools = None if body.shown_tools is None else schemas_of(body.shown_tools)
    begun = body.last_text if body.continue_final_message else None
    budget = body.thinking_token_budget
    if budget is not None and forms.thinking is None:
        raise UserError(
            "thinking_token_budget needs a server that knows how its model thinks; start it with "
            "--reasoning-parser NAME",
            param="thinking_token_budget",
        )
    found = body.grammar
    if found is None:
        max_calls = 1 if body.parallel_tool_calls is False else None
        answers = forms.answers(tokenizer, prompt, tools, max_calls, begun)
        thinking = None
        if budget is not None:
            thinking = forms.thinking_before(prompt, begun, is_wanted=True, skips_blanks=False)
        free = None if thinking is None else GrammarSpec(FREE, thinking=thinking)
        return Terms("thinking_token_budget", free, answers, None if free is None else budget)
    field, form = found
    thinking = forms.thinking_before(
        prompt,
        begun,
        is_wanted=body.wants_thinking,
        skips_blanks=form.kind in _WITHOUT_BLANKS,
    )
    answers = forms.held_answers(tokenizer, thinking, tools, body.forced_name)
    held = GrammarSpec(form.kind, form.text, thinking)
    return Terms(field, held, answers, None if thinking is None else budget)
