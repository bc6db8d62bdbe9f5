"""What both daemons have: values of the job, calls of strangers, start and end."""
