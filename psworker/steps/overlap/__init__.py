"""Overlap: gradients leave while a backward pass goes on, values come into the next.

Switched on by `prepare(overlap=True)`; see `docs/overlap.md`. `Stepper` knows nothing
of it, `OverlappedStepper` puts it together.
"""
