"""One prompt over the ranks of a group (`model/context_parallel.py`): its head has the requests, the others follow.

    head ─ order: a segment, and the state before it that the others lack ─▶ members
    all  ─ own rows ─▶ gathers of window records, entries and kept rows ─▶ every rank's caches; logits at the head

`loop.py` keeps a rank in its group, `runner.py` is what the head's engine computes with, `following.py` what the others
do. `orders.py` is what they exchange before they compute, `rows.py` while they do.
"""
