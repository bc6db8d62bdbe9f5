"""What `psctl bench all` measures: a file for each kind of work."""
