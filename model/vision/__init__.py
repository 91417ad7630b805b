"""The vision encoder: from an image to the rows that stand in its place in a prompt (`model.md` §8).

    bytes ─▶ decode ─▶ ImageGrid.fit ─▶ patches ─▶ VisionTower ─▶ Aligner ─▶ span: START, (IMAGE …, NEWLINE) …, END

`grid.py` is the arithmetic of sizes and needs no tensor; `pixels.py` makes patches; `tower.py` and `aligner.py`
compute; `encoder.py` holds them together. Nothing of the text network is needed here, and nothing of this there: a span
comes with its delimiters.
"""
