"""What the coordinator decides, as pure code with injected time."""
