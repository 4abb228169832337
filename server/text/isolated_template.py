"""Renders request templates in disposable processes; see engine/process/isolation.py."""

import json
from collections.abc import Mapping
from typing import Any

from config.errors import UserError
from config.json_text import Json
from engine.process.isolation import Call, ForkServer, Limits
from server.text.control_tokens import ControlMarker
from server.text.template_renderer import MAX_CHARACTERS, Renderer, RenderRequest, TextTooLong

LIMITS = Limits(cpu_s=1.0, wall_s=1.5, memory_bytes=256 * 2**20, stack_bytes=8 * 2**20)
"""Limits of a rendering. A template normally takes a millisecond; a request must be rejected within
2 s."""


def isolated_templates(marker: ControlMarker | None) -> ForkServer:
    """A fork server for request templates. `marker`: marks control tokens in messages."""
    setup: Json = {"marker": None if marker is None else marker.to_dict()}
    return ForkServer("server.text.isolated_template", json.dumps(setup).encode(), LIMITS)


def prepare(setup: bytes) -> Call:
    """Entry point of the fork server. `setup`: the marker as JSON."""
    facts: Mapping[str, Any] | None = json.loads(setup)["marker"]
    marker = None if facts is None else ControlMarker(**facts)
    renderer = Renderer(MAX_CHARACTERS)

    def render(payload: bytes) -> bytes:
        fields: Json = json.loads(payload)
        is_marked = fields.pop("is_marked")
        mark = marker.mark_texts if marker is not None and is_marked else None
        try:
            reply: Json = {"text": renderer.render(RenderRequest(**fields), mark)}
        except UserError as error:
            reply = {
                "error": error.message,
                "param": error.param,
                "is_too_long": isinstance(error, TextTooLong),
            }
        return json.dumps(reply).encode()

    # Import Jinja and compile once before forking.
    render(
        b'{"template": "x", "messages": [], "variables": {"tools": null}, "builtins": {}, '
        b'"continue_final_message": false, "is_marked": false}'
    )
    return render
