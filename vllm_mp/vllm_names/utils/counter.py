"""Numbers in order, for the ids of requests."""


class Counter:
    """Gives the numbers from `start` on, one for each `next`."""

    def __init__(self, start: int = 0) -> None:
        self.counter = start

    def __next__(self) -> int:
        number = self.counter
        self.counter += 1
        return number

    def reset(self) -> None:
        """Begin at 0 again."""
        self.counter = 0
