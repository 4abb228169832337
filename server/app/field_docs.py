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

_NO_EFFECT = "No effect."
_LABELS = ("prompt_cache_key", "service_tier", "user", "verbosity")

SHARED: Mapping[str, str] = {
    # The prompt.
    "messages": "The conversation, at least one message.",
    "documents": "Variable for the chat template.",
    "add_generation_prompt": "End the prompt with the start of an answer; default true.",
    "continue_final_message": "Continue the last message; not with add_generation_prompt true.",
    "chat_template": "Template of this request; needs `--trust-request-chat-template`.",
    "chat_template_kwargs": "Variables for the chat template; override "
    "`--default-chat-template-kwargs`.",
    "add_special_tokens": "Add special tokens, such as BOS; default false.",
    "truncate_prompt_tokens": "Keep only the last tokens of the prompt; -1: as many as fit.",
    "truncation_side": "The side that is cut off; default left.",
    "prompt": f"A text or token ids, or a list of up to {MAX_PROMPTS} of either.",
    # Tools and reasoning.
    "tools": "Functions that the model may call.",
    "tool_choice": "auto (default with tools), none, required, a function, or allowed_tools.",
    "parallel_tool_calls": "false: at most one tool call.",
    "reasoning_effort": "Variable for the chat template; also sets enable_thinking (none: false, "
    "others: true).",
    "include_reasoning": "false: no reasoning in the answer.",
    # Number and length of the choices.
    "n": f"Choices per prompt, 1 to {MAX_N}; default 1.",
    "min_tokens": "Minimum generated tokens, up to max_tokens; default 0.",
    "stop": "Stop strings (at most 4, `--max-stop-strings`), each of up to "
    f"{MAX_STOP_CHARACTERS:,} characters; not in the output.",
    "stop_token_ids": "Tokens that end the output, without their text.",
    "include_stop_str_in_output": "Keep the stop text in the output; default false.",
    "ignore_eos": "Continue after the end token; default false.",
    # Sampling.
    "temperature": "0 to 2; 0: greedy. Default: the model's, or 1.",
    "top_p": "Nucleus sampling: above 0, at most 1. Default: the model's, or 1.",
    "top_k": "Tokens to sample from; 0 or -1: all. Default: the model's, or all.",
    "min_p": "0 to 1: minimum probability relative to the likeliest token. Default: the model's, "
    "or 0.",
    "seed": "The same seed gives the same output.",
    "presence_penalty": "-2 to 2, for tokens in the output; default 0.",
    "frequency_penalty": "-2 to 2, times the count of a token in the output; default 0.",
    "repetition_penalty": "Above 0, over prompt and output; 1: off. Default: the model's, or 1.",
    "logit_bias": "Token id (a string) to -100 (never) to 100 (always).",
    "bad_words": "Texts that are never generated.",
    "allowed_token_ids": "The only tokens that may be generated.",
    "length_penalty": "A beam's score is divided by its length to this power; default 1.",
    # Adapters.
    "lora_name": "Name of the adapter, for `model` of requests.",
    "lora_path": "Folder or GGUF file of the adapter, below `--lora-dir`.",
    "base_model_name": "Parent in the list of models; default: the served model.",
    "lora_int_id": _NO_EFFECT,
    # Structured output.
    "response_format": "text, json_object, json_schema or structural_tag.",
    "structured_outputs": "Exactly one of json, json_object, regex, choice, grammar, "
    "structural_tag.",
    **{name: f"Same as structured_outputs.{kind}." for name, kind in FIELDS.items()},
    # The answer.
    "stream": "Server-sent events; default false.",
    "stream_options": "Only with stream.",
    "include_usage": "End with a chunk of the usage, without choices; default: "
    "`--enable-force-include-usage`.",
    "continuous_usage_stats": "Usage so far in each chunk; needs include_usage.",
    "prompt_logprobs": f"0 to {MAX_LOGPROBS}: number of likeliest tokens per prompt token; not "
    "with stream.",
    "echo": "Return the prompt (in a chat, the last message) first; default false.",
    "skip_special_tokens": "Leave control tokens out of the text; default true.",
    "spaces_between_special_tokens": "Put spaces between special tokens, if the tokenizer does; "
    "default true.",
    "return_token_ids": "Return token ids of prompt and output; default false.",
    "return_tokens_as_token_ids": "Name tokens `token_id:5` in log-probabilities; default: "
    "`--return-tokens-as-token-ids`.",
    "return_token_strs": "Return each token as in the vocabulary; default false.",
    # The request itself.
    "model": "A served name; default: the first.",
    "priority": "Lower is served first; values other than 0 need `--scheduling-policy priority`.",
    "timeout": "Seconds until the request is ended with a 504; also the header "
    "`X-Request-Timeout`.",
    "request_id": f"Part of the answer's id: 1 to {MAX_REQUEST_ID_CHARACTERS} visible characters.",
    "cache_salt": f"Prompts with the same salt share cached blocks: 1 to {MAX_SALT_CHARACTERS} "
    "characters other than @, / and \\.",
    "modalities": 'Only `["text"]`.',
    "store": _NO_EFFECT,
    "metadata": f"No effect; up to {MAX_METADATA_PAIRS} pairs with keys of up to "
    f"{MAX_METADATA_KEY_CHARACTERS} characters, and strings of up to "
    f"{MAX_METADATA_VALUE_CHARACTERS}.",
    "safety_identifier": f"No effect; up to {MAX_SAFETY_IDENTIFIER_CHARACTERS} characters.",
    **dict.fromkeys(_LABELS, f"No effect; up to {MAX_LABEL_CHARACTERS} characters."),
    "user_id": f"No effect; up to {MAX_USER_ID_CHARACTERS} characters.",
    # Vectors and scores.
    "input": f"A text or token ids, or a list of up to {MAX_INPUTS} of either.",
    "encoding_format": "float (default), or base64: little-endian float32.",
    "dimensions": "Shorter length of the vectors, for models trained for it.",
    "task": "What to compute; null: the first of these tasks that the model supports.",
    # Tokens.
    "tokens": "Token ids.",
    "token_ids": "The prompt.",
    "sampling_params": "vLLM's sampling parameters; default: neutral values, for max_tokens the "
    "rest of the context.",
}
"""Field name -> description, for all bodies."""

OVERRIDES: Mapping[str, Mapping[str, str]] = {
    "ChatBody": {
        "logprobs": "Log-probabilities of generated tokens; default false.",
        "top_logprobs": f"0 to {MAX_LOGPROBS}: number of likeliest tokens per position; needs "
        "logprobs.",
    },
    "CompletionBody": {
        "add_special_tokens": "Add special tokens to a text; default true.",
        "logprobs": f"0 to {MAX_LOGPROBS}: number of likeliest tokens per position.",
    },
    "ResponseBody": {
        "background": "Generate in the background; needs store.",
        "include": f"{WITH_LOGPROBS}; others have no effect.",
        "input": "A text or items; required without previous_response_id.",
        "previous_response_id": "The response to continue.",
        "reasoning": "Reasoning options.",
        "store": "false: the response is not stored.",
        "text": "Output format.",
        "thinking_token_budget": "Maximum reasoning tokens.",
        "tools": "Functions, also in namespaces; other tools are ignored.",
        "truncation": "auto: drop the oldest messages of a long prompt; default disabled.",
    },
    "ReasoningOptions": {
        "effort": "Same as reasoning_effort of a chat.",
        "summary": _NO_EFFECT,
    },
    "ContextManagement": {"edits": _NO_EFFECT},
    "TextOptions": {"format": "text, json_object or json_schema."},
    "ScoreBody": {
        "text_1": "A text, or as many as text_2 has.",
        "text_2": "A text or several.",
        "queries": "Same as text_1.",
        "documents": "Same as text_2; with queries.",
        "items": "Same as text_2; with queries.",
        "data_1": "Same as text_1.",
        "data_2": "Same as text_2.",
    },
    "RerankBody": {
        "documents": "The texts to rank.",
        "query": "The text to compare documents with.",
    },
    "TokenizeTextBody": {
        "add_special_tokens": "Add special tokens; default true.",
        "prompt": "The text.",
    },
    "MessagesBody": {
        "max_tokens": "Maximum generated tokens, at least 1.",
        "metadata": "The id of the end user (user_id).",
        "stop_sequences": "Stop strings (at most 4, `--max-stop-strings`), each of up to "
        f"{MAX_STOP_CHARACTERS:,} characters; not in the output.",
    },
    "CountBody": {
        "output_config": "Reasoning effort, and output format: a JSON schema.",
        "system": "Text before the messages.",
        "thinking": "Whether and how long the model reasons.",
        "tool_choice": "auto (default with tools), any, tool with a name, or none.",
        "tools": "Tools with name, description and input_schema.",
    },
    "ToolChoice": {
        "disable_parallel_tool_use": "true: at most one tool call.",
        "name": "The tool, for type tool.",
        "type": "auto, any (call some tool), tool (call the named tool), none.",
    },
    "ThinkingChoice": {
        "budget_tokens": "Maximum reasoning tokens, at least 1, for type enabled.",
        "display": "omitted: reasoning only in the block's signature.",
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
