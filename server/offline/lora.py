"""LoRARequest: the LoRA adapter of an offline call."""

from collections.abc import Sequence
from typing import NamedTuple

from config.errors import UserError
from engine.client.base import EngineClient
from engine.transport.messages import LOAD_ADAPTER


class LoRARequest(NamedTuple):
    """A named adapter, with the fields of vLLM's LoRARequest. The first call that uses the adapter
    loads it."""

    lora_name: str
    lora_int_id: int
    """Not used: adapters are identified by name and content."""
    lora_path: str = ""
    """Folder or GGUF file of the adapter; empty: an adapter that is already loaded, such as an
    adapter in lora_modules."""


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""LoRARequest for all prompts, or a list with an entry per prompt; None: the base model."""


async def adapters_of(client: EngineClient, requests: LoRARequests, count: int) -> list[str]:
    """LoRAInfo.content for each of `count` prompts, empty for the base model. Loads adapters that
    are not loaded yet. Raises UserError, and the errors of EngineClient.control."""
    given = (
        [requests] * count if requests is None or isinstance(requests, LoRARequest) else [*requests]
    )
    if len(given) != count:
        raise UserError(
            f"{count} prompts have {len(given)} lora_request, the number must be 1 or {count}",
            param="lora_request",
        )
    contents: dict[LoRARequest | None, str] = {None: ""}
    for request in given:
        if request is not None and request not in contents:
            contents[request] = await _content(client, request)
    return [contents[request] for request in given]


async def _content(client: EngineClient, request: LoRARequest) -> str:
    name, path = request.lora_name, request.lora_path
    known = client.adapters.get(name)
    if known is None:
        if not path:
            raise UserError(f"there is no adapter {name}", param="lora_request")
        await client.control(LOAD_ADAPTER, adapter=(name, path))
        known = client.adapters[name]
    elif path and path != known.path:
        raise UserError(
            f"the adapter {name} was loaded from {known.path}, not from {path}",
            param="lora_request",
        )
    return known.content
