"""Rejects image files whose decoding is slow relative to their size."""

import struct

from PIL import Image

MAX_CHUNKS = 16_384
"""Maximum number of chunks of a PNG, which Pillow reads in Python."""
MAX_PROFILES = 1
"""Maximum number of colour profiles of a PNG, which Pillow decompresses."""
MAX_SCANNED_PIXELS = 2**30
"""Maximum number of pixels times scans of a JPEG: each scan processes all pixels."""
MAX_RUN_LENGTH_PIXELS = 4 * 2**20
"""Maximum number of pixels of a run-length encoded BMP, which Pillow decodes in Python."""
MAX_EXIF_BYTES = 65_536
"""Maximum size of EXIF data; a JPEG segment is smaller."""

_PNG = b"\x89PNG\r\n\x1a\n"
_START_OF_SCAN = b"\xff\xda"
"""Marker of a JPEG scan. Compressed data never contains it, but an embedded preview does."""


class BadImage(Exception):
    """The image or video is not accepted; the message says why."""


def check_file(data: bytes) -> None:
    """Raise BadImage for a PNG that Pillow would open slowly."""
    if data[:8] != _PNG:
        return
    at, num_chunks, num_profiles = 8, 0, 0
    while at + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        at += size + 12
        num_chunks += 1
        num_profiles += kind == b"iCCP"
        if num_chunks > MAX_CHUNKS:
            raise BadImage(
                f"the image has more than {MAX_CHUNKS} chunks, at most {MAX_CHUNKS} are allowed"
            )
        if num_profiles > MAX_PROFILES:
            raise BadImage(
                f"the image has at least {num_profiles} colour profiles, at most {MAX_PROFILES} "
                "is allowed"
            )


def check_opened(image: Image.Image, data: bytes) -> None:
    """Raise BadImage for an opened image that is slow to decode; `data`: its file."""
    exif = image.info.get("exif", b"")
    if len(exif) > MAX_EXIF_BYTES:
        raise BadImage(
            f"the image has {len(exif)} bytes of EXIF data, at most {MAX_EXIF_BYTES} are allowed"
        )
    pixels = image.width * image.height
    size = f"{image.width} x {image.height} = {pixels} pixels"
    if image.format in ("JPEG", "MPO"):
        num_scans = data.count(_START_OF_SCAN)
        if pixels * num_scans > MAX_SCANNED_PIXELS:
            raise BadImage(
                f"the image has {size} in {num_scans} scans, at most "
                f"{MAX_SCANNED_PIXELS // pixels} scans of that size are allowed"
            )
    has_runs = image.format == "BMP" and image.info.get("compression") in (1, 2)
    if has_runs and pixels > MAX_RUN_LENGTH_PIXELS:
        raise BadImage(
            f"the image has {size} as run lengths, at most {MAX_RUN_LENGTH_PIXELS} are allowed"
        )
