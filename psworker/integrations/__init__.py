"""paramserver inside of other training frameworks, each an extra of its own.

`psworker.integrations.lightning`, `.transformers`, `.tensorboard` and `.ray`: import
the one whose framework is installed.
"""
