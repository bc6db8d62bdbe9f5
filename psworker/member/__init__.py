"""A worker's life in a job: it joins, pushes, pulls, is evicted, rejoins, leaves."""
