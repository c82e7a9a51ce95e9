"""The memory of a worker: its plan, the model in it, sleep."""
