"""One-line descriptions of body fields for /openapi.json and docs/api-fields.md; a description on
the field itself takes precedence."""

from collections.abc import Mapping
from typing import Any

from config.params.sampling import MAX_LOGPROBS, MAX_N
from server.http.body_bounds import (
    MAX_LABEL_CHARACTERS,
    MAX_METADATA_KEY_CHARACTERS,
    MAX_METADATA_PAIRS,
    MAX_METADATA_VALUE_CHARACTERS,
    MAX_SAFETY_IDENTIFIER_CHARACTERS,
    MAX_USER_ID_CHARACTERS,
)
from server.openai.responses.schema import WITH_LOGPROBS
from server.openai.schema.completions import MAX_PROMPTS
from server.openai.schema.generation import (
    MAX_REQUEST_ID_CHARACTERS,
    MAX_SALT_CHARACTERS,
    MAX_STOP_CHARACTERS,
)
from server.openai.schema.structured import FIELDS
from server.pooling.schema import MAX_INPUTS

_NO_EFFECT = "Accepted without effect."
_LABELS = ("prompt_cache_key", "service_tier", "user", "verbosity")

SHARED: Mapping[str, str] = {
    # The prompt.
    "messages": "The conversation, at least one message.",
    "documents": "Variable for the chat template.",
    "add_generation_prompt": "Whether the prompt ends with the start of an answer; default true.",
    "continue_final_message": "Continue the last message; not with add_generation_prompt true.",
    "chat_template": "Template of this request; only with `--trust-request-chat-template`.",
    "chat_template_kwargs": "Variables for the chat template; override "
    "`--default-chat-template-kwargs`.",
    "add_special_tokens": "Whether the tokenizer adds special tokens, such as BOS; default false.",
    "truncate_prompt_tokens": "Keep only the last tokens of the prompt; -1: as many as fit.",
    "truncation_side": "The side that truncate_prompt_tokens cuts off; default left.",
    "prompt": f"A text or token ids, or a list of up to {MAX_PROMPTS} of either.",
    # Tools and reasoning.
    "tools": "Functions that the model may call.",
    "tool_choice": "auto (the default with tools), none, required, a named function, or "
    "allowed_tools.",
    "parallel_tool_calls": "false: at most one tool call.",
    "reasoning_effort": "Variable for the chat template; also sets enable_thinking (none: false, "
    "others: true).",
    "include_reasoning": "false: no reasoning in the answer; default true.",
    # Number and length of the choices.
    "n": f"Choices for each prompt, 1 to {MAX_N}; default 1.",
    "min_tokens": "Minimum number of generated tokens, 0 to max_tokens; default 0.",
    "stop": "One stop string or several (4, `--max-stop-strings`), each of up to "
    f"{MAX_STOP_CHARACTERS:,} characters; the output does not contain them.",
    "stop_token_ids": "Tokens that end the output; their text is left out.",
    "include_stop_str_in_output": "Whether the output contains the stop text; default false.",
    "ignore_eos": "Whether to continue after the end token; default false.",
    # Sampling.
    "temperature": "0 to 2; 0 is greedy. Default: the model's own, or 1.",
    "top_p": "Above 0 and at most 1: nucleus sampling. Default: the model's, or 1.",
    "top_k": "Number of tokens to sample from; 0 or -1: all. Default: the model's, or all.",
    "min_p": "0 to 1: minimum probability relative to the most likely token. Default: the model's, "
    "or 0.",
    "seed": "The same seed gives the same output; each choice has its own random stream.",
    "presence_penalty": "-2 to 2, for tokens in the output; default 0.",
    "frequency_penalty": "-2 to 2, multiplied by the count of a token in the output; default 0.",
    "repetition_penalty": "Above 0, over prompt and output; 1 is off. Default: the model's, or 1.",
    "logit_bias": "Token id, as a string, to -100 (never) to 100 (always).",
    "bad_words": "Texts that are never generated.",
    "allowed_token_ids": "The only tokens that may be generated.",
    "length_penalty": "A beam's score is divided by its length to this power; default 1.",
    # Adapters.
    "lora_name": "Name of the adapter; requests select it as their `model`.",
    "lora_path": "Folder or GGUF file of the adapter, below `--lora-dir`.",
    "base_model_name": "Parent of the adapter in the list of models; default: the served model.",
    "lora_int_id": _NO_EFFECT,
    # Structured output.
    "response_format": "text, json_object, json_schema or structural_tag.",
    "structured_outputs": "An object with exactly one of json, json_object, regex, choice, "
    "grammar, structural_tag.",
    **{name: f"Same as structured_outputs.{kind}." for name, kind in FIELDS.items()},
    # The answer.
    "stream": "Server-sent events instead of a single answer; default false.",
    "stream_options": "Only with stream.",
    "include_usage": "Send a last chunk with the usage and without choices; default: "
    "`--enable-force-include-usage`.",
    "continuous_usage_stats": "Whether every chunk has the usage so far; needs include_usage.",
    "prompt_logprobs": f"0 to {MAX_LOGPROBS}: number of most likely tokens to return for each "
    "prompt token; not with stream.",
    "echo": "Return the prompt (in a chat, the last message) before the answer; default false.",
    "skip_special_tokens": "Leave control tokens out of the text; default true.",
    "spaces_between_special_tokens": "Whether to put spaces between special tokens, if the "
    "tokenizer does so; default true.",
    "return_token_ids": "Also return the token ids of prompt and output; default false.",
    "return_tokens_as_token_ids": "Log-probabilities name tokens as `token_id:5`; default: "
    "`--return-tokens-as-token-ids`.",
    "return_token_strs": "Also return each token as it is in the vocabulary; default false.",
    # The request itself.
    "model": "A served name; default: the first served name.",
    "priority": "Lower values are served first; values other than 0 need "
    "`--scheduling-policy priority`.",
    "timeout": "Seconds from the request's arrival until it is ended with a 504; also the header "
    "`X-Request-Timeout`.",
    "request_id": f"Part of the answer's id: 1 to {MAX_REQUEST_ID_CHARACTERS} visible characters.",
    "cache_salt": f"Prompts with the same salt share cached blocks: 1 to {MAX_SALT_CHARACTERS} "
    "characters other than @, / and \\.",
    "modalities": 'Only `["text"]`.',
    "store": _NO_EFFECT,
    "metadata": f"{_NO_EFFECT} Up to {MAX_METADATA_PAIRS} pairs; keys have up to "
    f"{MAX_METADATA_KEY_CHARACTERS} characters, values are strings of up to "
    f"{MAX_METADATA_VALUE_CHARACTERS}.",
    "safety_identifier": f"{_NO_EFFECT} Up to {MAX_SAFETY_IDENTIFIER_CHARACTERS} characters.",
    **dict.fromkeys(_LABELS, f"{_NO_EFFECT} Up to {MAX_LABEL_CHARACTERS} characters."),
    "user_id": f"{_NO_EFFECT} Up to {MAX_USER_ID_CHARACTERS} characters.",
    # Vectors and scores.
    "input": f"A text or token ids, or a list of up to {MAX_INPUTS} of either.",
    "encoding_format": "float (the default), or base64: little-endian float32.",
    "dimensions": "Length of the vectors, for models that were trained for shorter ones.",
    "task": "What to compute; null: the first of these tasks that the model supports.",
    # Tokens.
    "tokens": "Token ids.",
    "token_ids": "The prompt.",
    "sampling_params": "Sampling parameters with vLLM's names; default: neutral values, and "
    "for max_tokens the rest of the context.",
}
"""Field name -> description, for all bodies."""

OVERRIDES: Mapping[str, Mapping[str, str]] = {
    "ChatBody": {
        "logprobs": "Log-probabilities of the generated tokens; default false.",
        "top_logprobs": f"0 to {MAX_LOGPROBS}: number of most likely tokens per position; needs "
        "logprobs.",
    },
    "CompletionBody": {
        "add_special_tokens": "Whether the tokenizer adds special tokens to a text; default true.",
        "logprobs": f"0 to {MAX_LOGPROBS}: number of most likely tokens per position.",
    },
    "ResponseBody": {
        "background": "Return at once and generate in the background; needs store.",
        "include": f"{WITH_LOGPROBS}; others have no effect.",
        "input": "A text or a list of items; may be absent only with previous_response_id.",
        "previous_response_id": "The response to continue.",
        "reasoning": "Reasoning options.",
        "store": "false: the response is not stored; default true.",
        "text": "Output format.",
        "thinking_token_budget": "Maximum number of reasoning tokens.",
        "tools": "Functions that the model may call, also in namespaces; other tools are ignored.",
        "truncation": "auto: drop the oldest messages if the prompt is too long; default disabled.",
    },
    "ReasoningOptions": {
        "effort": "Same as reasoning_effort of a chat.",
        "summary": _NO_EFFECT,
    },
    "ContextManagement": {"edits": _NO_EFFECT},
    "TextOptions": {"format": "text, json_object or json_schema."},
    "ScoreBody": {
        "text_1": "A text, or as many texts as text_2 has.",
        "text_2": "A text or several.",
        "queries": "Same as text_1.",
        "documents": "Same as text_2; used together with queries.",
        "items": "Same as text_2; used together with queries.",
        "data_1": "Same as text_1.",
        "data_2": "Same as text_2.",
    },
    "RerankBody": {
        "documents": "The texts to rank.",
        "query": "The text that the documents are compared with.",
    },
    "TokenizeTextBody": {
        "add_special_tokens": "Whether the tokenizer adds special tokens; default true.",
        "prompt": "The text.",
    },
    "MessagesBody": {
        "max_tokens": "Maximum generated tokens, at least 1.",
        "metadata": "The id of the end user (user_id).",
        "stop_sequences": "Stop strings (at most 4, `--max-stop-strings`), each of up to "
        f"{MAX_STOP_CHARACTERS:,} characters; the answer does not contain them.",
    },
    "CountBody": {
        "output_config": "Reasoning effort, and output format: a JSON schema.",
        "system": "A text or text blocks, before the messages.",
        "thinking": "Whether the model reasons first, and for how many tokens.",
        "tool_choice": "auto (the default with tools), any, tool with a name, or none.",
        "tools": "Tools that the model may call, each with name, description and input_schema.",
    },
    "ToolChoice": {
        "disable_parallel_tool_use": "true: at most one tool call.",
        "name": "The tool that must be called, for type tool.",
        "type": "auto, any (some tool must be called), tool (the named tool must be called), none.",
    },
    "ThinkingChoice": {
        "budget_tokens": "Maximum reasoning tokens; for type enabled, at least 1.",
        "display": "omitted: only the block's signature contains the reasoning.",
        "type": "enabled, disabled or adaptive.",
    },
    "OutputConfig": {
        "effort": "Same as reasoning_effort of a chat.",
        "format": "Output format.",
    },
    "OutputFormat": {"schema": "A JSON schema.", "type": "Only json_schema."},
}
"""Body -> field -> description that overrides SHARED."""
_PARENTS = {"MessagesBody": "CountBody"}
"""Body -> body whose overrides it inherits."""


def add_descriptions(definitions: Mapping[str, Any]) -> None:
    """Add the description in OVERRIDES or SHARED, if any, to each property of these JSON schemas
    that lacks a description."""
    for name, definition in definitions.items():
        inherited = OVERRIDES.get(_PARENTS.get(name, name), {})
        descriptions = {**SHARED, **inherited, **OVERRIDES.get(name, {})}
        for field, schema in definition.get("properties", {}).items():
            if field in descriptions:
                schema.setdefault("description", descriptions[field])
