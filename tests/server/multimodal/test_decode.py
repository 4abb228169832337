"""Bytes of clients become RGB images, or an error with the reason."""

import io
import struct
import tracemalloc
import zlib

import hostile_images as hostile
import numpy as np
import pytest
from PIL import Image
from tiny_vision import image_bytes, picture

from server.multimodal import decode as module
from server.multimodal.decode import KEPT_PIXELS, check_size, decode
from server.multimodal.file_checks import BadImage


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "JPEG"])
def test_each_format_is_read(kind: str) -> None:
    image = picture(20, 12)

    found = decode(image_bytes(image, kind))

    assert found.mode == "RGB"
    assert found.size == (20, 12)


@pytest.mark.parametrize("kind", ["TIFF", "ICO", "PPM", "PDF", "PCX"])
def test_other_formats_of_pillow_are_refused(kind: str) -> None:
    with pytest.raises(BadImage, match="must be one of PNG, JPEG, WEBP, GIF, BMP"):
        decode(image_bytes(picture(16, 16), kind))


def test_data_other_than_an_image_is_refused() -> None:
    for data in (b"x", b"<svg/>", b"GIF89a", b"\x89PNG\r\n\x1a\n", b"%PDF-1.4", b"BM" + bytes(60)):
        with pytest.raises(BadImage):
            decode(data)


def test_transparent_pixels_become_white() -> None:
    clear = Image.new("RGBA", (4, 4), (200, 10, 10, 0))
    grey = Image.new("LA", (4, 4), (7, 0))
    palette = Image.new("P", (4, 4), 3)
    palette.putpalette([0, 0, 0] * 256)

    assert decode(image_bytes(clear)).getpixel((1, 1)) == (255, 255, 255)
    assert decode(image_bytes(grey)).getpixel((1, 1)) == (255, 255, 255)
    assert decode(image_bytes(palette, transparency=3)).getpixel((1, 1)) == (255, 255, 255)
    assert decode(image_bytes(palette)).getpixel((1, 1)) == (0, 0, 0)


def test_half_transparent_pixels_are_mixed_with_white() -> None:
    half = Image.new("RGBA", (2, 2), (0, 0, 0, 128))

    assert decode(image_bytes(half)).getpixel((0, 0)) == (127, 127, 127)


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK"])
def test_grayscale_palette_and_cmyk_images_become_rgb(mode: str) -> None:
    image = picture(8, 8).convert(mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"

    found = decode(image_bytes(image, kind))

    assert found.mode == "RGB"
    if mode != "CMYK":
        assert np.array_equal(np.asarray(found), np.asarray(image.convert("RGB")))


def test_sixteen_bit_images_are_scaled_to_eight_bits() -> None:
    values = np.array([[0, 257 * 100], [257 * 200, 65535]], dtype=np.uint16)

    found = decode(image_bytes(Image.fromarray(values)))

    assert np.asarray(found)[..., 0].tolist() == [[0, 100], [200, 255]]


def test_the_image_is_rotated_by_its_exif_orientation() -> None:
    image = Image.new("RGB", (30, 10), "black")
    exif = Image.Exif()
    exif[0x0112] = 6

    assert decode(image_bytes(image, "JPEG", exif=exif)).size == (10, 30)


def test_the_first_frame_of_an_animation_is_used() -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue", "green")]
    for kind in ("GIF", "WEBP", "PNG"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = image_bytes(frames[0], kind, save_all=True, append_images=frames[1:], **options)

        assert decode(data).getpixel((4, 4)) == (255, 0, 0), kind


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
def test_a_truncated_file_is_refused(kind: str) -> None:
    data = image_bytes(picture(64, 64), kind)

    with pytest.raises(BadImage, match=r"cannot be decoded|none of"):
        decode(data[: len(data) // 2])


def test_too_many_pixels_are_refused_before_they_are_decoded() -> None:
    # A PNG of 60,000 x 60,000 pixels in 66 bytes.
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0"))
    bomb = data + chunk(b"IEND", b"")

    with pytest.raises(BadImage, match=r"60000 x 60000 = 3600000000 pixels, at most 67108864"):
        decode(bomb)


def test_a_decompression_bomb_in_a_png_text_chunk_is_refused() -> None:
    text = zlib.compress(bytes(100 * 2**20))
    body = b"zTXt" + b"a\0\0" + text
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    data = image_bytes(picture(4, 4))

    with pytest.raises(BadImage):
        decode(data[:33] + chunk + data[33:])


def test_a_side_that_is_too_long_is_refused_with_its_limit() -> None:
    with pytest.raises(BadImage, match=r"has 65536 x 1 pixels, each side must have at most 65535"):
        check_size(65_536, 1)

    check_size(65_535, 1)


def test_the_pixel_limit_is_exact() -> None:
    data = image_bytes(picture(10, 10))

    assert decode(data, max_pixels=100).size == (10, 10)
    with pytest.raises(BadImage, match="10 x 10 = 100 pixels, at most 99"):
        decode(data, max_pixels=99)


def test_sixteen_bit_images_are_converted_without_a_wider_copy() -> None:
    data = hostile.black_png(2048, 2048, hostile.GREY, 16)

    tracemalloc.start()
    image = decode(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    # Converted as a whole, the image would take 32 MiB as float64 or as table indices.
    assert image.size == (2048, 2048)
    assert peak < 20 * 2**20


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "1", "P", "I;16", "clear P"])
def test_conversion_in_bands_equals_conversion_as_a_whole(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.arange(70 * 50, dtype=np.uint16).reshape(50, 70) * 18)
    else:
        image = picture(70, 50, mode="RGBA").convert(mode.split()[-1])
    data = image_bytes(image, **({"transparency": 3} if mode == "clear P" else {}))

    whole = decode(data)
    monkeypatch.setattr(module, "BAND_PIXELS", 500)

    assert np.array_equal(np.asarray(decode(data)), np.asarray(whole))


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_an_image_larger_than_models_accept_is_scaled_down(kind: str) -> None:
    halves = Image.new("L", (6144, 3072))
    halves.paste(200, (3072, 0, 6144, 3072))

    image = decode(image_bytes(halves, kind))

    assert KEPT_PIXELS * 0.99 < image.width * image.height <= KEPT_PIXELS
    assert image.width / image.height == pytest.approx(2, rel=0.001)
    assert image.getpixel((10, 10)) == (0, 0, 0)
    assert image.getpixel((image.width - 10, 10)) == (200, 200, 200)


def test_an_image_of_the_maximum_size_is_not_scaled() -> None:
    data = hostile.black_png(4096, 4096, hostile.GREY, 1)

    assert decode(data).size == (4096, 4096)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (
            hostile.many_scans(1024, 1100),
            r"1024 x 1024 = 1048576 pixels in 1106 scans, at most 1024 scans of that size",
        ),
        (
            hostile.run_lengths(2049),
            r"2049 x 2049 = 4198401 pixels as run lengths, at most 4194304 are allowed",
        ),
        (
            hostile.black_png(8, 8, more=hostile.chunk(b"abCd") * 20_000),
            r"more than 16384 chunks, at most 16384 are allowed",
        ),
        (
            hostile.black_png(8, 8, tail=hostile.chunk(b"tEXt", b"a\0") * 20_000),
            r"more than 16384 chunks",
        ),
        (
            hostile.black_png(8, 8, more=hostile.chunk(b"iCCP", b"a\0\0" + zlib.compress(b"")) * 2),
            r"at least 2 colour profiles, at most 1 is allowed",
        ),
        (
            hostile.black_png(8, 8, more=hostile.chunk(b"eXIf", hostile.exif_of(6, 5000, 100_000))),
            r"100006 bytes of EXIF data, at most 65536 are allowed",
        ),
    ],
)
def test_a_small_file_that_is_expensive_to_decode_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(BadImage, match=why):
        decode(data)


def test_files_within_the_decoding_limits_are_decoded() -> None:
    progressive = image_bytes(picture(200, 100), "JPEG", progressive=True)
    exif = hostile.chunk(b"eXIf", hostile.exif_of(6, 10, 60_000))

    assert decode(progressive).size == (200, 100)
    assert decode(hostile.run_lengths(500)).size == (500, 500)
    assert decode(hostile.black_png(8, 4, more=exif)).size == (4, 8)


@pytest.mark.slow
def test_hostile_images_are_reproducible_and_decoded_or_refused() -> None:
    for seed in range(60):
        data, _ = hostile.HostileImages(seed).picture()
        try:
            image = decode(data)
        except BadImage:
            continue
        assert image.mode == "RGB" and image.width * image.height <= KEPT_PIXELS
    first, second = hostile.HostileImages(3).picture(), hostile.HostileImages(3).picture()
    assert first == second


def test_the_png_generator_writes_valid_black_images() -> None:
    for interlaced in (False, True):
        data = hostile.black_png(1100, 1000, hostile.RGB, interlaced=interlaced)
        assert np.asarray(Image.open(io.BytesIO(data))).max() == 0
