"""`psctl doctor`: what is wrong on a machine of a job, or between it and the job."""
