"""Copies from CUDA devices to the host, beside what the devices compute.

A copy runs on a stream of its own into pinned memory, after what computes the data and
beside what is computed later; an event is recorded when it is done. No thread waits for
the device. Writes meanwhile make the copy a mix: whoever uses it must find out, as
`SentAhead` does by digests.
"""

import torch


class StagedCopy:
    """A copy that is under way."""

    def __init__(self, host: torch.Tensor, done: torch.cuda.Event) -> None:
        self._host = host
        self._done = done

    @property
    def is_there(self) -> bool:
        """Whether it is complete, without waiting."""
        return bool(self._done.query())

    def wait(self) -> torch.Tensor:
        """The data on the host, once all of it is there."""
        self._done.synchronize()
        return self._host


class Staging:
    """A stream for each device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @torch.no_grad()
    def begin(self, data: torch.Tensor) -> StagedCopy:
        """Begins to copy a tensor of a device, of any shape; returns at once."""
        stream = self._streams.get(data.device)
        if stream is None:
            stream = self._streams[data.device] = torch.cuda.Stream(data.device)
        # From torch's cache: pinned memory is made once and used again.
        host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(data.device))
        with torch.cuda.stream(stream):
            host.copy_(data, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        # Not given to others before the copy has read it.
        data.record_stream(stream)
        return StagedCopy(host, done)
