"""What a model is worth, measured with the engine that serves: whatever is claimed about serving runs through its own
prompts, hits, replays and drafts.
"""
