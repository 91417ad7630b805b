"""Images as requests bring them, made ready for the model by the released prompt layer.

    source ─▶ deepseek-recipe: decode, resize, encode again ─▶ PreparedImage ─▶ its span in the prompt

What comes out is what is hashed and what is encoded: the tower never sees the client's own pixels, so every rank and
every cache agrees. Nothing here touches the network: who fetches a URL passes on its bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from urllib.parse import unquote_to_bytes

import deepseek_recipe as recipe
from PIL import Image, UnidentifiedImageError

from whalepod.core.errors import ContextLengthError, ImageError, InternalError
from whalepod.model.config import VisionConfig

from .grid import ImageGrid

PROCESSOR_VERSION = f"deepseek-recipe {version('deepseek-recipe')}"
"""Part of the name of every block that an image touches."""
IMAGES_MAX = 600
"""Of one request; the prompt layer's limit."""
PREPARED_BYTES_MAX = 32 << 20
"""Of one request's images as they travel to the ranks: half of what one message may have."""
PIXELS_MAX = 100_000_000
"""Of one image as it came: 300 MB once it is decoded. A file of a few megabytes may hold a thousand times as many."""
URL_SHOWN_CHARS = 200

_RELEASED_SIZES = (14, 3, 1024, 295936, None)
"""What the prompt layer's own count of tokens stands for."""


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """What the vision encoder is given. `grid` follows from the size and the model's configuration."""

    data: bytes
    """A WebP."""
    width: int
    height: int
    grid: ImageGrid
    content_hash: bytes
    """32 bytes over data, width and height."""

    @property
    def tokens(self) -> int:
        return self.grid.tokens

    @classmethod
    def of(cls, data: bytes, width: int, height: int, config: VisionConfig) -> PreparedImage:
        return cls(data, width, height, ImageGrid.fit(width, height, config), content_hash(data, width, height))


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image and where its span begins in a prompt."""

    start: int
    image: PreparedImage

    @property
    def end(self) -> int:
        return self.start + self.image.tokens


def content_hash(data: bytes, width: int, height: int) -> bytes:
    """What tells prepared images apart."""
    return hashlib.sha256(struct.pack("<II", width, height) + data).digest()


class ImagePreparer:
    """Safe to use from several threads: the layer's work releases the interpreter's lock."""

    def __init__(self, config: VisionConfig) -> None:
        self._config = config
        nowhere = recipe.ReqwestImageFetcher().with_destination_filter(lambda _host, _address: False)
        self._resolver = recipe.ImageResolver(nowhere, recipe.OpenCvImagePreprocessor())

    def begin(self, sources: Sequence[recipe.ImageSource], *, field: str, tokens_max: int | None = None) -> Preparation:
        """To make them ready one by one. `field` is what the request calls their place; `tokens_max`: they may take no
        more together. Raises ImageError if there are too many."""
        if len(sources) > IMAGES_MAX:
            message = f"too many images: at most {IMAGES_MAX} a request, not {len(sources)}"
            raise ImageError(field, "TooManyImages", message)
        return Preparation(self, sources, field=field, tokens_max=tokens_max)

    def one(self, source: recipe.ImageSource, quota: recipe.ImageQuota, field: str) -> PreparedImage:
        """Raises ImageError with the layer's kind; a source that is a URL is refused."""
        pixels = _pixels(source)
        if pixels > PIXELS_MAX:
            message = f"the image has {pixels} pixels; at most {PIXELS_MAX} are taken"
            raise ImageError(field, "ImageTooLarge", message, place=source.path)
        try:
            resolved = self._resolver.resolve([source], quota)
        except recipe.ImageError as error:
            raise ImageError(field, error.kind, _message(error), place=source.path) from error
        except recipe.CalcResizeError as error:
            message = f"the image has a size that cannot be fitted: {error}"
            raise ImageError(field, "CalcResize", message, place=source.path) from error
        (info,) = resolved.images
        image = PreparedImage.of(info.data, info.width, info.height, self._config)
        self._check_tokens(image, resolved)
        return image

    def _check_tokens(self, image: PreparedImage, resolved: recipe.MultiModalData) -> None:
        """Two counts of the same tokens, where the model has the released sizes."""
        c = self._config
        sizes = (c.patch_size, c.downsample_ratio, c.max_image_tokens, c.min_pixels, c.max_wh_ratio)
        counted = resolved.image_token_adjustment() + 1
        if sizes == _RELEASED_SIZES and counted != image.tokens:
            raise InternalError(f"an image takes {image.tokens} tokens, but the prompt layer counts {counted}")


class Preparation:
    """The images of one request, in order. Between two of them somebody else's may have their turn, and who has hung up
    costs no more than the one that is at work. What stands in a request twice is made ready once."""

    def __init__(
        self, preparer: ImagePreparer, sources: Sequence[recipe.ImageSource], *, field: str, tokens_max: int | None
    ) -> None:
        self._preparer = preparer
        self._sources = sources
        self._field = field
        self._tokens_max = tokens_max
        self._quota = recipe.ImageQuota()
        self._made: dict[tuple[bytes | str | None, str | None], PreparedImage] = {}
        self._bytes = 0
        self._tokens = 0
        self.images: list[PreparedImage] = []

    @property
    def done(self) -> bool:
        return len(self.images) == len(self._sources)

    def all(self) -> list[PreparedImage]:
        """Raises what `step` does."""
        while not self.done:
            self.step()
        return self.images

    def step(self) -> None:
        """The next image. Raises ImageError, ContextLengthError where those so far are too many tokens."""
        source = self._sources[len(self.images)]
        content = source.data if source.data is not None else source.data_url
        image = self._made.get((content, source.detail))
        if image is None:
            image = self._preparer.one(source, self._quota, self._field)
            self._made[content, source.detail] = image
        self.images.append(image)
        self._bytes += len(image.data)
        self._tokens += image.tokens
        if self._bytes > PREPARED_BYTES_MAX:
            message = f"the images of a request take at most {PREPARED_BYTES_MAX >> 20} MiB once they are resized"
            raise ImageError(self._field, "TotalSizeTooLarge", message, place=source.path)
        if self._tokens_max is not None and self._tokens > self._tokens_max:
            raise ContextLengthError(tokens=self._tokens, tokens_max=self._tokens_max, field=self._field)


def _pixels(source: recipe.ImageSource) -> int:
    """What the file's header says, before anything is decoded; 0 if it says nothing, and the layer may judge."""
    data = source.data if source.data is not None else _data_of_url(source.data_url or "")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "GIF", "WEBP")) as opened:
                return opened.width * opened.height
    except Image.DecompressionBombError:
        return PIXELS_MAX + 1
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError):
        return 0


def _data_of_url(url: str) -> bytes:
    """Of a data URL; empty if it is none."""
    head, comma, body = url.partition(",")
    if not comma:
        return b""
    if not head.endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode(body)
    except ValueError:
        return b""


def _message(error: recipe.ImageError) -> str:
    """Without the place, which is told beside it, and with no more of a data URL than is of use."""
    text = re.sub(r"^\S+: ", "", str(error)) if error.kind not in ("InvalidUrl",) else str(error)
    return text if len(text) <= URL_SHOWN_CHARS else text[:URL_SHOWN_CHARS] + "…"
