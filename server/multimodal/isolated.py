"""Isolated process that converts image and video files to model inputs. engine/process/isolation.py
calls `prepare` in a separate process and forks it for each call, so that a decoder that crashes,
hangs or uses too much memory fails only its request."""

import importlib
import sys
from collections.abc import Callable

import msgspec

from config.errors import ConfigError
from server.multimodal.messages import ImageFacts, Setup


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function that handles a call: it returns an encoded Answer for IMAGE or VIDEO with
    content, and encoded ImageFacts for empty bytes."""
    # transformers would import torch if it is installed, which takes seconds and 200 MB and is not
    # needed.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # absent, to the import system
    module = importlib.import_module("server.multimodal.image_processor")
    try:
        processor = module.ImageProcessor(msgspec.msgpack.decode(setup, type=Setup))
        processor.warm_up()
    except ConfigError as error:
        # The server reads the facts during start-up and reports the error.
        facts = msgspec.msgpack.encode(ImageFacts(error=str(error)))
        return lambda data: facts
    call: Callable[[bytes], bytes] = processor.call
    return call
