"""One-line descriptions of body fields for /openapi.json and docs/api.md; a field's own description
takes precedence."""

from collections.abc import Mapping
from typing import Any

from config.params.sampling import MAX_LOGPROBS, MAX_N
from server.openai.responses.schema import WITH_LOGPROBS
from server.openai.schema.completions import MAX_PROMPTS
from server.openai.schema.generation import MAX_REQUEST_ID_CHARACTERS, MAX_SALT_CHARACTERS
from server.pooling.schema import MAX_INPUTS

_NO_EFFECT = "Taken, and without effect."

SHARED: Mapping[str, str] = {
    # What is asked.
    "messages": "The conversation, at least one message.",
    "documents": "For the chat template.",
    "add_generation_prompt": "Whether the prompt ends with the start of an answer; default true.",
    "continue_final_message": "Go on with the last message; not beside add_generation_prompt true.",
    "chat_template": "A template for this request; only with `--trust-request-chat-template`.",
    "chat_template_kwargs": "Variables for the chat template.",
    "add_special_tokens": "Whether the tokenizer adds its own, such as a BOS; default false.",
    "truncate_prompt_tokens": "Keep the last so many tokens of the prompt; -1: what fits.",
    "prompt": f"A text or token ids, or a list of up to {MAX_PROMPTS} of either.",
    # Tools and thinking.
    "tools": "Functions that the model may call.",
    "tool_choice": "auto (the default with tools), none, required, or one function by its name.",
    "parallel_tool_calls": "false: one call at most.",
    "reasoning_effort": "For the template; sets enable_thinking there, false for none.",
    "include_reasoning": "false: thinking is left out of the answer; default true.",
    # How much, and where it ends.
    "n": f"Choices for each prompt, 1 to {MAX_N}; default 1.",
    "min_tokens": "No end before so many tokens, 0 to max_tokens; default 0.",
    "stop": "One text or several that end the output, which then does not hold them.",
    "stop_token_ids": "Tokens that end the output; their texts are left out.",
    "include_stop_str_in_output": "Keep the stop text; default false.",
    "ignore_eos": "Go on behind the end token; default false.",
    # Sampling.
    "temperature": "0 to 2; 0 takes the likeliest token. Default: the model's own, or 1.",
    "top_p": "Above 0, to 1: the likeliest tokens that add up to it. Default: the model's, or 1.",
    "top_k": "So many of the likeliest tokens; 0 or -1 is off. Default: the model's, or off.",
    "min_p": "0 to 1: only tokens this likely beside the likeliest. Default: the model's, or 0.",
    "seed": "The same seed gives the same output; each choice draws from a stream of its own.",
    "presence_penalty": "-2 to 2, for tokens that were generated; default 0.",
    "frequency_penalty": "-2 to 2, for each time that a token was generated; default 0.",
    "repetition_penalty": "Above 0, over prompt and output; 1 is off. Default: the model's, or 1.",
    "logit_bias": "Token id, as a string, to -100 (never) to 100 (always).",
    "bad_words": "Texts that are never generated.",
    "allowed_token_ids": "The only tokens that may be generated.",
    "length_penalty": "Exponent of the length that a beam's score is divided by; default 1.",
    # Forms.
    "response_format": "text, json_object, json_schema or structural_tag.",
    "structured_outputs": "One of json, json_object, regex, choice, grammar, structural_tag.",
    "guided_json": "As structured_outputs.json.",
    "guided_json_object": "As structured_outputs.json_object.",
    "guided_regex": "As structured_outputs.regex.",
    "guided_choice": "As structured_outputs.choice.",
    "guided_grammar": "As structured_outputs.grammar.",
    "json_schema": "As structured_outputs.json.",
    "regex": "As structured_outputs.regex.",
    "ebnf": "As structured_outputs.grammar.",
    "grammar": "As structured_outputs.grammar.",
    "structural_tag": "As structured_outputs.structural_tag.",
    # What is told.
    "stream": "Server-sent events instead of one answer; default false.",
    "stream_options": "Only with stream.",
    "include_usage": "One more chunk at the end, without choices, with the usage.",
    "continuous_usage_stats": "The usage so far in every chunk; needs include_usage.",
    "prompt_logprobs": f"0 to {MAX_LOGPROBS}: of each prompt token; not with stream.",
    "echo": "The prompt (in a chat, the last message) stands before the answer; default false.",
    "skip_special_tokens": "Leave control tokens out of the text; default true.",
    "spaces_between_special_tokens": "Only for tokenizers that put spaces there; default true.",
    "return_token_ids": "Token ids of prompt and output beside their texts; default false.",
    "return_tokens_as_token_ids": "Log-probabilities name tokens as `token_id:5`; default false.",
    "return_token_strs": "The text of each token too; default false.",
    # The request itself.
    "model": "A served name; null is the first one.",
    "priority": "Lower is served first; other than 0 only with `--scheduling-policy priority`.",
    "request_id": f"Part of the answer's id: 1 to {MAX_REQUEST_ID_CHARACTERS} visible characters.",
    "cache_salt": f"Prompts share cached blocks only under one salt: 1 to {MAX_SALT_CHARACTERS} "
    "characters, none of them @, / or \\.",
    "metadata": _NO_EFFECT,
    "modalities": 'Only `["text"]`.',
    "prompt_cache_key": _NO_EFFECT,
    "safety_identifier": _NO_EFFECT,
    "service_tier": _NO_EFFECT,
    "store": _NO_EFFECT,
    "user": _NO_EFFECT,
    "verbosity": _NO_EFFECT,
    # Vectors and scores.
    "input": f"A text or token ids, or a list of up to {MAX_INPUTS} of either.",
    "encoding_format": "float (the default), or base64: little-endian float32.",
    "dimensions": "Shorter vectors, where the model was trained for them.",
    "task": "null: the first of these that the model can.",
    # Tokens.
    "tokens": "Token ids.",
}
"""By the field's name, wherever it stands."""

OWN: Mapping[str, Mapping[str, str]] = {
    "ChatBody": {
        "logprobs": "Log-probabilities of the generated tokens; default false.",
        "top_logprobs": f"0 to {MAX_LOGPROBS}: so many likeliest tokens too; needs logprobs.",
    },
    "CompletionBody": {
        "add_special_tokens": "Whether a text gets the tokenizer's own; default true.",
        "logprobs": f"0 to {MAX_LOGPROBS}: so many likeliest tokens of each position.",
    },
    "ResponseBody": {
        "background": "Answer at once, and make the response meanwhile; needs store.",
        "include": f"{WITH_LOGPROBS} and others, which add nothing here.",
        "input": "A text, or items. May be absent only with previous_response_id.",
        "previous_response_id": "Of a response that this one follows on.",
        "reasoning": "How much to think.",
        "store": "false: the response is not kept; default true.",
        "text": "The form of the text.",
        "thinking_token_budget": "Thinking is closed after so many tokens of it.",
        "tools": "Functions that the model may call; hosted tools are refused.",
        "truncation": "auto: too long a conversation loses its oldest turns; default disabled.",
    },
    "ReasoningOptions": {
        "effort": "As reasoning_effort of a chat.",
        "summary": _NO_EFFECT,
    },
    "TextOptions": {"format": "text, json_object or json_schema."},
    "ScoreBody": {
        "text_1": "A text, or as many as there are second ones.",
        "text_2": "A text or several.",
        "queries": "As text_1.",
        "documents": "As text_2, beside queries.",
        "items": "As text_2, beside queries.",
        "data_1": "As text_1.",
        "data_2": "As text_2.",
    },
    "RerankBody": {
        "documents": "The texts to be sorted.",
        "query": "The text that they are held against.",
    },
    "TokenizeTextBody": {
        "add_special_tokens": "Whether the tokenizer adds its own; default true.",
        "prompt": "The text.",
    },
    "MessagesBody": {
        "max_tokens": "Tokens that may be generated, at least 1.",
        "metadata": _NO_EFFECT,
        "stop_sequences": "Texts that end the answer, which then does not hold them; as many as "
        "`--max-stop-strings` allows.",
    },
    "CountBody": {
        "output_config": "effort, and format: a JSON schema that the answer is held to.",
        "system": "A text or text blocks, before the messages.",
        "thinking": "Whether the model thinks first, and for how many tokens.",
        "tool_choice": "auto (the default with tools), any, tool with a name, or none.",
        "tools": "Each with name, description and input_schema.",
    },
    "ToolChoice": {
        "disable_parallel_tool_use": "true: one call at most.",
        "name": "The tool that must be called, for type tool.",
        "type": "auto, any (one must be called), tool (that one must), none.",
    },
    "ThinkingChoice": {
        "budget_tokens": "Tokens of thinking at most; for type enabled, at least 1.",
        "display": "omitted: the thinking is left out of the answer.",
        "type": "enabled, disabled or adaptive.",
    },
    "OutputConfig": {
        "effort": "As reasoning_effort of a chat.",
        "format": "The form of the text.",
    },
    "OutputFormat": {"schema": "A JSON schema.", "type": "Only json_schema."},
}
"""By body and field: what means something else there than elsewhere."""
_PARENTS = {"MessagesBody": "CountBody"}
"""Whose own meanings hold for which others."""


def meaning(body: str, field: str) -> str | None:
    """What `field` of the body named so means."""
    for name in (body, _PARENTS.get(body, body)):
        if field in OWN.get(name, {}):
            return OWN[name][field]
    return SHARED.get(field)


def explain(definitions: Mapping[str, Any]) -> None:
    """Give each property of these JSON schemas its meaning, unless it has a description."""
    for name, definition in definitions.items():
        for field, schema in definition.get("properties", {}).items():
            text = meaning(name, field)
            if text is not None:
                schema.setdefault("description", text)
