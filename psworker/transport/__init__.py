"""Calls to the coordinator and the shards: the only place with generated messages.

Everything that comes out is a value of `values`; a call that fails raises
`CallError`. All of it runs on the event loop.
"""
