"""`psctl checkpoint`: makes one, and looks at a folder whose job need not run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from psctl.failures import CommandError
from psctl.folders import new_folder, placed_whole, writable_file, writing
from psctl.options import say
from psctl.progress import working
from psctl.snapshots import save_snapshot
from psctl.status import ask
from psctl.tables import aligned, count_text
from pswire.addresses import Address
from pswire.byte_text import byte_text
from pswire.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    FormatError,
    MissingError,
)
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import CheckpointName, Manifest
from pswire.exit_codes import ExitCode
from pswire.names import printable
from psworker.errors import ConfigurationError
from psworker.snapshots.snapshot_path import ENDING as SAFETENSORS_ENDING
from psworker.transport.status_client import restore_checkpoint, save_checkpoint

SCHEMA_VERSION: Final = 1


_STATES: Final[Mapping[type[CheckpointError], str]] = {
    MissingError: "incomplete",
    DamagedError: "damaged",
    FormatError: "newer",
}
"""What a checkpoint is whose manifest can't be read."""


def save_now(coordinator: Address, timeout_s: float) -> tuple[dict[str, object], str]:
    """Has a job make a checkpoint; for programs and for people."""
    with working(f"waiting for the job at {coordinator} to make a checkpoint"):
        saved = ask(
            coordinator,
            save_checkpoint(str(coordinator), timeout_s=timeout_s),
            timeout_s=timeout_s,
        )
    figures = {"schema_version": SCHEMA_VERSION, **asdict(saved)}
    text = (
        f"{printable(saved.name)} (version {saved.version}, clock {saved.clock}, "
        f"{byte_text(saved.byte_count)}) is in {printable(saved.url)}"
    )
    return figures, text


def return_job(
    coordinator: Address, name: str | None, *, is_wanted: bool, timeout_s: float
) -> tuple[dict[str, object], str]:
    """Has a job that runs return to a checkpoint; for programs and for people."""
    with working(f"waiting for the job at {coordinator} to read the checkpoint"):
        found = ask(
            coordinator,
            restore_checkpoint(
                str(coordinator),
                name or "",
                tries_only=not is_wanted,
                timeout_s=timeout_s,
            ),
            timeout_s=timeout_s,
        )
    return _returned(
        asdict(found.saved), found.undone, found.lost_step_count, is_done=is_wanted
    )


def return_folder(
    folder: CheckpointFolder, name: str | None, *, is_wanted: bool
) -> tuple[dict[str, object], str]:
    """Has a job that does not run go on from a checkpoint when it is started."""
    manifest = _chosen(folder, name)
    if name is not None:
        with _reading(folder, name):
            problems = folder.verify(name)
        if problems:
            raise DamagedError("; ".join(problems))
        if not manifest.is_finite:
            raise CommandError(f"{name} has values that are not finite")
    undone = folder.newer_than(manifest.name)
    if is_wanted:
        undone = folder.return_to(manifest)
    figures = {**_head(folder), **_summary(manifest)}
    return _returned(figures, undone, None, is_done=is_wanted)


def _returned(
    saved: Mapping[str, object],
    undone: Sequence[str],
    lost_step_count: int | None,
    *,
    is_done: bool,
) -> tuple[dict[str, object], str]:
    """What a return means, if it is known how many steps are trained again."""
    figures = {
        "schema_version": SCHEMA_VERSION,
        **saved,
        "lost_step_count": lost_step_count,
        "undone": list(undone),
        "is_done": is_done,
    }
    lost = "what was trained since"
    if lost_step_count is not None:
        lost = f"{count_text(lost_step_count, 'step')} of all workers since"
    lines = [
        f"{printable(str(saved['name']))} (version {saved['version']}, clock "
        f"{saved['clock']}) is good: every byte was read",
        f"trained again: {lost}",
    ]
    if undone:
        lines.append(
            "newer ones, which do not count any more then, and are deleted after the "
            f"next one is made: {', '.join(map(printable, undone))}"
        )
    lines.append("done" if is_done else "nothing was changed; with --yes it is done")
    return figures, "\n".join(lines)


def list_checkpoints(folder: CheckpointFolder) -> tuple[dict[str, object], str]:
    """What there is, for programs and for people. Of the files only manifests are read.

    Those whose manifest can't be read are listed with why.
    """
    rows: list[tuple[object, ...]] = []
    listed: list[dict[str, object]] = []
    undone = folder.undone()
    for name in sorted({*folder.names(), *undone}, key=CheckpointName.checked):
        try:
            manifest = folder.manifest(name)
        except (DamagedError, FormatError, MissingError) as error:
            state = _STATES[type(error)]
            rows.append((name, state, "", "", "", "", ""))
            listed.append({"name": name, "state": state, "problem": str(error)})
        else:
            state = "undone" if name in undone else "complete"
            size, written = byte_text(manifest.byte_count), _written_text(manifest)
            shown = (manifest.version, manifest.clock, size, written, manifest.job_id)
            rows.append((name, state, *shown))
            listed.append({**_summary(manifest), "state": state, "problem": None})
    figures = {**_head(folder), "checkpoints": listed}
    if not rows:
        return figures, f"no checkpoints in {printable(folder.url)}"
    header = ["NAME", "STATE", "VERSION", "CLOCK", "SIZE", "WRITTEN (UTC)", "JOB"]
    if len({row[-1] for row in rows} - {""}) < 2:
        header, rows = header[:-1], [row[:-1] for row in rows]
    return figures, aligned(header, rows, right=("VERSION", "CLOCK", "SIZE"))


def verify_checkpoints(
    folder: CheckpointFolder, name: str | None
) -> tuple[dict[str, object], str, ExitCode]:
    """Reads all bytes of one checkpoint or of all; for programs, for people, the code.

    Those that are not complete are left out, unless one is named.
    """
    names = (name,) if name is not None else _complete_names(folder)
    problems: dict[str, tuple[str, ...]] = {}
    for each in names:
        with _reading(folder, each):
            problems[each] = folder.verify(each)
    figures = {
        **_head(folder),
        "checkpoints": [
            {"name": each, "is_good": not found, "problems": list(found)}
            for each, found in problems.items()
        ],
    }
    text = "\n".join(
        "\n".join(found) or f"{each} is good" for each, found in problems.items()
    )
    return figures, text, ExitCode.ERROR if any(problems.values()) else ExitCode.DONE


def show_checkpoint(
    folder: CheckpointFolder, name: str | None
) -> tuple[dict[str, object], str]:
    """What is in a checkpoint, by its manifest: for programs and for people."""
    manifest = folder.manifest(name or _complete_names(folder)[-1])
    terms = manifest.terms
    figures = {
        **_head(folder),
        **_summary(manifest),
        "chunk_bytes": manifest.chunk_bytes or None,
        "clip_grad_norm": terms.clip_grad_norm or None,
        "compression": str(terms.compression) or None,
        "optimizers": [
            {"name": spec.name, "class": spec.class_name, "groups": len(spec.groups)}
            for spec in terms.first_optimizers
        ],
        "tensors": [
            {
                "model": entry.model,
                "name": entry.name,
                "shape": list(entry.shape),
                "type": entry.element_type.name.lower(),
                "kind": entry.kind.name.lower(),
            }
            for entry in terms.schema.entries
        ],
        "parts": [
            {"name": part.name, "byte_count": part.byte_count, "digest": part.digest}
            for part in manifest.files
        ],
        "epochs": _epochs(manifest),
        "state_bytes": manifest.state.byte_count if manifest.state else None,
    }
    return figures, _shown(manifest)


def prune_checkpoints(
    folder: CheckpointFolder, keep: int, job_id: str | None
) -> tuple[dict[str, object], str]:
    """Deletes all but the newest of a job; what went, for programs and for people."""
    job_id = job_id or _only_job(folder)
    say(f"reading the newest checkpoint of job {printable(job_id)} back first")
    deleted = folder.prune(job_id, keep)
    kept = folder.names()
    figures = {
        **_head(folder),
        "job_id": job_id,
        "deleted": list(deleted),
        "kept": list(kept),
    }
    text = "\n".join(f"deleted {name}" for name in deleted) or "nothing to delete"
    return figures, f"{text}\n{count_text(len(kept), 'checkpoint')} left"


def get_saved(
    url: str, out: Path, *, model: str | None
) -> tuple[dict[str, object], str]:
    """Writes the values of a checkpoint to a file, as those of a running job.

    Args:
        url: The folder, of which the newest good one is taken, or a checkpoint in it.
        out: The file.
        model: Which model, where the job has several.
    """
    writable_file(out)
    folder, name = folder_and_name(url)
    manifest = _chosen(folder, name)
    from psworker.snapshots.saved_snapshot import read_saved

    with _reading(folder, manifest.name):
        snapshot = read_saved(folder, manifest)
    saved = save_snapshot(snapshot, out, model)
    saved["checkpoint"] = manifest.name
    return saved, (
        f"version {manifest.version} (clock {manifest.clock}) of checkpoint "
        f"{manifest.name} is in {printable(str(out))}"
    )


def export_checkpoint(
    folder: CheckpointFolder, name: str | None, to: str, out: Path
) -> tuple[dict[str, object], str]:
    """Writes models and optimizers as plain torch reads them.

    Args:
        folder: The folder.
        name: Which checkpoint; None for the newest good one.
        to: `state_dict`, a file of torch.save(), or `dcp`.
        out: The file, or the folder.
    """
    path = new_folder(out) if to == "dcp" else placed_whole(out)
    if to != "dcp" and (path.is_dir() or path.suffix == SAFETENSORS_ENDING):
        raise CommandError(
            f"{printable(str(out))} is no name for a file of torch.save(): name one as "
            "checkpoint.pt; safetensors are written by `psctl snapshot get` and "
            "`--to huggingface`",
            ExitCode.USAGE,
        )
    manifest = _chosen(folder, name)
    from psworker.snapshots.exported import exported_state, write_dcp, write_state_dict

    with _reading(folder, manifest.name):
        state = exported_state(folder, manifest)
    with writing(out):
        (write_dcp if to == "dcp" else write_state_dict)(state, path)
    figures = {
        **_head(folder),
        "checkpoint": manifest.name,
        "path": str(out),
        "to": to,
        "models": list(state["models"]),
        "optimizers": list(state["optimizers"]),
    }
    return figures, (
        f"version {manifest.version} (clock {manifest.clock}) of checkpoint "
        f"{manifest.name} is in {printable(str(out))}: models "
        f"{', '.join(map(printable, state['models']))}; optimizers "
        f"{', '.join(map(printable, state['optimizers'])) or 'none'}"
    )


def export_model(
    folder: CheckpointFolder,
    name: str | None,
    out: Path,
    *,
    model: str | None,
    file_bytes_max: int | None,
) -> tuple[dict[str, object], str]:
    """Writes the values of a model as a Hugging Face folder.

    Args:
        folder: The folder.
        name: Which checkpoint; None for the newest good one.
        out: The new folder.
        model: Which model, where the job has several.
        file_bytes_max: Bytes of tensors in a file; None for one file.
    """
    path = new_folder(out)
    manifest = _chosen(folder, name)
    from psworker.snapshots.exported import write_model

    try:
        with _reading(folder, manifest.name), writing(out):
            files = write_model(
                folder, manifest, path, model=model, file_bytes_max=file_bytes_max
            )
    except ConfigurationError as error:  # about --model
        raise CommandError(str(error), ExitCode.USAGE) from error
    figures = {
        **_head(folder),
        "checkpoint": manifest.name,
        "path": str(out),
        "to": "huggingface",
        "files": list(files),
    }
    return figures, (
        f"version {manifest.version} (clock {manifest.clock}) of checkpoint "
        f"{manifest.name} is in {printable(str(out))}: {', '.join(files)}"
    )


def _chosen(folder: CheckpointFolder, name: str | None) -> Manifest:
    """The checkpoint of a name, or the newest good one; what is damaged is said."""
    if name is not None:
        return folder.manifest(name)
    text = f"looking for the newest good checkpoint in {printable(folder.url)}"
    with _counted(folder, text, _byte_count(folder, (folder.names() or ("",))[-1])):
        manifest, problems = folder.newest_good()
    for problem in (text for found in problems.values() for text in found):
        say(f"not used: {problem}")
    if manifest is None:
        raise CommandError(f"there is no good checkpoint in {printable(folder.url)}")
    return manifest


def _reading(folder: CheckpointFolder, name: str) -> AbstractContextManager[None]:
    """Says that a checkpoint is read, and shows how far that is."""
    return _counted(folder, f"reading {name}", _byte_count(folder, name))


@contextmanager
def _counted(
    folder: CheckpointFolder, text: str, byte_count: int | None
) -> Iterator[None]:
    with working(text, byte_count) as work:
        folder.on_read = work.advance
        try:
            yield
        finally:
            folder.on_read = None


def _byte_count(folder: CheckpointFolder, name: str) -> int | None:
    """Bytes of a checkpoint's files; None where its manifest does not say."""
    try:
        return sum(part.byte_count for part in folder.manifest(name).files)
    except CheckpointError:
        return None


def folder_and_name(url: str) -> tuple[CheckpointFolder, str | None]:
    """A folder of checkpoints, and the one that the last part of the URL names."""
    above, _, last = url.rstrip("/").rpartition("/")
    if CheckpointName.parse(last) is not None:
        return opened(above or "."), last
    return opened(url), None


def opened(url: str) -> CheckpointFolder:
    """The folder at a URL."""
    path = Path(url)
    if path.is_file():
        raise CommandError(
            f"{printable(url)} is a file: name the folder of checkpoints, or the "
            "folder of one of them. Files of torch.save() and the like hold pickles, "
            "which can run code, and are not read",
            ExitCode.USAGE,
        )
    if "://" not in url and not path.exists():
        raise CommandError(f"there is no folder {printable(url)}", ExitCode.USAGE)
    if CheckpointName.parse(path.name) is not None:
        raise CommandError(
            f"{printable(url)} is one checkpoint: name the folder that it is in, and "
            f"{path.name} beside it",
            ExitCode.USAGE,
        )
    try:
        return CheckpointFolder(url)
    except CheckpointError as error:
        raise CommandError(str(error), ExitCode.BAD_CONFIGURATION) from error


def _head(folder: CheckpointFolder) -> dict[str, object]:
    return {"schema_version": SCHEMA_VERSION, "url": folder.url}


def _summary(manifest: Manifest) -> dict[str, object]:
    return {
        "name": manifest.name,
        "job_id": manifest.job_id,
        "release": manifest.release,
        "created_unix_s": manifest.created_unix_s,
        "version": manifest.version,
        "clock": manifest.clock,
        "mode": manifest.mode.label,
        "shard_count": manifest.shard_count,
        "is_finite": manifest.is_finite,
        "byte_count": manifest.byte_count,
        "parameter_bytes": manifest.terms.byte_count,
    }


def _written_text(manifest: Manifest) -> str:
    return f"{datetime.fromtimestamp(manifest.created_unix_s, UTC):%Y-%m-%d %H:%M:%S}"


def _epochs(manifest: Manifest) -> dict[str, int]:
    """The newest epoch of each loader; of other writers' jobs none is known."""
    newest: dict[str, int] = {}
    found = manifest.job.get("epochs")
    for each in found if isinstance(found, list) else ():
        match each:
            case [str(loader), int(epoch), *_]:
                newest[loader] = max(epoch, newest.get(loader, 0))
    return newest


def _shown(manifest: Manifest) -> str:
    terms = manifest.terms
    optimizers = (f"{spec.class_name} ({spec.name})" for spec in terms.first_optimizers)
    size = f"{count_text(len(terms.schema.entries), 'tensor')}, "
    lines = {
        "checkpoint": manifest.name,
        "job": manifest.job_id,
        "written": f"{_written_text(manifest)} UTC by release {manifest.release}",
        "values": f"version {manifest.version}, clock {manifest.clock}, "
        f"{manifest.mode.label}"
        + ("" if manifest.is_finite else "; NOT FINITE: a job does not go on from it"),
        "data": ", ".join(
            f"epoch {epoch} of {loader}" for loader, epoch in _epochs(manifest).items()
        )
        or "none",
        "model": size + byte_text(terms.byte_count),
        "optimizers": ", ".join(optimizers) or "none",
        "files": f"{count_text(len(manifest.parts), 'part')}, "
        f"{byte_text(manifest.byte_count)}"
        + (
            f"; registered state, {byte_text(manifest.state.byte_count)}"
            if manifest.state
            else ""
        ),
    }
    return "\n".join(f"{name:<11} {printable(text)}" for name, text in lines.items())


def _complete_names(folder: CheckpointFolder) -> list[str]:
    """Names of all that are complete; also of those whose manifest can't be read."""
    names = []
    for name in folder.names():
        try:
            folder.manifest(name)
        except MissingError:
            continue
        except (DamagedError, FormatError):
            pass
        names.append(name)
    if not names:
        raise CommandError(f"there is no checkpoint in {printable(folder.url)}")
    return names


def _only_job(folder: CheckpointFolder) -> str:
    jobs = folder.jobs()
    if len(jobs) != 1:
        listed = ", ".join(map(printable, sorted(jobs))) or "none"
        raise CommandError(
            f"{printable(folder.url)} has checkpoints of these jobs: {listed}; say "
            "which with --job",
            ExitCode.USAGE,
        )
    return jobs.pop()
