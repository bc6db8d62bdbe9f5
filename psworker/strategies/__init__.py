"""Ways to train with local steps: what is pushed, when, and what a worker takes."""
