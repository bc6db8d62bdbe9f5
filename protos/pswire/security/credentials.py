"""What a process proves itself with: files of TLS and a token, from the environment.

Flags set the variables of the process, so that the processes it starts inherit them.
"""

import errno
import functools
import logging
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from pswire.security.tokens import Metadata, metadata_of, token_problem

TLS_CA_VARIABLE: Final = "PS_TLS_CA"
TLS_CERTIFICATE_VARIABLE: Final = "PS_TLS_CERT"
TLS_KEY_VARIABLE: Final = "PS_TLS_KEY"
TOKEN_FILE_VARIABLE: Final = "PS_TOKEN_FILE"
TOKEN_VARIABLE: Final = "PS_TOKEN"

CREDENTIAL_VARIABLES: Final = (
    TLS_CA_VARIABLE,
    TLS_CERTIFICATE_VARIABLE,
    TLS_KEY_VARIABLE,
    TOKEN_FILE_VARIABLE,
)
"""Those that name files."""

FILE_BYTES_MAX: Final = 1 << 20
"""A bundle of a hundred certificates is a tenth of it."""


log = logging.getLogger("pswire")


class CredentialsError(ValueError):
    """A file or variable proves nothing; the text says which, why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Files of TLS, PEM each.

    Attributes:
        ca: Certificates of the authorities that others' certificates are checked by.
        certificate: This process's own, and those between it and the CA; None for a
            client that shows none.
        key: The private key of `certificate`.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            given, missing = "--tls-cert", "--tls-key"
            given_variable = TLS_CERTIFICATE_VARIABLE
            missing_variable = TLS_KEY_VARIABLE
            if self.certificate is None:
                given, missing = missing, given
                given_variable, missing_variable = missing_variable, given_variable
            raise CredentialsError(
                f"{given} ({given_variable}) is there without {missing} "
                f"({missing_variable}): a certificate and its key go together; give "
                "both, or neither"
            )


class TokenSource:
    """Where this process has its token from: a file, or a variable's value.

    A file is looked at for each call: another token counts from the next call on.
    """

    def __init__(self, *, path: Path | None = None, value: str = "") -> None:
        """Reads the token.

        Args:
            path: The file that has it.
            value: The token, if it is in no file.

        Raises:
            CredentialsError: There is none, or others could have read it.
        """
        # A script may change its folder.
        self._path = path = None if path is None else path.absolute()
        self._version: FileVersion = None
        self._metadata: Metadata = ()
        self._taken_s = time.monotonic()
        if path is None:
            self._take(value, TOKEN_VARIABLE)
        else:
            self._version = version_of(path)
            self._read(path)

    def metadata(self) -> Metadata:
        """What a call shows."""
        path = self._path
        if path is not None and (version := version_of(path)) != self._version:
            self._version = version
            try:
                self._read(path)
            except CredentialsError as error:
                log.warning("%s; calls show the token that it had before", error)
        return self._metadata

    def was_replaced(self, since_s: float) -> bool:
        """Whether calls show another token now than at a time of `time.monotonic`."""
        self.metadata()
        return self._taken_s > since_s

    def _read(self, path: Path) -> None:
        content = read_credential(path, "--token-file", is_secret=True)
        self._take(content.decode(errors="replace").strip(), f"--token-file {path}")

    def _take(self, token: str, place: str) -> None:
        if problem := token_problem(token):
            raise CredentialsError(
                f"what {place} has is no token, since it {problem}: name the file that "
                "`psctl token create` has written"
            )
        metadata = metadata_of(token)
        if metadata != self._metadata:
            self._metadata, self._taken_s = metadata, time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What this process proves itself with to others.

    Attributes:
        tls: None for a process that talks without TLS.
        token: None for a process that shows none.
    """

    tls: TlsFiles | None = None
    token: TokenSource | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """What the variables name. An empty one counts as none.

        Raises:
            CredentialsError: What they name doesn't go together, or is no token.
        """
        variables = os.environ if environ is None else environ
        token = _named_token(variables)
        ca, certificate, key = (
            Path(text) if (text := variables.get(name)) else None
            for name in (TLS_CA_VARIABLE, TLS_CERTIFICATE_VARIABLE, TLS_KEY_VARIABLE)
        )
        if ca is None and certificate is None and key is None:
            return cls(token=token)
        tls = TlsFiles(ca=ca, certificate=certificate, key=key)
        return cls(tls=tls, token=token)


def _named_token(variables: Mapping[str, str]) -> TokenSource | None:
    path, value = (variables.get(n) for n in (TOKEN_FILE_VARIABLE, TOKEN_VARIABLE))
    if path and value:
        raise CredentialsError(
            f"{TOKEN_FILE_VARIABLE} names a token and {TOKEN_VARIABLE} is one: leave "
            "one of them out"
        )
    if path:
        return _token_in(Path(path))
    return TokenSource(value=value) if value else None


@functools.cache
def _token_in(path: Path) -> TokenSource:
    """One for all channels, so that there is one moment at which a token changes."""
    return TokenSource(path=path)


FileVersion = tuple[int, ...] | None
"""Differs when a file does; None while there is none."""


def version_of(path: Path) -> FileVersion:
    """Which version of a file there is, without reading it."""
    try:
        about = os.stat(path)
    except OSError:
        return None
    return (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_mode)


def read_credential(path: Path, what: str, *, is_secret: bool) -> bytes:
    """Reads a file of credentials whole.

    A file that others could change is refused, and a secret that they could read. The
    rule is PostgreSQL's for its key (be-secure-common.c): a file of root may be read by
    a group, as Kubernetes mounts secrets for a pod with an fsGroup.

    Args:
        path: A regular file, or a link to one.
        what: The option it was given by, for errors, as in `--tls-key`.
        is_secret: Whether nobody else may read it.

    Raises:
        CredentialsError: It is none, or others could have read or changed it.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for whoever writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        cure = "see whether the name is right"
        if error.errno == errno.EACCES:
            cure = "let the user that runs this process read it"
        raise CredentialsError(
            f"can't read {what} {path}: {error.strerror}; {cure}"
        ) from error
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise CredentialsError(f"{what} {path} is no file: name a regular file")
        _refuse_open(about, path, what, is_secret=is_secret)
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(FILE_BYTES_MAX + 1)
    finally:
        os.close(descriptor)
    if len(content) > FILE_BYTES_MAX:
        raise CredentialsError(
            f"{what} {path} has more than {FILE_BYTES_MAX >> 10} KiB: it is another "
            "kind of file"
        )
    return content


_LOOKED: Final = "and make sure that it is the right one"


def _refuse_open(
    about: os.stat_result, path: Path, what: str, *, is_secret: bool
) -> None:
    may = "read and change" if is_secret else "change"
    if about.st_uid not in (0, os.geteuid()):  # only root gets to read a secret of one
        then = "and if that user may have read it, replace it" if is_secret else ""
        raise CredentialsError(
            f"{what} {path} belongs to user {about.st_uid}, who can {may} it: run "
            f"`chown {os.geteuid()} {path}`, {then or _LOOKED}"
        )
    mode = stat.S_IMODE(about.st_mode)
    if not is_secret:
        if mode & 0o022:
            raise CredentialsError(
                f"{what} {path} can be changed by other users (mode {mode:04o}), who "
                f"could have others trusted by it: run `chmod go-w {path}`, {_LOOKED}"
            )
        return
    of_root = about.st_uid == 0 and os.geteuid() != 0
    if mode & (0o037 if of_root else 0o077):
        raise CredentialsError(
            f"{what} {path} can be read or changed by other users (mode {mode:04o}): "
            f"whoever has it can act as this process; run `chmod 600 {path}`, and if "
            "others may have read it, replace it"
        )
