"""Settings that /server_info shows: numbers, switches and enumerated values. Keys, paths and other
text from the operator are never shown."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from server.serving.state import AppState

ENUMERATED = {
    *("device", "dtype", "executor", "logprobs_mode", "runner", "convert", "policy", "strategy"),
    *("mode", "on_unwarmed_shape", "prompt_order", "decode_order", "card", "generation_config"),
    *("tool_call_parser", "reasoning_parser", "log_level"),
}
"""Settings whose text is one of a fixed set of values; the text of other settings is not shown."""


def shown_settings(state: AppState) -> dict[str, Any]:
    """Effective settings, including values that the engine determined at start-up."""
    shown: dict[str, Any] = {"version": state.version}
    ready = state.client.ready
    if ready is not None:
        shown["engine"] = {
            "device": ready.device,
            "dtype": ready.dtype,
            "max_model_len": ready.max_model_len,
            "num_blocks": ready.num_blocks,
            "block_size": ready.block_size,
            "num_buckets": ready.num_buckets,
        }
    shown["engine_config"] = _shown(state.engine_config)
    shown["server_config"] = _shown(state.config)
    return shown


def as_text(shown: Mapping[str, Any]) -> str:
    """Settings as comma-separated name=value pairs, in order."""
    return ", ".join(f"{name}={_text(value)}" for name, value in shown.items())


def _text(value: object) -> str:
    return f"({as_text(value)})" if isinstance(value, Mapping) else str(value)


def _shown(config: Any) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    if not is_dataclass(config):
        return shown
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            shown[field.name] = _shown(value)
        elif isinstance(value, str):
            if field.name in ENUMERATED:
                shown[field.name] = value
        elif value is None or isinstance(value, bool | int | float):
            shown[field.name] = value
        elif isinstance(value, tuple) and all(isinstance(item, int | float) for item in value):
            shown[field.name] = list(value)
    return shown
