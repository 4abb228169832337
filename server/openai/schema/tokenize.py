"""Bodies of /tokenize and /detokenize."""

from pydantic import ConfigDict

from server.http.body_bounds import PromptIds
from server.openai.schema.chat import ChatPromptBody
from server.openai.schema.generation import Body


class TokenizeTextBody(Body):
    """A text to tokenize."""

    model_config = ConfigDict(json_schema_extra={"example": {"prompt": "Hello!"}})

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(ChatPromptBody):
    """A conversation to render and tokenize."""

    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Token ids to decode."""

    model_config = ConfigDict(json_schema_extra={"example": {"tokens": [1, 2, 3]}})

    model: str | None = None
    tokens: PromptIds
