"""What a shard decides, as pure code with injected time."""
