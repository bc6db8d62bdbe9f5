"""One optimizer step of a worker: what it sends, and what comes back."""
