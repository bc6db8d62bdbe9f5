"""Decoupled DiLoCo: learners on clocks of their own, merged as they come."""

from typing_extensions import override

from psworker.strategies.diloco import StreamingDiLoCo
from psworker.strategies.rounds import Progress


class DecoupledDiLoCo(StreamingDiLoCo):
    """Streaming DiLoCo of workers that wait for nobody, in mode quorum.

    Source: Decoupled DiLoCo team, "Decoupled DiLoCo for Resilient Distributed
    Pre-training", arXiv 2604.21428.

    A fragment is merged when `--quorum` workers have pushed it, and up to
    `--grace-window` later if no worker would have to wait for that. A worker goes on
    with its local steps meanwhile, however long that takes, and takes what came back
    `taken_after` steps later, at least one, or when it is there. A push that
    comes after the merge is not sent: the worker takes the job's newest values, keeps
    what it has trained, and pushes that later. A worker that is stopped, lost or slow
    halts nobody.

    The paper has 24 fragments, `every=24` and `taken_after=2`, a quorum of 1, takes all
    of what comes back (`own_share=0`) and averages but for embeddings by `--aggregation
    radial`. It gives no numbers of the outer optimizer. The defaults here are those of
    `StreamingDiLoCo`, as a small model does not go into 24 fragments.

    Each push counts as tokens x (tokens / steps) since the worker's last push of that
    fragment: a worker that is fast, or has large batches, more. See
    `Connection.note_tokens`; where none are noted samples stand for tokens.
    """

    fragments_are_drawn = True
    taken_after_min = 1  # with 0 each push would wait for a quorum
    modes = ("quorum", "bsp", "ssp", "asp")

    @override
    def weight(self, progress: Progress) -> float:
        work = progress.work
        count = work.token_count or work.sample_count
        return count * count / max(1, work.step_count)
