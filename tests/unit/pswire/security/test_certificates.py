"""When new files of TLS are in force, and when they are not."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from psctl import tls
from pswire.security.certificates import Certificates, read_pem
from pswire.security.credentials import CredentialsError, TlsFiles
from pswire.security.roles import Identity, Role
from tests.doubles.made_certificates import MadeCertificates

DAY_S = 24 * 3600.0


class Clock:
    """Two clocks that a test moves."""

    def __init__(self) -> None:
        self.wall_s = datetime.now(UTC).timestamp()
        self.monotonic_s = 0.0

    def move(self, seconds: float) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds

    def certificates(self, files: TlsFiles) -> Certificates:
        return Certificates(
            files,
            wall_s=lambda: self.wall_s,
            monotonic_s=lambda: self.monotonic_s,
        )


@pytest.fixture
def made(tmp_path: Path) -> MadeCertificates:
    return MadeCertificates(tmp_path / "certificates")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def renewed(made: MadeCertificates) -> dict[str, bytes]:
    """Files of another certificate for `reader`."""
    subject = tls.Subject(Identity(Role.READER))
    return tls.Issuer.read(made.folder).issue(subject, timedelta(days=5))


def test_new_files_are_in_force_at_the_next_look(
    made: MadeCertificates, clock: Clock
) -> None:
    certificates = clock.certificates(made.files("reader"))
    first = certificates.current()
    new = renewed(made)
    made.replace("reader", new)
    assert certificates.current() is first  # the files are not looked at each time

    clock.move(1.0)
    second = certificates.current()

    assert second.pair == (new[tls.KEY_FILE], new[tls.CERTIFICATE_FILE])
    assert second.ca == first.ca
    clock.move(1.0)
    assert certificates.current() is second


def test_files_that_are_replaced_one_by_one_are_in_force_together(
    made: MadeCertificates, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = clock.certificates(made.files("reader"))
    first, new = certificates.current(), renewed(made)

    made.replace("reader", {tls.KEY_FILE: new[tls.KEY_FILE]})
    clock.move(1.0)
    assert certificates.current() is first
    assert "is not the key of" in caplog.text

    made.replace("reader", {tls.CERTIFICATE_FILE: new[tls.CERTIFICATE_FILE]})
    clock.move(1.0)
    assert certificates.current().pair == (
        new[tls.KEY_FILE],
        new[tls.CERTIFICATE_FILE],
    )


def test_files_are_read_again_though_the_process_is_in_another_folder(
    made: MadeCertificates, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made.folder / "reader")
    names = (tls.CA_FILE, tls.CERTIFICATE_FILE, tls.KEY_FILE)
    ca, certificate, key = map(Path, names)
    certificates = clock.certificates(TlsFiles(ca=ca, certificate=certificate, key=key))
    monkeypatch.chdir(made.folder)
    new = renewed(made)
    made.replace("reader", new)
    clock.move(1.0)
    assert certificates.current().pair == (new[tls.KEY_FILE], new[tls.CERTIFICATE_FILE])


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def let_others_read(path: Path) -> None:
    path.chmod(0o644)


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        (tls.CERTIFICATE_FILE, cut_in_half, "holds no certificate that can be read"),
        (tls.CA_FILE, cut_in_half, "holds no certificate that can be read"),
        (tls.KEY_FILE, cut_in_half, "can't be used"),
        (tls.KEY_FILE, let_others_read, "run `chmod 600"),
        (tls.KEY_FILE, Path.unlink, "can't read --tls-key"),
    ],
)
def test_files_that_cannot_be_used_change_nothing_and_are_logged_once(
    made: MadeCertificates,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: Callable[[Path], None],
    words: str,
) -> None:
    certificates = clock.certificates(made.files("reader"))
    first = certificates.current()

    damage(made.folder / "reader" / name)
    for _ in range(3):
        clock.move(1.0)
        assert certificates.current() is first

    (line,) = caplog.messages
    assert words in line
    assert "those read before stay in force until" in line

    made.replace("reader", {tls.CA_FILE: first.ca or b"", **renewed(made)})
    clock.move(1.0)
    assert certificates.current() is not first


def test_a_certificate_that_ends_soon_is_named_once_a_day(
    made: MadeCertificates, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    files = made.files("reader")
    certificates = clock.certificates(files)
    left_s = certificates.current().ends_at_s - clock.wall_s

    clock.move(left_s - 7 * DAY_S - 60)
    certificates.current()
    assert caplog.messages == []

    for _ in range(5):
        clock.move(61)
        certificates.current()
    (line,) = caplog.messages
    assert str(files.certificate) in line
    assert "ends on" in line
    assert "psctl tls renew" in line

    clock.move(DAY_S)
    certificates.current()
    assert len(caplog.messages) == 2

    clock.move(8 * DAY_S)
    certificates.current()
    assert "ended on" in caplog.messages[-1]
    assert "peers refuse it" in caplog.messages[-1]


def test_one_that_ends_soon_is_named_at_the_start(
    made: MadeCertificates, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    made.replace("reader", renewed(made))  # for five days
    clock.certificates(made.files("reader"))
    assert "ends on" in caplog.text


def test_looks_log_at_most_at_info_where_all_is_well(
    made: MadeCertificates, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    certificates = clock.certificates(made.files("admin"))
    made.replace("admin", {tls.CA_FILE: (certificates.current().ca or b"") + b"\n"})
    clock.move(1.0)
    certificates.current()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "new certificates are in force" in record.getMessage()


@pytest.mark.parametrize("end", ["2049-12-31 23:59:59", "2050-01-01 00:00:00"])
def test_ends_are_read_in_both_forms_of_time(tmp_path: Path, end: str) -> None:
    """RFC 5280 writes years from 2050 on with four digits."""
    key = ec.generate_private_key(ec.SECP256R1())
    ends_at = datetime.fromisoformat(f"{end}+00:00")
    name = x509.Name([])
    path = tmp_path / "ca.pem"
    path.write_bytes(
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime(1999, 1, 1, tzinfo=UTC))
        .not_valid_after(ends_at)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    assert read_pem(TlsFiles(ca=path)).ends_at_s == ends_at.timestamp()


def test_the_first_end_counts(made: MadeCertificates) -> None:
    files = made.files("reader")
    assert files.ca is not None
    whole = read_pem(files)
    assert whole.ending == files.certificate
    alone = read_pem(TlsFiles(ca=files.ca))
    assert alone.ends_at_s > whole.ends_at_s
    both = made.folder / "both.pem"
    assert files.certificate is not None
    both.write_bytes(files.ca.read_bytes() + files.certificate.read_bytes())
    assert read_pem(TlsFiles(ca=both)).ends_at_s == whole.ends_at_s


def test_a_key_that_needs_a_password_is_refused(made: MadeCertificates) -> None:
    files = made.files("reader")
    assert files.key is not None
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(CredentialsError, match="is encrypted, and nobody is there"):
        read_pem(files)


def test_a_key_of_another_certificate_is_refused(made: MadeCertificates) -> None:
    files = replace(made.files("reader"), key=made.files("admin").key)
    with pytest.raises(CredentialsError, match="is not the key of --tls-cert"):
        read_pem(files)


def test_bytes_that_are_no_certificate_are_refused(
    made: MadeCertificates, tmp_path: Path
) -> None:
    """Whatever part of one they are."""
    whole = made.files("reader").ca
    assert whole is not None
    text = whole.read_bytes()
    path = tmp_path / "ca.pem"
    for content in (
        b"",
        os.urandom(64),
        text[: len(text) // 2],
        text.replace(b"M", b"\xff"),
        b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n",
        b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n",
        b"-----BEGIN CERTIFICATE-----\nMIL/\n-----END CERTIFICATE-----\n",
    ):
        path.write_bytes(content)
        with pytest.raises(CredentialsError, match="holds no certificate"):
            read_pem(TlsFiles(ca=path))
