"""What stands behind a connection: a job, no job, a torch group, a host group."""
