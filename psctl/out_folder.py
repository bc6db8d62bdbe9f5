"""The folder that a command writes its results into."""

from pathlib import Path

from psctl.failures import CommandError
from pswire.exit_codes import ExitCode


def made_folder(out: Path) -> Path:
    """A folder that the user has named, made if it is not there; absolute.

    Raises:
        CommandError: There is no place for it, or it is a file.
    """
    folder = out.absolute()
    if not folder.parent.is_dir():
        raise CommandError(
            f"there is no folder {folder.parent}; create it", ExitCode.USAGE
        )
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        raise CommandError(
            f"{folder} is a file; name a folder", ExitCode.USAGE
        ) from None
    return folder
