"""The certificates of this process, read again when their files change.

Whoever replaces them may do so at any time, one file after the other: what can't be
used, or doesn't belong together, is logged, and the ones in force stay.
"""

import functools
import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pswire.security.credentials import (
    Credentials,
    CredentialsError,
    FileVersion,
    TlsFiles,
    read_credential,
    version_of,
)

LOOK_INTERVAL_S: Final = 1.0
"""Between two looks at the files."""

END_NOTICE_S: Final = 7 * 24 * 3600
"""Before a certificate's end, from when on the log warns of it."""

END_NOTICE_INTERVAL_S: Final = 24 * 3600
"""Between two such warnings."""

log = logging.getLogger(__name__)

_Marks = tuple[FileVersion, ...]


@dataclass(frozen=True, slots=True)
class Pem:
    """Certificates as gRPC takes them, checked.

    Attributes:
        ca: Of the authorities that others are checked by; None for no check.
        pair: The private key of this process and its certificate, with those between
            that and its authority; None for a client that shows none.
        ends_at_s: When the first of all of them ends, in seconds since 1970.
        ending: The file that this one is in.
    """

    ca: bytes | None
    pair: tuple[bytes, bytes] | None
    ends_at_s: float
    ending: Path


class Certificates:
    """What some files of TLS held when they were last good. Threads may share it."""

    def __init__(
        self,
        files: TlsFiles,
        *,
        wall_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the files.

        Raises:
            CredentialsError: They can't be used; the text says why.
        """
        # A script may change its folder before they are read again.
        files = self.files = TlsFiles(
            ca=files.ca and files.ca.absolute(),
            certificate=files.certificate and files.certificate.absolute(),
            key=files.key and files.key.absolute(),
        )
        self._wall_s = wall_s
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._marks = _marks(files)
        self._current = read_pem(files)
        self._looked_s = monotonic_s()
        self._noticed_s = -float("inf")
        self._notice_end()

    def current(self) -> Pem:
        """The certificates in force: the same object until the files have changed."""
        # Of threads that look at once one does, and the others need not wait for it.
        if self._monotonic_s() - self._looked_s >= LOOK_INTERVAL_S and (
            self._lock.acquire(blocking=False)
        ):
            try:
                self._looked_s = self._monotonic_s()
                self._look()
                self._notice_end()
            finally:
                self._lock.release()
        return self._current

    @property
    def has_ended(self) -> bool:
        """Whether one of those in force holds no more."""
        return self._current.ends_at_s <= self._wall_s()

    def _look(self) -> None:
        marks = _marks(self.files)
        if marks == self._marks:
            return
        try:
            found = read_pem(self.files)
        except CredentialsError as error:
            self._marks = marks
            log.warning(
                "the certificates have changed and can't be used: %s; those read "
                "before stay in force until %s",
                *(error, date_text(self._current.ends_at_s)),
            )
            return
        if _marks(self.files) != marks:
            return  # changed while they were read: looked at again next time
        self._marks = marks
        self._current = found
        self._noticed_s = -float("inf")
        log.info(
            "new certificates are in force for new connections, until %s",
            date_text(found.ends_at_s),
        )

    def _notice_end(self) -> None:
        left_s = self._current.ends_at_s - self._wall_s()
        now_s = self._monotonic_s()
        if left_s > END_NOTICE_S or now_s - self._noticed_s < END_NOTICE_INTERVAL_S:
            return
        self._noticed_s = now_s
        when = date_text(self._current.ends_at_s)
        log.warning(
            "the certificate in %s %s; replace it, as `psctl tls renew` does: the new "
            "one is read without a restart",
            self._current.ending,
            f"ends on {when}" if left_s > 0 else f"ended on {when}: peers refuse it",
        )


def certificates_of(credentials: Credentials) -> Certificates | None:
    """The certificates of credentials, the same for all of a process.

    Raises:
        CredentialsError: They can't be used; the text says why.
    """
    return None if credentials.tls is None else _certificates_of(credentials.tls)


@functools.cache
def _certificates_of(files: TlsFiles) -> Certificates:
    return Certificates(files)


def read_pem(files: TlsFiles) -> Pem:
    """Reads and checks files of TLS.

    Raises:
        CredentialsError: One can't be used, or the key is not the certificate's.
    """
    ends: list[tuple[float, Path]] = []
    ca = pair = None
    if files.ca is not None:
        ca = read_credential(files.ca, "--tls-ca", is_secret=False)
        ends.append((_first_end_s(ca, files.ca, "--tls-ca"), files.ca))
    if files.certificate is not None and files.key is not None:
        certificate = read_credential(files.certificate, "--tls-cert", is_secret=False)
        key = read_credential(files.key, "--tls-key", is_secret=True)
        end_s = _first_end_s(certificate, files.certificate, "--tls-cert")
        ends.append((end_s, files.certificate))
        _check_pair(files.certificate, files.key)
        pair = (key, certificate)
    ends_at_s, ending = min(ends)
    return Pem(ca, pair, ends_at_s, ending)


def _check_pair(certificate: Path, key: Path) -> None:
    def refuse_password() -> bytes:
        raise CredentialsError(
            f"--tls-key {key} is encrypted, and nobody is there to type a password: "
            f"write it without one, as `openssl pkey -in {key} -out NEW` does"
        )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CredentialsError(
                f"--tls-key {key} is not the key of --tls-cert {certificate}: give "
                "the two that were made together"
            ) from error
        raise CredentialsError(
            f"--tls-cert {certificate} and --tls-key {key} can't be used "
            f"({error.reason or error}): give a certificate and its private key, both "
            "in PEM"
        ) from error
    except OSError as error:
        raise CredentialsError(
            f"can't read --tls-cert {certificate} and --tls-key {key}: {error.strerror}"
        ) from error


def _first_end_s(pem: bytes, path: Path, what: str) -> float:
    """When the first of a file's certificates ends, in seconds since 1970."""
    try:
        blocks = _certificates_in(pem.decode("ascii"))
        ends = [_end_s(ssl.PEM_cert_to_DER_cert(each)) for each in blocks]
        # OpenSSL's look at them; ours finds no more than the dates.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(
            cadata="\n".join(blocks)
        )
        return min(ends)
    except (ssl.SSLError, ValueError, IndexError) as error:
        raise CredentialsError(
            f"{what} {path} holds no certificate that can be read: give one in PEM, "
            "which begins with -----BEGIN CERTIFICATE-----"
        ) from error


def _certificates_in(text: str) -> list[str]:
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    return [f"{begin}{each.partition(end)[0]}{end}\n" for each in text.split(begin)[1:]]


_UTC_TIME: Final = 0x17
_EXPLICIT_VERSION: Final = 0xA0


def _end_s(der: bytes) -> float:
    """`notAfter` of a certificate, as RFC 5280, 4.1 has it.

    Python's ssl shows it of a peer's certificate alone.

    Raises:
        ValueError: It is no such certificate.
        IndexError: It ends too early.
    """
    _, certificate, _ = _der_value(der)
    _, body, _ = _der_value(certificate)
    tag, _, rest = _der_value(body)
    if tag == _EXPLICIT_VERSION:
        _, _, rest = _der_value(rest)  # the serial number
    for _ in range(2):  # the algorithm, the issuer
        _, _, rest = _der_value(rest)
    _, validity, _ = _der_value(rest)
    _, _, rest = _der_value(validity)
    tag, end, _ = _der_value(rest)
    text = end.decode("ascii")
    if tag == _UTC_TIME:
        # RFC 5280, 4.1.2.5.1: years from 1950 on.
        text = ("19" if text[:2] >= "50" else "20") + text
    found = datetime.strptime(text, "%Y%m%d%H%M%SZ")
    return found.replace(tzinfo=UTC).timestamp()


def _der_value(data: bytes) -> tuple[int, bytes, bytes]:
    """Tag and content of the first value in some bytes of DER, and what follows it."""
    tag, length, at = data[0], data[1], 2
    if length & 0x80:
        at += length & 0x7F
        length = int.from_bytes(data[2:at], "big")
    if at + length > len(data):
        raise ValueError("the value is longer than the bytes")
    return tag, data[at : at + length], data[at + length :]


def _marks(files: TlsFiles) -> _Marks:
    """What changes with the files."""
    return tuple(
        version_of(each) if each is not None else None
        for each in (files.ca, files.certificate, files.key)
    )


def date_text(seconds: float) -> str:
    """A time in seconds since 1970, in words."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
