"""The end of a job that can't go on."""


class JobFailedError(Exception):
    """The job can't go on; the text says why."""
