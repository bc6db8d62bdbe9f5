"""What a shard's log says of effects that nothing else is done about."""

import logging

from psserver.shard.core.effects import (
    ChunkTorn,
    DeclarationsDiffer,
    HyperparametersDiffer,
)

log = logging.getLogger("psserver.shard")


def warn_hyperparameters(effect: HyperparametersDiffer) -> None:
    """Workers carry different hyperparameters."""
    log.warning(
        "hyperparameters of %s and %s differ at clock %d, group %d: %s counts, not %s",
        effect.used,
        effect.other,
        effect.clock,
        effect.group,
        *effect.values,
    )


def warn_declarations(effect: DeclarationsDiffer) -> None:
    """Workers step different declarations of an optimizer."""
    log.warning(
        "%s and %s step %r with different parameter groups at clock %d: those of %s "
        "count, and gradients of parameters that they lack are left out",
        effect.used,
        effect.other,
        effect.optimizer[:64],
        effect.clock,
        effect.used,
    )


def warn_torn(effect: ChunkTorn) -> None:
    """Workers were left out of a chunk."""
    log.warning(
        "chunk %d of clock %d was applied without %s, whose bytes are not finite "
        "although the push said so; the coordinator is asked to evict",
        effect.chunk_index,
        effect.clock,
        ", ".join(effect.worker_ids),
    )
