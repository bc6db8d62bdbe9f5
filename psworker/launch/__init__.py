"""Starting training processes: `psworker run`, and who can be reached."""
