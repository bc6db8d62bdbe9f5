"""A shard of a job: its slices of the parameters, and the optimizers on them."""
