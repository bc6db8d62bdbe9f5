"""Memory that a worker and a shard, or workers of one host, both map."""
