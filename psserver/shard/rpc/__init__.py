"""A shard's services, its calls to the coordinator, and the messages of both."""
