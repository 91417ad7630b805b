"""Image files of every kind, as clients send them."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    held = io.BytesIO()
    image.save(held, kind, **options)
    return held.getvalue()


def plain(width: int, height: int, colour: str = "red", mode: str = "RGB") -> Image.Image:
    return Image.new("RGB", (width, height), colour).convert(mode)


def noise(width: int, height: int, *, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def _turned() -> bytes:
    image = plain(300, 200)
    exif = image.getexif()
    exif[0x0112] = 6  # orientation: turned by a quarter
    return encoded(image, "JPEG", exif=exif)


def _sixteen_bits() -> bytes:
    return encoded(Image.fromarray((np.arange(8000).reshape(80, 100) * 8).astype(np.uint16)))


def _animated(kind: str) -> bytes:
    first, second = plain(60, 40), plain(60, 40, "blue")
    return encoded(first, kind, save_all=True, append_images=[second])


def _transparent() -> bytes:
    return encoded(Image.new("RGBA", (50, 50), (255, 0, 0, 0)))


SQUARE, WIDE, TEN_BY_EIGHT = (546, 546), (672, 448), (616, 490)
GOOD: Mapping[str, tuple[Callable[[], bytes], tuple[int, int]]] = {
    "1x1": (lambda: encoded(plain(1, 1)), SQUARE),
    "1x1 jpeg": (lambda: encoded(plain(1, 1), "JPEG"), SQUARE),
    "2x3": (lambda: encoded(plain(2, 3)), (448, 672)),
    "14x14": (lambda: encoded(plain(14, 14)), SQUARE),
    "544x544": (lambda: encoded(plain(544, 544)), SQUARE),
    "546x546": (lambda: encoded(plain(546, 546)), SQUARE),
    "640x480": (lambda: encoded(plain(640, 480)), (644, 490)),
    "1024x1024": (lambda: encoded(plain(1024, 1024)), (1036, 1036)),
    "1920x1080": (lambda: encoded(plain(1920, 1080)), (1708, 966)),
    "300x3000": (lambda: encoded(plain(300, 3000)), (308, 3010)),
    "1x5000": (lambda: encoded(plain(1, 5000)), (42, 16380)),
    "5000x1": (lambda: encoded(plain(5000, 1)), (16380, 28)),
    "40 megapixels": (lambda: encoded(plain(8000, 5000)), (1610, 1008)),
    "webp": (lambda: encoded(plain(100, 80), "WEBP"), TEN_BY_EIGHT),
    "webp without loss": (lambda: encoded(plain(100, 80), "WEBP", lossless=True), TEN_BY_EIGHT),
    "gif": (lambda: encoded(plain(100, 80, mode="P"), "GIF"), TEN_BY_EIGHT),
    "palette": (lambda: encoded(plain(100, 80, mode="P")), TEN_BY_EIGHT),
    "grey": (lambda: encoded(plain(100, 80, mode="L")), TEN_BY_EIGHT),
    "grey jpeg": (lambda: encoded(plain(100, 80, mode="L"), "JPEG"), TEN_BY_EIGHT),
    "grey and alpha": (lambda: encoded(plain(100, 80, mode="LA")), TEN_BY_EIGHT),
    "black and white": (lambda: encoded(plain(100, 80, mode="1")), TEN_BY_EIGHT),
    "alpha": (lambda: encoded(plain(100, 80, mode="RGBA")), TEN_BY_EIGHT),
    "all transparent": (_transparent, SQUARE),
    "cmyk": (lambda: encoded(plain(100, 80, mode="CMYK"), "JPEG"), TEN_BY_EIGHT),
    "ycbcr": (lambda: encoded(plain(100, 80, mode="YCbCr"), "JPEG"), TEN_BY_EIGHT),
    "progressive": (lambda: encoded(plain(100, 80), "JPEG", progressive=True), TEN_BY_EIGHT),
    "16 bits": (_sixteen_bits, TEN_BY_EIGHT),
    "optimised": (lambda: encoded(plain(100, 80), optimize=True), TEN_BY_EIGHT),
    "animated gif": (lambda: _animated("GIF"), WIDE),
    "animated webp": (lambda: _animated("WEBP"), WIDE),
    "animated png": (lambda: _animated("PNG"), WIDE),
    "turned by its exif": (_turned, WIDE),
    "with something behind it": (lambda: encoded(plain(100, 80)) + b"more", TEN_BY_EIGHT),
    "noise": (lambda: encoded(noise(100, 80)), TEN_BY_EIGHT),
}
"""File, and the size at which the released layer hands it on: by its content, whatever it is called."""

BAD: Mapping[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "EmptyImage"),
    "text": (lambda: b"this is no image", "UnsupportedMediaType"),
    "bmp": (lambda: encoded(plain(50, 50), "BMP"), "UnsupportedMediaType"),
    "tiff": (lambda: encoded(plain(50, 50), "TIFF"), "UnsupportedMediaType"),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "UnsupportedMediaType"),
    "a png's head": (lambda: encoded(noise(50, 50))[:24], "Decode"),
    "half a png": (lambda: encoded(noise(200, 200))[:3000], "EmptyImage"),
    "a jpeg's head": (lambda: encoded(noise(50, 50), "JPEG")[:100], "Decode"),
    "a gif's head": (lambda: b"GIF89a", "Decode"),
    "a webp's head": (lambda: encoded(noise(50, 50), "WEBP")[:40], "EmptyImage"),
}
"""File, and the layer's word for what is wrong with it."""
