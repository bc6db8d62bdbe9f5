"""`psctl bench`: measures paramserver on this machine, beside what others have."""
