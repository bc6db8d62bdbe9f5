"""Where a checkpoint is."""

from typing import NamedTuple


class CheckpointPlace(NamedTuple):
    """Where a checkpoint is.

    Attributes:
        url: Folder of all checkpoints of the job: an absolute path or an fsspec URL.
        name: Its name in the folder.
    """

    url: str
    name: str
