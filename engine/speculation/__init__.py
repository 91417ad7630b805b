"""DSpark: drafts are verified many at a time, and how many is decided by what they are worth (`runtime.md` §2).

    drafter ─▶ log-odds ─▶ survivals ─▶ allot(budget of an earlier step) ─▶ rows ─▶ network ─▶ accept ─▶ tokens

`scheduling.py` decides how many drafts are verified, `cost_table.py` what that costs, `acceptance.py` which stand,
`calibration.py` makes log-odds honest, `statistics.py` counts, `speculator.py` does one step of it all. Nothing here
changes the law of what is emitted.
"""
