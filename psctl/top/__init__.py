"""`psctl top`: a job in a terminal."""
