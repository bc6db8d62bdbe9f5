"""What the layout of the code looks like, in figures: `make shape`."""
