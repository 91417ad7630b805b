"""Blocks and snapshots as bytes: the canonical layout, exact round trips, and nothing written from malformed bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.engine_world import tiny_model
from whalepod.engine.interface import SampledToken, SnapshotKind
from whalepod.engine.state_image import StateImage
from whalepod.kvstore.value_format import FormatId, PartKind, SnapshotValue
from whalepod.model.caches import Caches
from whalepod.model.record_formats import RELEASE_FORMATS, CacheFormats, plain_formats
from whalepod.model.tensor_layout import ModelRole

W, B = 16, 16
BLOCKS = [5, 2, 7, 0, 3, 6]
FORMATS = [RELEASE_FORMATS, plain_formats(torch.float32)]


def _caches(seed: int, formats: CacheFormats = RELEASE_FORMATS, role: ModelRole = ModelRole.FULL) -> Caches:
    """Filled with bytes that tell every place from every other."""
    caches = Caches.allocate(tiny_model().config, blocks=8, slots=3, formats=formats, role=role)
    generator = torch.Generator().manual_seed(seed)
    for pools in (caches.global_kv, caches.index_keys, caches.windows, caches.draft_windows):
        for pool in pools.values():
            pool.random_(0, 256, generator=generator)
    for ring in caches.groups.values():
        ring.normal_(generator=generator)
    return caches


def _image(caches: Caches) -> StateImage:
    return StateImage(caches, tiny_model().config)


def _tensors(caches: Caches) -> Mapping[str, torch.Tensor]:
    kinds = {
        "kv": caches.global_kv,
        "ik": caches.index_keys,
        "window": caches.windows,
        "draft": caches.draft_windows,
        "group": caches.groups,
    }
    return {f"{kind}{layer}": pool.clone() for kind, pools in kinds.items() for layer, pool in pools.items()}


def _unchanged(caches: Caches, before: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(now, before[name]) for name, now in _tensors(caches).items())


def _export(image: StateImage, kind: SnapshotKind, boundary: int, *, slot: int = 1) -> SnapshotValue:
    return image.export_snapshot(kind, slot=slot, blocks=BLOCKS, boundary=boundary, prompt_tokens=90).wait()


def test_a_block_is_kv_of_each_source_then_index_keys_codes_before_scales() -> None:
    caches = _caches(1)
    payload = bytes(_image(caches).export_block(5).wait())
    expected = b""
    for pool, codes in ((caches.global_kv, 32), (caches.index_keys, 16)):  # 64 channels in FP4, 32 channels in FP4
        for source in (2, 4, 6):
            records = pool[source][5]
            expected += records[:, :codes].numpy().tobytes() + records[:, codes:].numpy().tobytes()
    assert payload == expected
    layout = _image(caches).block_layout
    assert len(payload) == layout.payload_bytes == caches.bytes_per_block
    assert layout.format_id == FormatId.RELEASE
    assert [(part.kind, part.layer) for part in layout.parts] == [
        (kind, source) for kind in (PartKind.GLOBAL_KV, PartKind.INDEX_KEYS) for source in (2, 4, 6)
    ]


@pytest.mark.parametrize("formats", FORMATS, ids=lambda formats: formats.name)
def test_a_block_comes_back_elsewhere_and_nowhere_else(formats: CacheFormats) -> None:
    source, target = _caches(1, formats), _caches(2, formats)
    before = _tensors(target)
    _image(target).import_block(3, bytes(_image(source).export_block(5).wait()))
    for name, now in _tensors(target).items():
        if name[:2] in ("kv", "ik"):
            assert torch.equal(now[3], _tensors(source)[name][5])
            now[3] = before[name][3]
        assert torch.equal(now, before[name])


@pytest.mark.parametrize("formats", FORMATS, ids=lambda formats: formats.name)
@pytest.mark.parametrize("kind", SnapshotKind)
@pytest.mark.parametrize("boundary", [1, 2, 15, 16, 17, 32, 40, 41, 87])
def test_a_snapshot_brings_exactly_what_is_below_its_boundary(
    boundary: int, kind: SnapshotKind, formats: CacheFormats
) -> None:
    source, target = _caches(1, formats), _caches(2, formats)
    image = _image(target)
    snapshot = image.parse(_export(_image(source), kind, boundary))
    assert snapshot is not None
    theirs, before, blocks = _tensors(source), _tensors(target), [1, 4, 0, 2, 6, 7]
    image.import_snapshot(snapshot, slot=2, blocks=blocks)
    expected = {name: tensor.clone() for name, tensor in before.items()}
    for layer in range(10 if kind is SnapshotKind.FULL else 7):
        for position in range(max(0, boundary - W + 1), boundary):
            row = position % target.ring_rows
            expected[f"window{layer}"][2, row] = theirs[f"window{layer}"][1, row]
    for number in range(3 if kind is SnapshotKind.FULL else 0):
        for position in range(max(0, boundary - W), boundary):
            row = position % target.ring_rows
            expected[f"draft{number}"][2, row] = theirs[f"draft{number}"][1, row]
    block = boundary // B
    for layer, ratio in ((2, 2), (4, 2), (6, 1)):
        for name in (f"kv{layer}", f"ik{layer}"):
            count = boundary % B // ratio
            expected[name][blocks[block], :count] = theirs[name][BLOCKS[block], :count]
        for position in range(boundary - boundary % ratio, boundary):
            row = position % target.group_ring_rows
            expected[f"group{layer}"][2, row] = theirs[f"group{layer}"][1, row]
    for name, now in _tensors(target).items():
        assert torch.equal(now, expected[name]), name


def test_what_is_known_of_the_sequence_travels_with_it() -> None:
    image, token = _image(_caches(1)), SampledToken(9, logprob=-0.5, top_ids=(9,), top_logprobs=(-0.5,))
    value = image.export_snapshot(
        SnapshotKind.FULL, slot=0, blocks=BLOCKS, boundary=41, prompt_tokens=41, exact=False, next_token=token
    ).wait()
    snapshot = image.parse(value)
    assert snapshot is not None
    assert (snapshot.boundary, snapshot.exact, snapshot.state.prompt_tokens) == (41, False, 41)
    assert snapshot.state.next_token == token
    assert value.valid_from == 41 - W + 1


def test_a_snapshot_is_a_copy() -> None:
    caches = _caches(1)
    value = _export(_image(caches), SnapshotKind.FULL, 41)
    before = {part: bytes(data) for part, data in value.parts.items()}
    for ring in caches.windows.values():
        ring.zero_()
    assert {part: bytes(data) for part, data in value.parts.items()} == before


def test_a_rank_without_upper_layers_takes_no_full_snapshot() -> None:
    value = _export(_image(_caches(1)), SnapshotKind.FULL, 41)
    assert _image(_caches(2, role=ModelRole.ENCODER)).parse(value) is None
    encoder = _export(_image(_caches(1)), SnapshotKind.ENCODER, 40)
    assert _image(_caches(2, role=ModelRole.ENCODER)).parse(encoder) is not None


def test_both_roles_write_the_same_encoder_snapshot() -> None:
    full, encoder = _caches(1), _caches(1, role=ModelRole.ENCODER)
    for layer, ring in encoder.windows.items():
        ring.copy_(full.windows[layer])
    for source, ring in encoder.groups.items():
        ring.copy_(full.groups[source])
    ours, theirs = (_export(_image(caches), SnapshotKind.ENCODER, 40) for caches in (full, encoder))
    assert {part: bytes(data) for part, data in ours.parts.items()} == {
        part: bytes(data) for part, data in theirs.parts.items()
    }


PARTS = list(PartKind)


@given(part=st.sampled_from(PARTS), size=st.integers(0, 20_000), missing=st.booleans())
def test_a_part_of_the_wrong_size_makes_a_snapshot_none(part: PartKind, size: int, missing: bool) -> None:
    value = _export(_image(_caches(1)), SnapshotKind.FULL, 41)
    parts = dict(value.parts)
    if missing:
        del parts[part]
    elif size == memoryview(parts[part]).nbytes:
        return
    else:
        parts[part] = bytes(size)
    caches = _caches(2)
    before = _tensors(caches)
    assert _image(caches).parse(replace(value, parts=parts)) is None
    assert _unchanged(caches, before)


@given(boundary=st.integers(-(2**40), 2**40), mode=st.integers(0, 2**16 - 1))
def test_another_boundary_or_stamp_makes_a_snapshot_none_or_another_of_the_same_shape(boundary: int, mode: int) -> None:
    image = _image(_caches(1))
    value = _export(image, SnapshotKind.FULL, 41)
    snapshot = image.parse(replace(value, boundary_tokens=boundary, mode=mode))
    # Longer prompts with the same place in block and group have parts of the same sizes; callers compare the boundary.
    assert snapshot is None or (snapshot.kind is SnapshotKind.FULL and snapshot.boundary % B == 41 % B)


def test_an_unknown_part_makes_a_snapshot_none() -> None:
    value = _export(_image(_caches(1)), SnapshotKind.ENCODER, 40)
    assert _image(_caches(2)).parse(replace(value, parts={**value.parts, PartKind.DRAFT_ROWS: b"x"})) is None
