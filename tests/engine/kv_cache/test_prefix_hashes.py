"""engine/kv_cache/prefix_hashes.py: chained block hashes."""

from hashlib import sha256

from slow_model import raw

from engine.kv_cache.prefix_hashes import block_hashes, chain, root_hash
from hpu.protocol import ImagePlacement


def test_only_full_blocks_get_a_hash() -> None:
    prompt = raw(list(range(11)))

    hashes = block_hashes(prompt, 4)

    assert len(hashes) == 2
    assert block_hashes(raw([1, 2, 3]), 4) == []


def test_a_hash_covers_everything_before_its_block() -> None:
    hashes = block_hashes(raw([1, 2, 3, 4, 5, 6]), 2)
    other = block_hashes(raw([9, 2, 3, 4, 5, 6]), 2)
    longer = block_hashes(raw([1, 2, 3, 4, 5, 6, 7, 8]), 2)

    assert hashes == longer[:3]
    assert not set(hashes) & set(other)


def test_salt_and_adapter_keep_prefixes_apart() -> None:
    prompt = raw([1, 2, 3, 4])

    firsts = {
        block_hashes(prompt, 4, salt, adapter)[0]
        for salt, adapter in [("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("a", "bc")]
    }

    assert len(firsts) == 5


def test_the_chain_is_sha256_of_parent_and_raw_bytes() -> None:
    tokens = raw([1, 2])

    (name,) = block_hashes(tokens, 2, "salt")

    assert name == sha256(root_hash("salt", "") + bytes(tokens)).digest()
    assert name == chain(root_hash("salt", ""), tokens)


def test_images_keep_blocks_with_equal_tokens_apart() -> None:
    prompt = raw([1, 9, 9, 9, 9, 2, 3, 4])

    def hashes(content: bytes, offset: int = 1) -> list[bytes]:
        return block_hashes(prompt, 2, images=[ImagePlacement(content, offset, 4)])

    cat, dog = hashes(b"cat"), hashes(b"dog")
    assert cat == hashes(b"cat")
    assert not set(cat) & set(dog)
    assert not set(cat) & set(hashes(b"cat", 2))
    behind = [ImagePlacement(b"cat", 6, 2)]
    assert block_hashes(prompt, 2, images=behind)[:3] == block_hashes(prompt, 2)[:3]
    assert block_hashes(prompt, 2, images=behind)[3] != block_hashes(prompt, 2)[3]


def test_with_cross_attention_tokens_before_an_image_have_separate_hashes() -> None:
    prompt = raw([1, 2, 3, 4, 9, 9])

    def hashes(*contents: bytes) -> list[bytes]:
        images = [ImagePlacement(content, 4 + i, 1) for i, content in enumerate(contents)]
        return block_hashes(prompt, 2, images=images, all_see_images=True)

    assert hashes() == block_hashes(prompt, 2)
    assert hashes(b"cat") == hashes(b"cat")
    assert len({hashe[0] for hashe in (hashes(), hashes(b"cat"), hashes(b"dog"))}) == 3
    assert hashes(b"cat", b"dog")[0] != hashes(b"dog", b"cat")[0]
