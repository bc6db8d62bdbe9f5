"""The commands of `psctl checkpoint`."""

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from psctl.options import (
    CoordinatorOption,
    JsonOption,
    OptionalCoordinatorOption,
    parsed,
    show,
    timeout_option,
)
from pswire.byte_text import parsed_bytes
from pswire.checkpoint.manifest import CheckpointName
from pswire.exit_codes import ExitCode
from pswire.limits import WAIT_S_MAX
from pswire.options import choice_option, count_option, takes_credentials

app = typer.Typer(
    no_args_is_help=True,
    help="Makes, checks and restores checkpoints.",
)

EXPORT_FORMS: Final = ("state_dict", "huggingface", "dcp")

FolderOption = Annotated[
    str,
    typer.Option(
        "--checkpoint-dir",
        metavar="URL",
        help="A folder, or a URL of any store that fsspec knows, such as "
        "s3://BUCKET/FOLDER.",
    ),
]


def _checkpoint_name(text: str) -> str:
    if CheckpointName.parse(text) is None:
        raise typer.BadParameter(
            f"{text[:64]!a} is no name of a checkpoint, such as {CheckpointName(500)}"
        )
    return text


def _name_argument(help: str) -> Any:  # noqa: ANN401, as typer returns it
    return typer.Argument(parser=_checkpoint_name, metavar="NAME", help=help)


@app.command()
@takes_credentials
def save(
    *,
    coordinator: CoordinatorOption,
    timeout: Annotated[float, timeout_option(WAIT_S_MAX)] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Has a job that runs make a checkpoint now.

    Example: psctl checkpoint save --coordinator localhost:7070

    Returns when it is complete. The job's coordinator was started with
    --checkpoint-dir.
    """
    from psctl.checkpoints import save_now

    show(as_json, *save_now(coordinator, timeout))


@app.command()
@takes_credentials
def restore(
    name: Annotated[
        str | None, _name_argument("Which one, in place of the newest good one.")
    ] = None,
    *,
    coordinator: OptionalCoordinatorOption = None,
    checkpoint_dir: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Of a job that does not run, in place of --coordinator: when it is "
            "started, it goes on from there.",
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it; without this nothing is changed.")
    ] = False,
    timeout: Annotated[float, timeout_option(WAIT_S_MAX)] = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Has a job go back to a checkpoint, in the same processes.

    Example: psctl checkpoint restore step-000000000500 --yes --coordinator
    localhost:7070

    Says what is trained again. Newer checkpoints do not count any more then; the next
    one that the job makes has them deleted.
    """
    from psctl.checkpoints import opened, return_folder, return_job

    if checkpoint_dir is not None:
        found = return_folder(opened(checkpoint_dir), name, is_wanted=yes)
    elif coordinator is not None:
        found = return_job(coordinator, name, is_wanted=yes, timeout_s=timeout)
    else:
        raise typer.BadParameter("give --coordinator, or --checkpoint-dir")
    show(as_json, *found)


@app.command("list")
def list_all(*, checkpoint_dir: FolderOption, as_json: JsonOption = False) -> None:
    """Lists checkpoints, oldest first, also damaged ones.

    Example: psctl checkpoint list --checkpoint-dir runs/monday
    """
    from psctl.checkpoints import list_checkpoints, opened

    show(as_json, *list_checkpoints(opened(checkpoint_dir)))


@app.command()
def verify(
    name: Annotated[str | None, _name_argument("Of this one alone.")] = None,
    *,
    checkpoint_dir: FolderOption,
    as_json: JsonOption = False,
) -> None:
    """Reads every byte of them and says what is wrong.

    Example: psctl checkpoint verify --checkpoint-dir runs/monday

    Exit code 1 when anything is.
    """
    from psctl.checkpoints import opened, verify_checkpoints

    figures, text, code = verify_checkpoints(opened(checkpoint_dir), name)
    show(as_json, figures, text)
    if code != ExitCode.DONE:
        raise typer.Exit(code)


@app.command("show")
def show_one(
    name: Annotated[
        str | None, _name_argument("Which one, in place of the newest.")
    ] = None,
    *,
    checkpoint_dir: FolderOption,
    as_json: JsonOption = False,
) -> None:
    """Shows of what job and model a checkpoint is.

    Example: psctl checkpoint show step-000000000500 --checkpoint-dir runs/monday
    """
    from psctl.checkpoints import opened, show_checkpoint

    show(as_json, *show_checkpoint(opened(checkpoint_dir), name))


@app.command()
def prune(
    *,
    checkpoint_dir: FolderOption,
    keep: Annotated[
        int, count_option("How many of the newest to keep.", most=1_000_000)
    ],
    job: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Of which job, where the folder has checkpoints of several.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Deletes all but the newest of a job.

    Example: psctl checkpoint prune --keep 3 --checkpoint-dir runs/monday

    The newest one is read back first; when it is damaged, older ones stay. A job that
    runs does this by itself.
    """
    from psctl.checkpoints import opened, prune_checkpoints

    show(as_json, *prune_checkpoints(opened(checkpoint_dir), keep, job))


@app.command()
def export(
    name: Annotated[
        str | None, _name_argument("Which one, in place of the newest good one.")
    ] = None,
    *,
    checkpoint_dir: FolderOption,
    to: Annotated[
        str,
        choice_option(
            EXPORT_FORMS,
            help="A file of torch.save(), a Hugging Face folder (model.safetensors), "
            "or a folder of torch.distributed.checkpoint.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="PATH", help="Where to.")],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="For huggingface: which model, where the job has several.",
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="For huggingface: write several files of at most this size, such as "
            "5GB, and their index; by default one.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Writes one for plain torch or for Hugging Face.

    Example: psctl checkpoint export --to state_dict --out checkpoint.pt
    --checkpoint-dir runs/monday

    Models and optimizers go on in a plain script by load_state_dict(); see
    docs/formats.md. A Hugging Face folder has a model alone.
    """
    from psctl.checkpoints import export_checkpoint, export_model, opened

    file_bytes_max = parsed(
        "--max-shard-size",
        lambda: None if max_shard_size is None else parsed_bytes(max_shard_size),
    )
    if to == "huggingface":
        exported = export_model(
            opened(checkpoint_dir),
            name,
            out,
            model=model,
            file_bytes_max=file_bytes_max,
        )
    elif model is not None or max_shard_size is not None:
        option = "--model" if model is not None else "--max-shard-size"
        raise typer.BadParameter("only for --to huggingface", param_hint=option)
    else:
        exported = export_checkpoint(opened(checkpoint_dir), name, to, out)
    show(as_json, *exported)
