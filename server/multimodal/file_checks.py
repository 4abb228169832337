"""Check image files for structures that make a decoder work long on few bytes."""

import struct

from PIL import Image

MAX_CHUNKS = 16_384
"""Maximum number of chunks of a PNG: Pillow reads each in Python."""
MAX_PROFILES = 1
"""Maximum number of colour profiles of a PNG: Pillow decompresses each."""
MAX_SCANNED_PIXELS = 2**30
"""Maximum number of pixels of a JPEG times scans: each scan passes over all of its pixels."""
MAX_RUN_LENGTH_PIXELS = 4 * 2**20
"""Maximum number of pixels of a BMP with run lengths: Pillow decodes it in Python."""
MAX_EXIF_BYTES = 65_536
"""Maximum size of EXIF data: a segment of a JPEG holds less."""

_PNG = b"\x89PNG\r\n\x1a\n"
_START_OF_SCAN = b"\xff\xda"
"""Marker of a scan. Compressed data of a JPEG never contain it; an embedded preview does."""


class BadImage(Exception):
    """The image or video is not accepted; the message says why."""


def check_file(data: bytes) -> None:
    """Raise BadImage for a PNG that Pillow would take long to open."""
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
                f"the image has more than {MAX_CHUNKS} chunks, at most {MAX_CHUNKS} are read"
            )
        if num_profiles > MAX_PROFILES:
            raise BadImage(
                f"the image has at least {num_profiles} colour profiles, at most {MAX_PROFILES} is "
                "read"
            )


def check_opened(image: Image.Image, data: bytes) -> None:
    """Raise BadImage for an opened image, with `data` as its file, that is costly to decode."""
    exif = image.info.get("exif", b"")
    if len(exif) > MAX_EXIF_BYTES:
        raise BadImage(
            f"the image has {len(exif)} bytes of EXIF data, at most {MAX_EXIF_BYTES} are read"
        )
    pixels = image.width * image.height
    size = f"{image.width} x {image.height} = {pixels} pixels"
    if image.format in ("JPEG", "MPO"):
        num_scans = data.count(_START_OF_SCAN)
        if pixels * num_scans > MAX_SCANNED_PIXELS:
            raise BadImage(
                f"the image has {size} in {num_scans} scans, at most "
                f"{MAX_SCANNED_PIXELS // pixels} scans of that size are decoded"
            )
    has_runs = image.format == "BMP" and image.info.get("compression") in (1, 2)
    if has_runs and pixels > MAX_RUN_LENGTH_PIXELS:
        raise BadImage(
            f"the image has {size} as run lengths, at most {MAX_RUN_LENGTH_PIXELS} are decoded"
        )
