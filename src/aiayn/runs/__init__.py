"""One run: its folder and record, its checkpoints, its devices, and the worker processes that train it."""
