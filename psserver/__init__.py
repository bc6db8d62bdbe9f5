"""The daemons of paramserver: a coordinator and shards."""

import pswire  # noqa: F401 - sets gRPC's log level, before gRPC reads it
