"""What outlives the coordinator's process."""
