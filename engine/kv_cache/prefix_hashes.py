"""Chained hashes of block contents, for the prefix cache."""

from collections.abc import Sequence
from hashlib import sha256

from hpu.protocol import TOKEN_BYTES, ImagePlacement


def root_hash(salt: str, adapter: str, images: Sequence[ImagePlacement] = ()) -> bytes:
    """Parent hash of the first block. Hashing the salt's length separates ("ab", "c") from ("a",
    "bc"). `images`: all images of the prompt if every token depends on them, else empty."""
    salt_bytes = salt.encode()
    root = sha256(len(salt_bytes).to_bytes(8, "little") + salt_bytes + adapter.encode()).digest()
    return chain(root, b"", _placed(images)) if images else root


def chain(parent: bytes, tokens: bytes | memoryview, images: bytes = b"") -> bytes:
    """SHA-256 of a full block: parent hash, raw bytes of the block's tokens, and the result of
    `images_in` for the block."""
    digest = sha256(parent)
    digest.update(tokens)
    digest.update(images)
    return digest.digest()


def images_in(images: Sequence[ImagePlacement], start: int, stop: int) -> bytes:
    """Extra hash bytes of tokens [start, stop): content hash and offset of each overlapping image.
    Needed because the placeholder tokens do not depend on the image."""
    return _placed(
        [image for image in images if image.offset < stop and start < image.offset + image.length]
    )


def _placed(images: Sequence[ImagePlacement]) -> bytes:
    return b"".join(image.content + image.offset.to_bytes(8, "little") for image in images)


def block_hashes(
    prompt: bytes | memoryview,
    block_size: int,
    salt: str = "",
    adapter: str = "",
    images: Sequence[ImagePlacement] = (),
    *,
    all_see_images: bool = False,
) -> list[bytes]:
    """Hashes of the full blocks of `prompt` (uint32, little-endian), in order. `all_see_images`:
    tokens before an image depend on it too."""
    raw = memoryview(prompt).cast("B")
    step = block_size * TOKEN_BYTES
    parent = root_hash(salt, adapter, images if all_see_images else ())
    hashes = []
    for start in range(0, len(raw) - step + 1, step):
        first = start // TOKEN_BYTES
        mixed = images_in(images, first, first + block_size) if images else b""
        parent = chain(parent, raw[start : start + step], mixed)
        hashes.append(parent)
    return hashes
