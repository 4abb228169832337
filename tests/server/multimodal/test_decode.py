"""Bytes of clients become RGB pictures, or an error that says why not."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from tiny_vision import image_bytes, picture

from server.multimodal.decode import BadImage, check_size, decode


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "JPEG"])
def test_each_format_is_read(kind: str) -> None:
    image = picture(20, 12)

    found = decode(image_bytes(image, kind))

    assert found.mode == "RGB"
    assert found.size == (20, 12)


@pytest.mark.parametrize("kind", ["TIFF", "ICO", "PPM", "PDF", "PCX"])
def test_other_formats_of_pillow_are_refused(kind: str) -> None:
    with pytest.raises(BadImage, match="none of PNG, JPEG, WEBP, GIF, BMP"):
        decode(image_bytes(picture(16, 16), kind))


def test_what_is_no_image_is_refused() -> None:
    for data in (b"x", b"<svg/>", b"GIF89a", b"\x89PNG\r\n\x1a\n", b"%PDF-1.4", b"BM" + bytes(60)):
        with pytest.raises(BadImage):
            decode(data)


def test_transparent_pixels_are_white() -> None:
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
def test_grayscale_palette_and_print_become_rgb(mode: str) -> None:
    image = picture(8, 8).convert(mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"

    found = decode(image_bytes(image, kind))

    assert found.mode == "RGB"
    if mode != "CMYK":
        assert np.array_equal(np.asarray(found), np.asarray(image.convert("RGB")))


def test_sixteen_bits_are_scaled() -> None:
    values = np.array([[0, 257 * 100], [257 * 200, 65535]], dtype=np.uint16)

    found = decode(image_bytes(Image.fromarray(values)))

    assert np.asarray(found)[..., 0].tolist() == [[0, 100], [200, 255]]


def test_the_picture_is_turned_as_its_exif_data_say() -> None:
    image = Image.new("RGB", (30, 10), "black")
    exif = Image.Exif()
    exif[0x0112] = 6

    assert decode(image_bytes(image, "JPEG", exif=exif)).size == (10, 30)


def test_the_first_frame_of_an_animation_is_taken() -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue", "green")]
    for kind in ("GIF", "WEBP", "PNG"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = image_bytes(frames[0], kind, save_all=True, append_images=frames[1:], **options)

        assert decode(data).getpixel((4, 4)) == (255, 0, 0), kind


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
def test_a_file_that_was_cut_is_refused(kind: str) -> None:
    data = image_bytes(picture(64, 64), kind)

    with pytest.raises(BadImage, match=r"cannot be decoded|none of"):
        decode(data[: len(data) // 2])


def test_too_many_pixels_are_refused_before_they_are_decoded() -> None:
    # A PNG of 60,000 x 60,000 pixels in 70 bytes.
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0"))
    bomb = data + chunk(b"IEND", b"")

    with pytest.raises(BadImage, match=r"60000 x 60000 = 3600000000 pixels, at most 67108864"):
        decode(bomb)


def test_a_bomb_in_the_text_of_a_png_is_refused() -> None:
    text = zlib.compress(bytes(100 * 2**20))
    body = b"zTXt" + b"a\0\0" + text
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    data = image_bytes(picture(4, 4))

    with pytest.raises(BadImage):
        decode(data[:33] + chunk + data[33:])


def test_a_side_that_is_too_long_is_told_by_its_own_limit() -> None:
    with pytest.raises(BadImage, match=r"has 65536 x 1 pixels, a side has at most 65535"):
        check_size(65_536, 1)

    check_size(65_535, 1)


def test_a_limit_of_pixels_is_exact() -> None:
    data = image_bytes(picture(10, 10))

    assert decode(data, max_pixels=100).size == (10, 10)
    with pytest.raises(BadImage, match="10 x 10 = 100 pixels, at most 99"):
        decode(data, max_pixels=99)
