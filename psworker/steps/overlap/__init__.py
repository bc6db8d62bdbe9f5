"""Overlap: gradients leave while a backward pass goes on, values come into the next.

Switched on by `prepare(overlap=True)`; see `docs/overlap.md`. `DuringBackward` puts it
together; a stepper knows nothing else of it.
"""
