"""Hostile images and videos: small files that are expensive to decode, and broken files."""

import base64
import io
import random
import struct
import zlib
from collections.abc import Callable

from PIL import Image

SIDE = 8192
"""Side of the largest square that the server decodes: 64 Mi pixels."""
PNG_START = b"\x89PNG\r\n\x1a\n"
GREY, RGB, PALETTE, GREY_ALPHA, RGBA = 0, 2, 3, 4, 6
"""Color types of PNG."""
_CHANNELS = {GREY: 1, RGB: 3, PALETTE: 1, GREY_ALPHA: 2, RGBA: 4}
_PASSES = (
    *((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4)),
    *((0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)),
)
"""(first column, first row, column step, row step) of each pass of an interlaced PNG."""
_BLOCK = 2**20

Named = tuple[bytes, str]
"""The bytes of a file, and its MIME type."""


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def compressed_zeros(count: int) -> bytes:
    """A zlib stream of `count` zero bytes, made quickly by repeating equal blocks."""
    blocks, rest = divmod(count, _BLOCK)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(_BLOCK)) + packer.flush(zlib.Z_FULL_FLUSH)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    end = packer.compress(bytes(rest)) + packer.flush()
    adler = (count % 65521) << 16 | 1
    return b"\x78\x9c" + block * blocks + end + struct.pack(">I", adler)


def black_png(
    width: int,
    height: int,
    color: int = RGB,
    depth: int = 8,
    *,
    interlaced: bool = False,
    more: bytes = b"",
    tail: bytes = b"",
) -> bytes:
    """A black PNG; `more`: chunks before its pixels, `tail`: chunks after its pixels."""
    bits = _CHANNELS[color] * depth
    passes = _PASSES if interlaced else ((0, 0, 1, 1),)
    sizes = [(-(-(width - x) // dx), -(-(height - y) // dy)) for x, y, dx, dy in passes]
    count = sum(rows * ((columns * bits + 7) // 8 + 1) for columns, rows in sizes if columns > 0)
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlaced)
    palette = chunk(b"PLTE", bytes(768 if depth == 8 else 6)) if color == PALETTE else b""
    pixels = chunk(b"IDAT", compressed_zeros(count))
    head = PNG_START + chunk(b"IHDR", header) + palette + more
    return head + pixels + tail + chunk(b"IEND")


def many_scans(side: int, count: int) -> bytes:
    """A progressive JPEG with `count` more scans of a few bytes each."""
    data = file_of(Image.new("L", (side, side)), "JPEG", progressive=True)
    start = data.rindex(b"\xff\xda")
    return data[:start] + data[start:-2] * (count + 1) + data[-2:]


def run_lengths(side: int, *, rows: bool = True) -> bytes:
    """A run-length encoded BMP that contains only the first pixel of each row, or no row."""
    body = (b"\1\1\0\0" if rows else b"\0\0\1\1") * side
    offset = 54 + 1024
    head = struct.pack("<IHHI", offset + len(body), 0, 0, offset)
    info = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(body), 0, 0, 256, 0)
    return b"BM" + head + info + bytes(1024) + body


def exif_of(orientation: int, num_entries: int, size: int) -> bytes:
    """TIFF data in which `num_entries` tags share almost all of `size` bytes."""
    length = max(size - 12 * num_entries - 100, 8)
    entries = struct.pack("<HHIHH", 0x0112, 3, 1, orientation, 0)
    for number in range(num_entries):
        entries += struct.pack("<HHII", 0x0200 + number, 7, length, 8)
    data = b"II*\0" + struct.pack("<IH", 8, num_entries + 1) + entries + bytes(4)
    return data + bytes(max(0, size - len(data)))


def animation(kind: str, side: int, count: int) -> bytes:
    """`count` frames that change a pixel of a large image."""
    frames = [Image.new("P", (side, side)) for _ in range(2)]
    frames[1].putpixel((0, 0), 1)
    for frame in frames:
        frame.putpalette([0, 0, 0, 255, 255, 255])
    more = [frames[number % 2] for number in range(1, count)]
    return file_of(frames[0], kind, save_all=True, append_images=more, duration=20)


def small_frames(side: int, count: int) -> bytes:
    """A GIF of `count` frames of a pixel each, on a canvas of `side` squared, in 23 bytes each."""
    head = b"GIF89a" + struct.pack("<HH", side, side) + b"\x80\0\0" + bytes(3) + b"\xff" * 3
    frame = (
        b"\x21\xf9\4\5\1\0\0\0" + b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\2\2\x44\1\0"
    )
    return head + frame * count + b";"


def file_of(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


class HostileImages:
    """Random hostile images; equal seeds give equal images."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._makers: tuple[Callable[[], Named], ...] = (
            *(self._png, self._png, self._metadata, self._chunks, self._profiles, self._jpeg),
            *(self._scans, self._webp, self._gif, self._bmp, self._exif, self._bomb, self._tiff),
            *(self._strip, self._animation, self._changed, self._changed, self._noise),
        )

    def picture(self) -> Named:
        """A file, and the MIME type that is sent with it, which may be wrong."""
        data, kind = self._random.choice(self._makers)()
        if self._random.random() < 0.05:
            kind = self._random.choice(("image/png", "image/jpeg", "image/gif", "text/html"))
        return data, kind

    def url(self) -> str:
        """A random image as a data: URL."""
        data, kind = self.picture()
        return f"data:{kind};base64,{base64.b64encode(data).decode()}"

    def _side(self) -> int:
        return self._random.choice((1, 7, 100, 1000, 3000, SIDE - 1, SIDE))

    def _png(self) -> Named:
        pick = self._random.choice
        color = pick(tuple(_CHANNELS))
        small = (1, 2, 4, 8) if color in (GREY, PALETTE) else (8,)
        depth = pick(small if color == PALETTE else (*small, 16))
        clear = {GREY: bytes(2), RGB: bytes(6), PALETTE: bytes(2)}.get(color)
        more = chunk(b"tRNS", clear) if clear is not None and pick((True, False)) else b""
        interlaced = pick((True, False))
        data = black_png(self._side(), self._side(), color, depth, interlaced=interlaced, more=more)
        return data, "image/png"

    def _metadata(self) -> Named:
        text = zlib.compress(bytes(self._random.choice((10, 10**6, 5 * 10**6))), 9)
        body = self._random.choice(
            (
                chunk(b"zTXt", b"a\0\0" + text),
                chunk(b"iTXt", b"a\0\1\0\0\0" + text),
                chunk(b"tEXt", b"a\0" + bytes(10**6)),
                chunk(b"iCCP", b"a\0\0" + text),
            )
        )
        return black_png(64, 64, more=body * self._random.choice((1, 20, 100))), "image/png"

    def _chunks(self) -> Named:
        kind = self._random.choice((b"abCd", b"tEXt", b"IDAT", b"acTL", b"fcTL", b"fdAT", b"eXIf"))
        count = self._random.choice((1, 100, 300_000))
        return black_png(16, 16, more=chunk(kind, b"a\0") * count), "image/png"

    def _profiles(self) -> Named:
        profile = chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(900_000), 9))
        return black_png(16, 16, more=profile * self._random.choice((2, 5000))), "image/png"

    def _jpeg(self) -> Named:
        mode = self._random.choice(("L", "RGB", "CMYK"))
        image = Image.new(mode, (self._random.choice((16, 4000, SIDE)), 3000))
        exif = Image.Exif()
        exif[0x0112] = self._random.randrange(10)
        options = {"progressive": self._random.random() < 0.5, "exif": exif}
        return file_of(image, "JPEG", **options), "image/jpeg"

    def _scans(self) -> Named:
        return many_scans(*self._random.choice(((4096, 500), (1000, 3000), (16, 9)))), "image/jpeg"

    def _webp(self) -> Named:
        image = Image.new("RGBA", (self._side(), self._side()), (0, 0, 0, 9))
        lossless = self._random.random() < 0.8
        return file_of(image, "WEBP", lossless=lossless, method=0), "image/webp"

    def _gif(self) -> Named:
        data = small_frames(8, 1)
        block = self._random.choice((b"\x21\xfe\1a\0", b"\x21\xfe" + b"\1a" * 9 + b"\0", b"\0"))
        return data[:19] + block * self._random.choice((1, 100, 500_000)) + data[19:], "image/gif"

    def _bmp(self) -> Named:
        side = self._random.choice((100, 2048, SIDE))
        return run_lengths(side, rows=self._random.random() < 0.7), "image/bmp"

    def _exif(self) -> Named:
        pick = self._random.choice
        data = exif_of(self._random.randrange(10), pick((0, 5, 60_000)), pick((100, 10**6)))
        return black_png(16, 16, more=chunk(b"eXIf", data)), "image/png"

    def _bomb(self) -> Named:
        side = self._random.choice((0, 9000, 60_000, 2**31 - 1, 2**32 - 1))
        header = struct.pack(">IIBBBBB", side, side, 8, RGB, 0, 0, 0)
        pixels = chunk(b"IDAT", compressed_zeros(10**6))
        return PNG_START + chunk(b"IHDR", header) + pixels + chunk(b"IEND"), "image/png"

    def _tiff(self) -> Named:
        kind = self._random.choice(("TIFF", "ICO", "PPM", "TGA", "PCX", "SGI"))
        return file_of(Image.new("RGB", (64, 64)), kind), "image/png"

    def _strip(self) -> Named:
        """A long and narrow image: some models scale the shorter side to a fixed size."""
        sides = (self._random.choice((9000, 60_000, 65_535, 70_000)), self._random.randrange(1, 99))
        width, height = self._random.choice((sides, sides[::-1]))
        return black_png(width, height, GREY), "image/png"

    def _animation(self) -> Named:
        kind = self._random.choice(("GIF", "WEBP", "PNG"))
        if kind == "GIF" and self._random.random() < 0.5:
            return small_frames(self._side(), self._random.choice((1, 50, 50_000))), "image/gif"
        data = animation(kind, self._random.choice((16, 500)), self._random.randrange(2, 60))
        return data, f"image/{kind.lower()}"

    def _changed(self) -> Named:
        """An image with some bytes changed or missing."""
        kind = self._random.choice(("PNG", "JPEG", "WEBP", "GIF", "BMP"))
        data = bytearray(file_of(Image.effect_noise((60, 40), 90).convert("RGB"), kind))
        for _ in range(self._random.choice((1, 1, 5, 50))):
            data[self._random.randrange(len(data))] = self._random.randrange(256)
        if self._random.random() < 0.3:
            del data[self._random.randrange(len(data)) :]
        return bytes(data), f"image/{kind.lower()}"

    def _noise(self) -> Named:
        head = self._random.choice((PNG_START, b"\xff\xd8\xff", b"GIF89a", b"BM", b"RIFF", b""))
        return head + self._random.randbytes(self._random.randrange(2000)), "image/png"
