"""A clock that stands still until a test moves it."""


class ManualClock:
    """Stands in for `time.monotonic` and the like.

    Attributes:
        now_s: What it says.
    """

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s
