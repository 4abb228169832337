"""Renders, in a disposable process, templates that requests bring: see
engine/process/isolation.py."""

import json
from collections.abc import Mapping
from typing import Any

from config.errors import UserError
from engine.process.isolation import Call, ForkServer, Limits
from server.text.control_tokens import ControlMarker
from server.text.template_renderer import MAX_CHARACTERS, Renderer, RenderRequest, TextTooLong

LIMITS = Limits(cpu_s=1.0, wall_s=1.5, memory_bytes=256 * 2**20, stack_bytes=8 * 2**20)
"""A template takes a millisecond; a refusal must come within 2 s."""


def isolated_templates(marker: ControlMarker | None) -> ForkServer:
    """A fork server for the templates of requests. `marker` marks texts in their messages."""
    setup: dict[str, Any] = {"marker": None if marker is None else marker.to_dict()}
    return ForkServer("server.text.isolated_template", json.dumps(setup).encode(), LIMITS)


def prepare(setup: bytes) -> Call:
    """What the fork server runs."""
    facts: Mapping[str, Any] | None = json.loads(setup)["marker"]
    marker = None if facts is None else ControlMarker.from_dict(facts)
    renderer = Renderer(MAX_CHARACTERS)

    def render(payload: bytes) -> bytes:
        fields: dict[str, Any] = json.loads(payload)
        is_marked = fields.pop("is_marked")
        mark = marker.mark_texts if marker is not None and is_marked else None
        try:
            told: dict[str, Any] = {"text": renderer.render(RenderRequest(**fields), mark)}
        except UserError as error:
            told = {
                "error": error.message,
                "param": error.param,
                "is_too_long": isinstance(error, TextTooLong),
            }
        return json.dumps(told).encode()

    # Jinja is imported and has compiled something once before there are forks.
    render(
        b'{"template": "x", "messages": [], "variables": {"tools": null}, "builtins": {}, '
        b'"continue_final_message": false, "is_marked": false}'
    )
    return render
