"""What looks for planted bugs: golden sets first, then invariants, the quick ones of each before the slow ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tests.model import test_network as invariants
from tests.model.network_world import GOLDEN, PLAIN, TINY_A
from whalepod.model.conformity import Comparison, Status, Vectors
from whalepod.model.conformity_engram import check_engram
from whalepod.model.conformity_folder import Mode, VectorFolder
from whalepod.model.conformity_rows import check_tail_hit, check_tail_kept
from whalepod.model.conformity_runner import CHECKS
from whalepod.model.conformity_units import run_unit_sets
from whalepod.model.record_formats import RELEASE_FORMATS

FOLDER = VectorFolder.open(TINY_A, "tiny_a")


def _units() -> None:
    for result in run_unit_sets(GOLDEN / "units.safetensors", "units"):
        assert result.status is Status.PASSED, f"{result.name}: {result.detail}"


def _set(run: Callable[[Comparison], None]) -> None:
    comparison = Comparison("set")
    run(comparison)
    assert not comparison.failures, comparison.failures[0]


def _file(name: str) -> Vectors:
    return Vectors.load(TINY_A / f"{name}.safetensors")


def _golden(kind: str) -> None:
    _set(lambda c: CHECKS[kind](c, _file(f"{kind}_f32"), FOLDER, Mode.F32))


def _tail() -> None:
    _set(partial(check_tail_kept, vectors=_file("tail_f32"), folder=FOLDER, mode=Mode.F32))
    _set(partial(check_tail_hit, vectors=_file("tail_f32"), folder=FOLDER, mode=Mode.F32, head="hit60"))


def _quantised() -> None:
    vectors = _file("kvq_f32").below("prefill.")
    _set(lambda c: CHECKS["prefill"](c, vectors, FOLDER, Mode.KVQ))


GOLDEN_SETS: Mapping[str, Callable[[], None]] = {
    "golden units": _units,
    "golden engram": lambda: _set(lambda c: check_engram(c, _file("engram"), FOLDER)),
    "golden prefill": partial(_golden, "prefill"),
    "golden kvq": _quantised,
    "golden tail": _tail,
    "golden selection": partial(_golden, "selection"),
    "golden detail": partial(_golden, "detail"),
    "golden dspark": partial(_golden, "dspark"),
    "golden vision": partial(_golden, "vision"),
    "golden vl": partial(_golden, "vl"),
}
INVARIANTS: Mapping[str, Callable[[], None]] = {
    "chunks of 7": lambda: invariants.test_any_chunking_gives_the_same_bits([7], 17, RELEASE_FORMATS),
    "chunks of 31, 5, 1": lambda: invariants.test_any_chunking_gives_the_same_bits([31, 5, 1, 1], 17, RELEASE_FORMATS),
    "alone and among others": lambda: invariants.test_a_sequence_has_the_same_bits_alone_and_among_others(PLAIN),
    "replay from the start": lambda: invariants.test_replay_from_the_start_equals_a_cold_prompt_bit_for_bit(PLAIN),
    "replay writes no entry": invariants.test_replayed_rows_write_no_entry,
    "images' bias": invariants.test_rows_of_images_are_routed_by_a_bias_of_their_own,
    "images' n-grams": invariants.test_rows_of_images_remember_no_n_gram,
    "encoder role": lambda: invariants.test_the_encoder_leaves_the_same_bits_in_the_caches_as_the_full_model(PLAIN),
    "rejected drafts": lambda: invariants.test_verified_and_rejected_drafts_leave_no_trace(31, 1),
    "halo": invariants.test_replay_of_the_halo_is_exact_and_of_one_row_fewer_is_not,
}


def first_to_notice() -> str | None:
    """Name of the first check that fails, None if all pass. Whatever a check raises is its failure."""
    for name, check in {**GOLDEN_SETS, **INVARIANTS}.items():
        try:
            check()
        except Exception:  # noqa: BLE001  a planted bug may break anything
            return name
    return None
