"""Experts spread over the ranks of a group; attention stays data-parallel.

    FeedForward ─▶ ParallelExperts ─ dispatch ─▶ the rank that holds the expert ─ outputs ─▶ combine, in a fixed order

`balancing.py` decides how many slots an expert gets and where (EPLB), `placement.py` holds the tables, `load_window.py`
what was routed lately. `transport.py` moves bytes: within a process, or through a process group
(`process_group.py`). `dispatch.py` is one layer's exchange, `expert_bank.py` the weights in a rank's slots, `group.py`
keeps the ranks in step, `group_loop.py` runs that on a thread of a rank.
"""
