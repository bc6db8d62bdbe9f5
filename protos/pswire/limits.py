"""Numbers that both sides of the wire share, each with its reason."""

from typing import Final

PROTOCOL_VERSION: Final = 1
"""Version of the messages. A peer that speaks another one is refused by name."""

PLACEMENT_VERSION: Final = 3
"""Version of the placement function. Part of the schema's digest, since both sides
must cut the same chunks."""

CHUNK_BYTES_MAX: Final = 15 << 18
"""Largest chunk, 3.75 MiB. What is done for each chunk, beside its bytes, is about
0.2 ms of the interpreter on either side, and four changes of thread. Larger ones gain
little, and leave fewer to be sent, updated and answered at the same time."""

CHUNK_ELEMENTS_MAX: Final = CHUNK_BYTES_MAX // 4
"""Most elements of a chunk, whatever their type: what an optimizer keeps of 16-bit
parameters has 32, and a message has all of one kind."""

VALUES_PART_BYTES: Final = 3 << 19
"""Values of a chunk in one message; more come in parts of this size. What a call that
is not read costs a shard grows with its messages, and has to stay below 8 MiB. Chunks
of jobs that compress are no larger than this: theirs come whole."""

REFERENCES_BYTES_MAX: Final = 1 << 20
"""In one message, of what says where chunks in shared memory are: of some 20,000."""

CHUNK_BYTES_SMALL: Final = 1 << 20
"""Payload of a chunk where a shard has too few bytes for many larger ones: sending,
updating and answering overlap chunk by chunk."""

CHUNK_COUNT_WANTED: Final = 8
"""Chunks of a shard before they grow beyond `CHUNK_BYTES_SMALL`."""

CHUNK_BYTES_ASKED_MIN: Final = 64 << 10
"""Smallest chunk that `--chunk-kib` may ask for; the largest is `CHUNK_BYTES_MAX`.
Smaller ones cost more than their bytes, and do not go through shared memory."""

CHUNK_BYTES_MIN: Final = 4096
"""Smallest chunk that a small model is cut into to keep every shard busy. Below
this a message costs more than its bytes."""

MESSAGE_BYTES_MAX: Final = 8 << 20
"""Limit on a message, and all that a call may claim of memory: it has room for the rows
of a sparse gradient in one chunk, of 8 bytes and more, and the number of each."""

PROBE_BYTES_MAX: Final = 4 << 20
"""Most bytes that a call of `psctl doctor` sends or asks for: at 1 Gbit/s they take
34 ms, and delay a push by as much at most."""

PRODUCT_COUNT_MAX: Final = 1 << 17
"""Inner products of gradients that a commit brings, of all shards: 1 MiB, from which a
shard works out within half a second what they make."""

NAME_BYTES_MAX: Final = 1024
"""Longest name of a tensor, model, optimizer, loader or worker, in UTF-8 bytes."""

ENTRY_COUNT_MAX: Final = 200_000
"""Most tensors of a schema."""

MODEL_BYTES_MAX: Final = 64 << 20
"""Most bytes that describe a model, over all messages it comes in: 300 for each of so
many tensors. Nothing of a larger one is kept."""

GROUP_COUNT_MAX: Final = 16_384
"""Most parameter groups of one optimizer. With the longest list of hyperparameters they
take 3 MB, which fits the trailer of a push. torch itself takes half a minute to make so
many, since it compares each new group with all there are."""

ELEMENT_COUNT_MAX: Final = 1 << 40
"""Most elements of a schema: a trillion. Both sides list the chunks of a model in
memory before they allocate it, and this keeps a hostile schema's list bounded."""

DIMENSION_COUNT_MAX: Final = 64
"""Most dimensions of a tensor, as in torch. Without it a message of 4 MiB could declare
a shape whose product takes minutes to compute."""

GRADIENT_NORM_MAX: Final = 1e18
"""Largest L2 norm of a gradient that counts as finite. Its square still fits a
float32, so a norm accumulated in float32 can't mistake a large one for infinite."""

PUSH_WEIGHT_MAX: Final = 1e18
"""Largest weight of a push: more samples than there are. Those of a million workers add
up to a finite number, also in float32."""

SCHEDULER_COUNT_MAX: Final = 256
"""Most schedulers of one optimizer. Shards send late workers where each is."""

SPLIT_COUNT_MAX: Final = 256
"""Most splits of data that a job records. A status lists them all."""

SPLIT_RECIPE_BYTES_MAX: Final = 64 << 10
"""Longest recipe of a split. One with digests of all columns has under 1 KiB."""

SHARD_COUNT_MAX: Final = 1024
"""Most shards of a job."""

WORKER_COUNT_MAX: Final = 1_000_000
"""Largest number of workers that an option may name."""

ORDER_ORIGIN_BYTES_MAX: Final = 16 << 10
"""Largest random state that an epoch's order is drawn from. All that a sampler may draw
from (torch, numpy, Python, two generators) is 13 KiB, compressed."""

HELD_COUNT_MAX: Final = 4_096
"""Batches that a worker may hold of one epoch. Each answer repeats them all, and the
epoch is written down with them: one that took ever more would slow down everybody."""

STATE_BYTES_MAX: Final = 4 << 20
"""Most bytes of all that a script registers with `register_state`: half of a message,
and one worker copies it at each step."""

STALENESS_BOUND_DEFAULT: Final = 3
"""Clocks that workers may be apart in SSP when nobody says: a step that takes four
times as long then stops nobody, and no gradient is much older than the values."""

STALENESS_BOUND_MAX: Final = 1_000_000
"""Largest staleness bound. More is no bound, and ASP says so."""

QUORUM_DEFAULT: Final = 1
"""Pushes that close a clock of mode quorum when nobody says: nobody waits."""

GRACE_WINDOW_MS_MAX: Final = 3_600_000
"""Longest grace window. Who wants to wait for all says so by the quorum."""

WAITING_INTERVAL_MS: Final = 5_000
"""A call that waits longer than this hears whom it waits for, and again each time."""

WAIT_S_MAX: Final = 31_536_000.0
"""Longest time-out that a setting may name, a year. Those of the system's calls end at
some hundred years, and at infinity none of them begins."""

NUMBER_MAX: Final = (1 << 63) - 1
"""Largest whole number of a message or a file."""

METRIC_COUNT_MAX: Final = 16
"""Names under which one worker's script logs values."""

METRIC_NAME_LENGTH_MAX: Final = 64

JOB_METRIC_COUNT_MAX: Final = 64
"""Names of which a job has a mean over its workers. Each point of its history has these
values, and each scrape: workers that log names of their own must not make them grow."""

STALENESS_COUNTED_MAX: Final = 63
"""Largest staleness that is counted by itself; the last count is for more, too."""

ENCODING_COUNT_MAX: Final = 16
"""Encodings in which one worker counts bytes: there are fewer."""

TRACE_STEP_COUNT_MAX = 1_000
"""Most steps of a trace."""
