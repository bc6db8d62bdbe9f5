"""`psctl compare`: what each mode is good for, measured on this machine."""
