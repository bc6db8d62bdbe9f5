"""`psctl demo`: a whole job on this machine, on real data, beside one process."""
