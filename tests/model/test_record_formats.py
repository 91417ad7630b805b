from __future__ import annotations

import pytest
import torch

from tests.kernels.row_bits import seeded
from whalepod.model.record_formats import RELEASE_FORMATS, plain_formats


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_plain_records_hold_rows_as_they_are(dtype: torch.dtype) -> None:
    rows, plain = seeded(3, 24, dtype=dtype), plain_formats(dtype).window
    records = plain.encode(rows)
    assert records.shape == (3, plain.record_bytes(24))
    assert records.dtype is torch.uint8
    assert torch.equal(plain.decode(records, 24, dtype), rows)
    assert torch.equal(plain.round_trip(rows), rows)


def test_plain_records_may_be_narrower_than_the_network() -> None:
    rows = seeded(3, 24)
    assert torch.equal(plain_formats(torch.bfloat16).window.round_trip(rows), rows.bfloat16().float())


def test_formats_have_names_of_their_own() -> None:
    names = {RELEASE_FORMATS.name, plain_formats(torch.float32).name, plain_formats(torch.float64).name}
    assert names == {"release", "plain-float32", "plain-float64"}


def test_the_release_stores_windows_in_fp8_entries_in_fp4_and_index_keys_in_mxfp4() -> None:
    rows = seeded(2, 128)
    sizes = [record.encode(rows).shape[1] for record in (RELEASE_FORMATS.window, RELEASE_FORMATS.global_kv)]
    assert sizes == [128 + 4, 64 + 8]
    assert RELEASE_FORMATS.index_key.encode(rows).shape[1] == 64 + 4
