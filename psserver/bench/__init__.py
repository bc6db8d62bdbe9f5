"""What `psctl bench all` measures inside a shard, in processes that it starts.

Each prints JSON objects, a line each, as the members of `psctl.bench` do:
`contender` and `seconds` for each repetition of each.
"""
