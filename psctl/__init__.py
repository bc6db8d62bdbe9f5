"""`psctl`: what a person asks of a job. Importing it does not import torch."""
