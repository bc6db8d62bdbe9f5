"""Whether two processes could share memory, seen before either makes any."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from pswire.shared_memory.segments import boot_id

_NETWORK_NAMESPACE: Final = Path("/proc/self/ns/net")


@dataclass(frozen=True, slots=True)
class Machine:
    """What has to be the same of both processes.

    Attributes:
        boot_id: Which start of which machine; empty without what sharing takes.
        network_namespace: That of the sockets which memory is handed over by.
        user_id: The user that it runs as.
    """

    boot_id: str
    network_namespace: str
    user_id: int

    @classmethod
    def here(cls) -> Self:
        """That of this process."""
        try:
            namespace = os.readlink(_NETWORK_NAMESPACE)
        except OSError:  # no Linux
            namespace = ""
        return cls(boot_id(), namespace, os.geteuid())

    def obstacle(self, other: "Machine") -> str:
        """Why memory can't be shared with another process; empty where it can."""
        if not (self.boot_id and other.boot_id):
            return "the system lacks what it takes: Linux 5.1 or newer"
        if self.boot_id != other.boot_id:
            return "it runs on another machine"
        if self.network_namespace != other.network_namespace:
            return "it runs in another network namespace, as of another container"
        if self.user_id != other.user_id:
            return f"it runs as user {self.user_id}, the caller as {other.user_id}"
        return ""
