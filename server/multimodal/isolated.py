"""The process in which the bytes of images and videos become inputs of a model.

engine/process/isolation.py calls `prepare` in a process of its own, and each image is processed in
a fork of it: a decoder that crashes, hangs or grows ends one request.
"""

import importlib
import sys
from collections.abc import Callable

import msgspec

from config.errors import ConfigError
from server.multimodal.messages import ImageFacts, Setup


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """The call: IMAGE or VIDEO and what follows them to an Answer; no bytes to the ImageFacts."""
    # transformers imports torch where it finds it: seconds, and 200 MB, which no image needs.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # absent, to the import system
    module = importlib.import_module("server.multimodal.image_processor")
    try:
        processor = module.ImageProcessor(msgspec.msgpack.decode(setup, type=Setup))
    except ConfigError as error:
        # Reported at the start, when the facts are asked for.
        facts = msgspec.msgpack.encode(ImageFacts(error=str(error)))
        return lambda data: facts
    processor.warm_up()
    call: Callable[[bytes], bytes] = processor.call
    return call
