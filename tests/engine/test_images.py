"""Images in an engine: a span's rows stand in its place, wherever a chunk, a hit or a hand-off cuts it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.engine.engine_world import GREEDY, OPTIONS, SEEDED, Heard, World, decode, prefill, prompt_of, tiny_model
from tests.engine.memory_store import MemoryStore
from whalepod.core.clock import Deadline
from whalepod.core.errors import InternalError, InvalidFieldError, UnavailableError
from whalepod.engine.images import RequestImage, block_extras, same_images
from whalepod.engine.interface import EngineRequest, Fidelity, FinishReason
from whalepod.engine.sampling_params import SamplingParams
from whalepod.model.batch import Segment, image_rows
from whalepod.model.tensor_layout import ModelRole

IMAGE_ID, WIDTH, BLOCK = 500, 128, 16
CAT, DOG = b"cat" * 8, b"dog" * 8


@dataclass
class Pictures:
    """A SpanSource of random rows, a function of the content alone."""

    error: Exception | None = None
    gate: threading.Event | None = None
    asked: list[bytes] = field(default_factory=list)

    def rows(self, image: RequestImage, *, encoders: Sequence[str], deadline: Deadline) -> Tensor:
        self.asked.append(image.content_hash)
        if self.gate is not None:
            assert self.gate.wait(10)
        if self.error is not None:
            raise self.error
        return rows_of(image.content_hash, image.tokens)


def rows_of(content: bytes, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(content[:4], "little"))
    return torch.randn(tokens, WIDTH, generator=generator) / 4


def picture(start: int, tokens: int = 20, content: bytes = CAT) -> RequestImage:
    return RequestImage(start, tokens, content, b"", 1, 1)


def prompt_with(*images: RequestImage, tokens: int = 100, seed: int = 0) -> tuple[int, ...]:
    ids = list(prompt_of(tokens, seed=seed))
    for image in images:
        ids[image.start : image.end] = [IMAGE_ID] * image.tokens
    return tuple(ids)


def world(pictures: Pictures | None = None, **kinds: object) -> World:
    return World(spans=pictures or Pictures(), **kinds)  # type: ignore[arg-type]


@cache
def answer(*images: RequestImage, chunk: int = 512, sampling: SamplingParams = SEEDED, tokens: int = 100) -> Heard:
    """What one cold rank says, alone."""
    alone = world(options=replace(OPTIONS, slots=1, chunk_tokens=chunk))
    return alone.generate(prompt_with(*images, tokens=tokens), sampling, shares=False, images=images)


@pytest.mark.slow
def test_the_answer_is_the_networks_own() -> None:
    """The same rows by the model alone, without an engine around it."""
    image, model = picture(7), tiny_model()
    ids = prompt_with(image)
    caches = model.allocate(blocks=8, slots=1)
    segment = Segment(
        slot=0,
        block_table=range(8),
        start=0,
        token_ids=ids,
        history=(),
        floor=model.config.floor(len(ids)),
        logits_start=len(ids) - 1,
        images=image_rows([(image.start, rows_of(CAT, image.tokens))], start=0, end=len(ids)),
    )
    logits = model.network.forward([segment], caches)
    assert answer(image, sampling=GREEDY).ids[0] == int(logits[0].argmax())


@pytest.mark.slow
def test_the_answer_depends_on_the_image_and_its_place() -> None:
    said = [answer(*images).tokens for images in ((picture(7),), (picture(7, content=DOG),), (picture(8),), ())]
    assert len({tuple(tokens) for tokens in said}) == 4


@pytest.mark.parametrize(
    "chunk", [pytest.param(2, marks=pytest.mark.slow), 6, pytest.param(30, marks=pytest.mark.slow)]
)
def test_a_span_may_be_cut_anywhere(chunk: int) -> None:
    images = (picture(7), picture(27, 11, DOG), picture(70, 30))
    assert answer(*images, chunk=chunk).tokens == answer(*images).tokens


@pytest.mark.slow
@pytest.mark.parametrize("start", [60, 80])
def test_a_span_may_lie_at_the_end_of_the_prompt(start: int) -> None:
    """In rows that only run through the upper layers, and in the row that the first token is drawn from."""
    image = picture(start, 100 - start)
    assert answer(image, chunk=6).tokens == answer(image).tokens != answer(picture(start, 100 - start, DOG)).tokens


def test_the_text_before_a_missing_image_is_computed_and_no_row_behind_it() -> None:
    pictures = Pictures(gate=threading.Event())
    waiting = world(pictures, options=replace(OPTIONS, chunk_tokens=64))
    image = picture(37)
    heard = waiting.submit(waiting.request(prompt_with(image), SEEDED, images=(image,)))
    for _ in range(5):
        waiting.step()
    (sequence,) = waiting.engine._scheduler.holding
    assert (sequence.computed, waiting.engine.runnable, waiting.engine.compiling) == (37, False, True)
    assert pictures.gate is not None
    pictures.gate.set()
    waiting.run()
    assert heard.tokens == answer(image).tokens


@pytest.mark.slow
def test_others_go_on_while_one_waits_for_its_image() -> None:
    pictures = Pictures(gate=threading.Event())
    shared = world(pictures)
    image = picture(0)
    waits = shared.submit(shared.request(prompt_with(image), SEEDED, images=(image,)))
    runs = shared.submit(shared.request(prompt_of(40), GREEDY))
    for _ in range(10):
        shared.step()
    assert (len(runs.ends), len(waits.tokens)) == (1, 0)
    assert pictures.gate is not None
    pictures.gate.set()
    shared.run()
    assert waits.tokens == answer(image).tokens


def test_an_image_that_cannot_be_had_ends_its_request_truthfully_and_nothing_else() -> None:
    broken = world(Pictures(error=UnavailableError("no vision rank can be reached")))
    image = picture(7)
    heard = broken.submit(broken.request(prompt_with(image), images=(image,)))
    other = broken.submit(broken.request(prompt_of(40)))
    broken.run()
    assert heard.end.reason is FinishReason.ERROR
    assert isinstance(heard.end.error, UnavailableError)
    assert other.end.reason is FinishReason.LENGTH
    assert broken.engine.load().running == 0


@pytest.mark.slow
def test_rows_of_another_number_are_no_rows_of_this_image() -> None:
    class Short(Pictures):
        def rows(self, image: RequestImage, *, encoders: Sequence[str], deadline: Deadline) -> Tensor:
            return super().rows(image, encoders=encoders, deadline=deadline)[1:]

    image = picture(7)
    short = world(Short())
    heard = short.generate(prompt_with(image), images=(image,))
    assert isinstance(heard.end.error, InternalError)


def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing() -> None:
    pictures = Pictures(gate=threading.Event())
    waiting = world(pictures)
    image = picture(7)
    request = waiting.request(prompt_with(image), images=(image,))
    heard = waiting.submit(request)
    waiting.step()
    waiting.engine.cancel(request.request_id, request.attempt)
    assert pictures.gate is not None
    pictures.gate.set()
    waiting.run()
    assert (heard.tokens, heard.ends, waiting.engine.load().running) == ([], [], 0)


@pytest.mark.slow
def test_the_same_image_twice_is_fetched_once() -> None:
    pictures = Pictures()
    images = (picture(3), picture(40))
    twice = world(pictures)
    heard = twice.generate(prompt_with(*images), SEEDED, images=images)
    assert pictures.asked == [CAT]
    assert heard.tokens == answer(*images).tokens


@pytest.mark.slow
def test_many_images_are_fetched_some_at_a_time_and_dropped_when_they_are_computed() -> None:
    pictures = Pictures(gate=threading.Event())
    images = tuple(picture(4 * index, 3, b"%032d" % index) for index in range(24))
    many = world(pictures)
    heard = many.submit(many.request(prompt_with(*images), SEEDED, images=images))
    many.step()
    (sequence,) = many.engine._scheduler.holding
    assert len(sequence.spans_coming) == 16
    assert pictures.gate is not None
    pictures.gate.set()
    many.run()
    assert heard.tokens == answer(*images).tokens
    assert sorted(pictures.asked) == [image.content_hash for image in images]
    assert not sequence.spans


# --------------------------------------------------------------------------------------------------- prefix and names


@pytest.mark.parametrize("fidelity", [Fidelity.FAST, pytest.param(Fidelity.EXACT, marks=pytest.mark.slow)])
def test_the_same_text_with_another_image_hits_nothing_of_it(fidelity: Fidelity) -> None:
    cat, dog = picture(20), picture(20, content=DOG)
    warm = world()
    ask = {"fidelity": fidelity}
    warm.generate(prompt_with(cat), SEEDED, images=(cat,), **ask)
    other = warm.generate(prompt_with(dog), SEEDED, images=(dog,), **ask)
    assert other.end.cached_tokens == 16, "the block before the image is shared"
    again = warm.generate(prompt_with(cat), SEEDED, images=(cat,), **ask)
    assert again.end.cached_tokens == 64
    if fidelity is Fidelity.EXACT:
        assert again.tokens == answer(cat).tokens
        assert other.tokens == answer(dog).tokens


def test_a_hit_beyond_an_image_needs_no_row_of_it() -> None:
    pictures, image = Pictures(), picture(5, 12)
    warm = world(pictures)
    first = warm.generate(prompt_with(image), SEEDED, images=(image,), fidelity=Fidelity.FAST)
    again = warm.generate(prompt_with(image), SEEDED, images=(image,), fidelity=Fidelity.FAST)
    assert (first.end.cached_tokens, again.end.cached_tokens) == (0, 64)
    assert pictures.asked == [CAT], "the replay begins behind the image"


@pytest.mark.slow
def test_a_replay_over_an_image_asks_for_it_again() -> None:
    pictures, image = Pictures(), picture(40)
    warm = world(pictures)
    warm.generate(prompt_with(image), SEEDED, images=(image,))
    again = warm.generate(prompt_with(image), SEEDED, images=(image,))
    assert again.end.cached_tokens == 64
    assert pictures.asked == [CAT, CAT]
    assert again.tokens == answer(image).tokens


@pytest.mark.slow
def test_a_block_that_an_answer_fills_is_named_after_the_image_before_it() -> None:
    """An image at the end of the prompt reaches into the block that the answer completes."""
    long = replace(SEEDED, max_tokens=40)
    cat, dog = picture(90, 8), picture(90, 8, DOG)
    warm = world()
    said = warm.generate(prompt_with(cat), long, images=(cat,))
    turn = prompt_with(cat) + tuple(said.ids) + prompt_of(40, seed=3)
    hit = warm.generate(turn, images=(cat,))
    none = warm.generate(turn, images=(dog,))
    assert (hit.end.cached_tokens, none.end.cached_tokens) == (128, 80)


def test_names_of_blocks_hold_the_image_and_nothing_else_changes() -> None:
    extras = block_extras([picture(20)], block_tokens=BLOCK)
    assert set(extras) == {1, 2}
    assert block_extras([], block_tokens=BLOCK) == {}
    assert same_images([picture(1)], [picture(1)])
    assert not same_images([picture(1)], [picture(1, content=DOG)])


@pytest.mark.slow
def test_choices_share_a_prompt_only_with_the_same_images() -> None:
    pair = world()
    cat, dog = picture(20), picture(20, content=DOG)
    first = pair.request(prompt_with(cat), SEEDED, images=(cat,))
    other = replace(pair.request(prompt_with(dog), SEEDED, images=(dog,)), branch=0, branch_of=first.request_id)
    heard = [pair.submit(request) for request in (first, other)]
    pair.run()
    assert [each.tokens for each in heard] == [answer(cat).tokens, answer(dog).tokens]


# ------------------------------------------------------------ state from elsewhere


@pytest.mark.slow
@pytest.mark.parametrize("role", [ModelRole.FULL, ModelRole.ENCODER])
@pytest.mark.parametrize("start", [10, 66, 78])
def test_a_handoff_of_a_prompt_with_an_image_equals_one_rank(role: ModelRole, start: int) -> None:
    """Also where the decode rank computes rows of the span itself."""
    image, store = picture(start), MemoryStore()
    ids = prompt_with(image)
    left = prefill(world(store=store, role=role), ids, SEEDED, images=(image,))
    assert left.boundary_tokens > 0
    heard = decode(world(store=store), ids, left, SEEDED, name="request 1", images=(image,))
    assert heard.tokens == answer(image).tokens


@pytest.mark.slow
def test_a_decode_rank_asks_for_an_image_only_if_it_computes_rows_of_it() -> None:
    image, store, pictures = picture(10), MemoryStore(), Pictures()
    ids = prompt_with(image)
    left = prefill(world(store=store), ids, SEEDED, images=(image,))
    decode(world(pictures, store=store), ids, left, SEEDED, name="request 1", images=(image,))
    assert pictures.asked == []


@pytest.mark.slow
def test_a_stream_that_goes_on_elsewhere_says_the_same() -> None:
    image, long = picture(60), replace(SEEDED, max_tokens=8)
    whole = answer(image, sampling=long)
    resumed = world().generate(prompt_with(image), long, images=(image,), resumed=tuple(whole.ids[:3]))
    assert resumed.ids == whole.ids[3:]


@pytest.mark.slow
def test_a_preempted_request_goes_on_with_its_images() -> None:
    image = picture(60)
    tight = world(options=replace(OPTIONS, slots=2, blocks=15, chunk_tokens=32))
    long = replace(SEEDED, max_tokens=24)
    heard = [
        tight.submit(tight.request(prompt_with(image, seed=seed), long, images=(image,), shares=False))
        for seed in range(2)
    ]
    tight.run()
    assert tight.engine.preempted > 0
    for seed, each in enumerate(heard):
        alone = world(options=replace(OPTIONS, slots=1, chunk_tokens=512))
        wanted = alone.generate(prompt_with(image, seed=seed), long, images=(image,), shares=False)
        assert each.tokens == wanted.tokens


# ------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "images",
    [(picture(90),), (picture(30),), (picture(7, 21),), (picture(7), picture(8)), (picture(-5),)],
    ids=["past the end", "over text", "too long", "twice the same place", "before the start"],
)
def test_spans_that_are_not_in_the_prompt_are_our_own_mistake(images: tuple[RequestImage, ...]) -> None:
    checked = world()
    request = replace(checked.request(prompt_with(picture(7))), images=images)
    with pytest.raises(InternalError, match="image tokens"):
        checked.engine.checks.check(request)


def test_a_rank_without_a_way_to_images_takes_none() -> None:
    blind = World()
    request: EngineRequest = blind.request(prompt_with(picture(7)), images=(picture(7),))
    with pytest.raises(InvalidFieldError, match="no images"):
        blind.engine.checks.check(request)
