"""Whose data is whose: leases, epochs and splits. Pure."""
