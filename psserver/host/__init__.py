"""Cores at work: event loop, threads and queues around the pure state machines.

No gRPC here: servicers call hosts, and hosts hand out what is to be sent.
"""
