"""Who a process is, how it proves it, and what it may do."""
