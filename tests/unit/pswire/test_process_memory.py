"""Freed memory that stays in the process, in processes of their own."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="glibc only"
)

COUNT_FAULTS = """
import resource
from pswire.process_memory import keep_freed_memory

print(keep_freed_memory())

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def messages():
    for _ in range(4):
        held = [bytes([1]) * (1 << 20) for _ in range(24)]
        del held

messages()
before = faults()
messages()
print(faults() - before)
"""


def run(**environment: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": ":".join(sys.path), **environment},
    )
    is_kept, fault_count = done.stdout.split()
    return is_kept, int(fault_count)


def test_large_messages_that_come_again_take_no_new_pages() -> None:
    is_kept, fault_count = run()

    assert is_kept == "True"
    assert fault_count < 1000  # of the 24,576 pages that they are


def test_what_the_user_has_chosen_stays() -> None:
    is_kept, fault_count = run(MALLOC_MMAP_THRESHOLD_="65536")

    assert is_kept == "False"
    assert fault_count > 20_000
