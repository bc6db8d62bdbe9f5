"""An object store in this process that fails as real ones do."""

from pathlib import Path
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem


class FailingStore(MemoryFileSystem):  # type: ignore[misc]
    """Puts and reads fail so many times, before or after they have their effect.

    Attributes:
        failures: Raised by the next requests, one each.
        is_late: Whether a put has taken place all the same.
        keeps_bytes: How many bytes of an object arrive, None for all.
        puts: Paths of all puts that took place.
    """

    protocol = "failing"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.store: dict[str, Any] = {}  # its own, not the process's
        self.pseudo_dirs = [""]
        self.failures: list[Exception] = []
        self.is_late = False
        self.keeps_bytes: int | None = None
        self.puts: list[str] = []

    def put_file(self, lpath: str, rpath: str, **_options: Any) -> None:  # noqa: ANN401
        failure = self.failures.pop(0) if self.failures else None
        if failure is None or self.is_late:
            self.pipe_file(rpath, Path(lpath).read_bytes()[: self.keeps_bytes])
            self.puts.append(rpath)
        if failure is not None:
            raise failure

    def cat_file(
        self,
        path: str,
        version_id: str | None = None,
        start: int | None = None,
        end: int | None = None,
    ) -> bytes:
        # Places of a range by name alone: stores differ in what comes second.
        assert version_id is None
        if self.failures:
            raise self.failures.pop(0)
        data: bytes = super().cat_file(path, start, end)
        return data
