"""Chained hashes of block contents, for the prefix cache."""

from hashlib import sha256

from hpu.protocol import TOKEN_BYTES


def root_hash(salt: str, adapter: str) -> bytes:
    """The parent hash of a first block. Hashing the salt's length separates ("ab", "c") from
    ("a", "bc")."""
    salt_bytes = salt.encode()
    return sha256(len(salt_bytes).to_bytes(8, "little") + salt_bytes + adapter.encode()).digest()


def chain(parent: bytes, tokens: bytes | memoryview) -> bytes:
    """SHA-256 of a full block: the hash of everything before it, then its tokens' raw bytes."""
    digest = sha256(parent)
    digest.update(tokens)
    return digest.digest()


def block_hashes(
    prompt: bytes | memoryview, block_size: int, salt: str = "", adapter: str = ""
) -> list[bytes]:
    """One hash for each full block of `prompt` (uint32, little-endian), the first block first."""
    raw = memoryview(prompt).cast("B")
    step = block_size * TOKEN_BYTES
    parent = root_hash(salt, adapter)
    hashes = []
    for start in range(0, len(raw) - step + 1, step):
        parent = chain(parent, raw[start : start + step])
        hashes.append(parent)
    return hashes
