"""Shards and trainers of a run as processes: placing them, wiring them together, starting those again that died."""
