"""The user's model and optimizer, in the terms of the job."""
