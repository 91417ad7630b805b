"""Offline batch inference: JSONL in, JSONL out, in the form of OpenAI's batch files."""
