from __future__ import annotations

import torch

from whalepod.engine.expert_parallel.load_window import LoadWindow


def test_only_the_last_steps_count() -> None:
    window = LoadWindow(4, steps=2)
    for experts in ([[0, 1]], [[1, 2]], [[3, 3]]):
        window.add(torch.tensor(experts))
    assert window.total.tolist() == [0, 1, 1, 2]


def test_a_dummy_step_counts_no_row_but_ages_the_others() -> None:
    window = LoadWindow(2, steps=2)
    window.add(torch.tensor([[0], [1]]))
    window.add(None)
    assert window.total.tolist() == [1, 1]
    window.add(None)
    assert window.total.tolist() == [0, 0]
