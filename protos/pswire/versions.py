"""What is installed, read from the metadata of packages: nothing is imported."""

import platform
from importlib import metadata


def version_text() -> str:
    """One line: our version and those of what we depend on most."""
    packages = ("paramserver", "torch", "grpcio", "protobuf")
    installed = [f"{name} {metadata.version(name)}" for name in packages]
    return ", ".join([*installed, f"Python {platform.python_version()}"])
