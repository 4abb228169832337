"""Checks whether transformers' code of a model can compute image embeddings for this server's text
model, by a trial run without weights on a short prompt."""

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from config.model.model_config import ModelConfig
from hpu.multimodal.towers.whole_model import build_whole, drop_language_model, features_owner

NUM_ROWS = 3
"""Image embeddings in the trial."""

PLAIN_ARGUMENTS = frozenset(
    (
        *("attention_mask", "cache", "cache_position", "inputs_embeds", "logits_to_keep"),
        *("past_key_values", "position_ids", "return_dict", "use_cache"),
        *("output_attentions", "output_hidden_states"),
    )
)
"""Arguments of a language model that receives images only as input embeddings."""


def image_merge_error(config: ModelConfig) -> str:
    """Reason why images of the model cannot be served; empty if they can be served. Requires that
    the forward pass writes the rows of `get_image_features` over the embeddings of image tokens, in
    order, and passes nothing else about images to its language model. Raises ConfigError like
    build_whole."""
    assert config.vision is not None, "a model that takes images"
    name = config.vision.architecture
    whole = build_whole(config, config.vision, torch.float32)
    drop_language_model(whole)
    owner = features_owner(whole)
    if owner is None:
        return f"transformers has no method that returns the image embeddings of a {name}"
    if hasattr(owner, "get_rope_index"):
        return f"a {name} has positions with three axes"
    names = set(inspect.signature(owner.forward).parameters)
    for unknown in ("token_type_ids", "mm_token_type_ids", "decoder_input_ids"):
        if unknown in names:
            return f"the layers of a {name} need {unknown} beside the image embeddings"
    return _try(owner, config.vision.image_token_id, config.hidden_size)


def _try(owner: Any, image_token: int, hidden_size: int) -> str:
    other = image_token + 1 if image_token == 0 else image_token - 1
    tokens = torch.tensor([[other, *[image_token] * NUM_ROWS, other]])
    is_image = tokens == image_token
    rows = torch.arange(1.0, NUM_ROWS + 1).unsqueeze(1).expand(-1, hidden_size).contiguous()
    expected = torch.zeros(*tokens.shape, hidden_size)
    expected[is_image] = rows
    reason = ""
    # Some models return a single tensor, others a tensor per image.
    for features in ([rows], rows, rows.unsqueeze(0)):
        given = _language_inputs(owner, tokens, features, hidden_size)
        if isinstance(given, str):
            reason = reason or given
            continue
        found = given.pop("inputs_embeds", None)
        order = torch.arange(tokens.shape[1])
        further = [name for name, value in given.items() if _is_more(name, value, order)]
        if further:
            return f"its language model needs {further[0]} beside the image embeddings"
        if not isinstance(found, Tensor) or not torch.equal(found.float(), expected):
            return "it does not replace the embeddings of image tokens by image embeddings"
        return ""
    return f"its code cannot be run ({reason})"


def _is_more(name: str, value: object, order: Tensor) -> bool:
    if name == "position_ids" and value is not None:
        # Other positions would differ from the positions that this server computes.
        return not isinstance(value, Tensor) or not torch.equal(value, order.unsqueeze(0))
    return name not in PLAIN_ARGUMENTS and value is not None and value is not False


class _Reached(Exception):
    """Raised when the language model is called."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.given = given


class _LanguageModel(nn.Module):
    """Replacement of the model's language model; raises _Reached with its arguments."""

    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self._embed = embed

    def get_input_embeddings(self) -> nn.Module:
        return self._embed

    def forward(self, *args: Any, **given: Any) -> Any:
        raise _Reached(
            {**given, **{f"argument {index}": value for index, value in enumerate(args)}}
        )


class _Zeros(nn.Module):
    """Replacement of the token embedding; returns zeros."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, self.weight.shape[1])


def _language_inputs(
    owner: Any, tokens: Tensor, features: Any, hidden_size: int
) -> dict[str, Any] | str:
    """Arguments that the language model is called with, by name or index, or the reason why it is
    not called."""
    embed = _Zeros(hidden_size)
    for name in ("language_model", "text_model"):
        if hasattr(owner, name):
            setattr(owner, name, _LanguageModel(embed).eval())
    owner.get_input_embeddings = lambda: embed
    owner.get_image_features = lambda *args, **given: SimpleNamespace(pooler_output=features)
    try:
        with torch.inference_mode():
            owner(input_ids=tokens, pixel_values=torch.zeros(1, 3, 1, 1), use_cache=False)
    except _Reached as reached:
        return reached.given
    except Exception as error:  # third-party code may fail in any way
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"
    return "its language model is not called"
