"""Images made ready for the model: what the released layer returns, for files of every kind, and nothing else."""

from __future__ import annotations

import io
import struct
import zlib

import deepseek_recipe as recipe
import pytest
from PIL import Image

from tests.model.vision.pictures import BAD, GOOD, data_url, encoded, noise, plain
from whalepod.core.errors import ContextLengthError, ImageError
from whalepod.model.config import ModelConfig
from whalepod.model.conformity_vision import RELEASED
from whalepod.model.prompt import ChatPrompt, PromptEncoder
from whalepod.model.tiny_checkpoint import shipped_tokenizer, tiny_config_json
from whalepod.model.vision import preparation
from whalepod.model.vision.grid import ImageGrid
from whalepod.model.vision.pixels import patches_of_bytes
from whalepod.model.vision.preparation import ImagePreparer, PreparedImage, content_hash

PREPARER = ImagePreparer(RELEASED)
TOKENIZER = shipped_tokenizer()
CONFIG = ModelConfig.from_json(tiny_config_json(TOKENIZER))
ENCODER = PromptEncoder(TOKENIZER, CONFIG, served_names=["whale"])
LARGE = {"40 megapixels", "1024x1024", "1920x1080", "1x5000", "5000x1"}


def prepared(data: bytes, **kinds: str) -> PreparedImage:
    (image,) = PREPARER.begin([recipe.BytesImageSource(data, **kinds)], field="messages").all()  # type: ignore[arg-type]
    return image


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in LARGE else ()) for n in GOOD])
def test_a_good_file_becomes_the_size_the_layer_says_and_as_many_tokens_as_it_counts(name: str) -> None:
    make, size = GOOD[name]
    image = prepared(make())
    assert (image.width, image.height) == size
    assert Image.open(io.BytesIO(image.data)).size == size, "what the encoder will see"
    counted = recipe.MultiModalData([recipe.ImageInfo(image.data, *size)]).image_token_adjustment() + 1
    assert image.tokens == counted <= RELEASED.max_image_tokens
    assert image.grid == ImageGrid.fit(*size, RELEASED)
    assert (image.grid.width, image.grid.height) == size, "nothing is resized again"


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_by_its_kind_and_place(name: str) -> None:
    make, kind = BAD[name]
    with pytest.raises(ImageError, match=r"^messages\.0\.content\[1\]: ") as refused:
        prepared(make(), path="messages.0.content[1]")
    assert (refused.value.kind, refused.value.field) == (kind, "messages")


def test_what_is_prepared_can_be_encoded() -> None:
    image = prepared(encoded(plain(100, 80)))
    patches = patches_of_bytes(image.data, RELEASED)
    assert patches.grid == image.grid
    red = patches.values[:, 0].float().mean()
    assert red > 0.95


def test_the_same_file_has_the_same_name_and_any_other_image_another() -> None:
    one, again, other = (
        prepared(encoded(noise(90, 60))),
        prepared(encoded(noise(90, 60))),
        prepared(encoded(noise(90, 60, seed=1))),
    )
    assert one == again
    assert one.content_hash != other.content_hash
    assert one.content_hash == content_hash(one.data, one.width, one.height)
    assert len({content_hash(b"x", 1, 2), content_hash(b"x", 2, 1), content_hash(b"y", 1, 2)}) == 3


def test_detail_decides_the_size_and_so_the_name() -> None:
    data = encoded(plain(1024, 768))
    low, high, original, auto = (prepared(data, detail=detail) for detail in ("low", "high", "original", "auto"))
    assert low.tokens < high.tokens
    assert low.content_hash != high.content_hash
    assert high == original == auto


def test_no_more_images_and_bytes_than_a_request_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    source = recipe.BytesImageSource(encoded(plain(1, 1)), path="input[3]")
    with pytest.raises(ImageError, match="600") as refused:
        PREPARER.begin([source] * 601, field="input").all()
    assert refused.value.kind == "TooManyImages"
    monkeypatch.setattr(preparation, "PREPARED_BYTES_MAX", 1000)
    with pytest.raises(ImageError, match=r"input\[3\]") as refused:
        PREPARER.begin([source] * 3, field="input").all()
    assert refused.value.kind == "TotalSizeTooLarge"


def test_what_stands_twice_in_a_request_is_made_ready_once_and_too_many_tokens_end_it_early() -> None:
    one, other = (recipe.BytesImageSource(encoded(plain(1, 1, colour))) for colour in ("red", "blue"))
    low = recipe.BytesImageSource(encoded(plain(1, 1)), "low")
    first, second, third, fourth = PREPARER.begin([one, other, one, low], field="messages").all()
    assert first is third
    assert second is not first
    assert fourth is not first
    work = PREPARER.begin([one] * 600, field="messages", tokens_max=3 * first.tokens)
    with pytest.raises(ContextLengthError):
        work.all()
    assert len(work.images) == 4


@pytest.mark.parametrize("size", [(10_001, 10_000), (50_000, 50_000)])
def test_an_image_that_would_fill_the_memory_is_refused_by_its_header(size: tuple[int, int]) -> None:
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBB", 13, b"IHDR", *size, 8, 2, 0, 0, 0)
    data = head + struct.pack(">I", zlib.crc32(head[12:])) + struct.pack(">I4s", 0, b"IDAT") + bytes(4)
    sources = (recipe.BytesImageSource(data), recipe.DataUrlImageSource(data_url(data)))
    for source in sources:
        with pytest.raises(ImageError, match="pixels") as refused:
            PREPARER.begin([source], field="messages").all()
        assert refused.value.kind == "ImageTooLarge"


@pytest.mark.parametrize("url", ["https://127.0.0.1/x.png", "http://localhost/x.png", "https://169.254.169.254/latest"])
def test_nothing_is_fetched_here(url: str) -> None:
    with pytest.raises(ImageError) as refused:
        PREPARER.begin([recipe.UrlImageSource(url)], field="messages").all()
    assert refused.value.kind == "DestinationRejected"


# ------------------------------------------------------------------------------------------------ images in prompts


def chat(*content: str | bytes) -> ChatPrompt:
    """A user's message of texts and images."""
    parts = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in content
    ]
    body = {"model": "whale", "messages": [{"role": "user", "content": parts}], "thinking": {"type": "disabled"}}
    return ENCODER.chat({**body, "max_tokens": 4}, context_tokens=4096)


def test_a_placeholder_becomes_the_span_of_its_image() -> None:
    red, blue = encoded(plain(100, 80)), encoded(plain(30, 90, "blue"))
    prompt = chat("one", red, "two", blue)
    first, second = prompt.images
    for placed in prompt.images:
        assert set(prompt.prompt_ids[placed.start : placed.end]) == {CONFIG.image_token_id}
    spans = first.image.tokens + second.image.tokens
    assert list(prompt.prompt_ids).count(CONFIG.image_token_id) == spans  # type: ignore[arg-type]
    assert (first.image.content_hash, second.image.content_hash) == tuple(
        chat(picture).images[0].image.content_hash for picture in (red, blue)
    )
    assert first.end < second.start


def test_images_stand_in_the_order_of_their_places_where_tools_answer_in_another() -> None:
    """The layer puts results of tools in the order of their calls."""
    red, blue = data_url(encoded(plain(100, 80))), data_url(encoded(plain(100, 80, "blue")))
    calls = [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}
        for name in ("first", "second")
    ]
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

    def result(name: str, url: str) -> dict[str, object]:
        return {"role": "tool", "tool_call_id": name, "content": [{"type": "image_url", "image_url": {"url": url}}]}

    def images(*results: dict[str, object]) -> list[bytes]:
        messages = [{"role": "user", "content": "look"}, {"role": "assistant", "tool_calls": calls}, *results]
        body = {"model": "whale", "messages": messages, "tools": [look], "max_tokens": 4}
        prompt = ENCODER.chat(body, context_tokens=4096)
        return [placed.image.content_hash for placed in prompt.images]

    in_order = images(result("first", red), result("second", blue))
    turned = images(result("second", blue), result("first", red))
    assert in_order == turned
    assert len(set(in_order)) == 2
