"""The coordinator's services, and the messages of them."""
