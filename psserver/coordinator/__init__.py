"""The coordinator of a job: members, data, fences, modes, snapshots."""
