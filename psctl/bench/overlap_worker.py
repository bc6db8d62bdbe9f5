"""Another worker of `psctl bench overlap`: the same turns, in step with the first."""

import json
import sys
from contextlib import ExitStack

import torch

import psworker
from psctl.bench.overlap_training import Training


def main(settings: dict[str, int], plain: str, overlapped: str) -> None:
    """Trains in both jobs in turn.

    Args:
        settings: Sizes and counts.
        plain: Coordinator of the job without overlap.
        overlapped: Coordinator of the job with it.
    """
    torch.set_num_threads(settings["threads"])
    with ExitStack() as stack:
        # Alone first, as the other one: so all figures come from the same turns.
        alone = Training(settings["parameters"], settings["batch"], rank=1)
        trainings = [alone]
        for address, overlap in ((plain, False), (overlapped, True)):
            ps = stack.enter_context(psworker.connect(address, "w1"))
            training = Training(settings["parameters"], settings["batch"], rank=1)
            training.prepare(ps, overlap=overlap)
            trainings.append(training)
        for _ in range(settings["turns"]):
            for training in trainings:
                training.turn(settings["steps"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *sys.argv[2:])
