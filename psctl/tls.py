"""`psctl tls`: makes, replaces and lists the certificates of a job.

A folder of certificates has a folder for each process that needs one of its own, to be
copied there, and one for the authority, which stays.
"""

import ipaddress
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from psctl.failures import CommandError
from psctl.folders import write_private
from psctl.tables import aligned, count_text
from pswire.exit_codes import ExitCode
from pswire.names import printable
from pswire.security.credentials import CredentialsError, read_credential
from pswire.security.roles import Identity, Role

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ModuleNotFoundError as error:
    raise CommandError(
        "psctl tls makes certificates by the library cryptography, which is not "
        "installed: pip install 'paramserver[tls]'. TLS itself does not need it: "
        "certificates that others make work as well, see docs/security.md",
        ExitCode.BAD_CONFIGURATION,
    ) from error

SCHEMA_VERSION: Final = 1

AUTHORITY: Final = "authority"
CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.pem", "cert.pem", "key.pem"
AUTHORITY_KEY_FILE: Final = "ca-key.pem"

AUTHORITY_DAYS: Final = 3650
RENEWED_WITHIN_DAYS: Final = 30

_CLOCK_SKEW: Final = timedelta(hours=1)
"""By which clocks of other machines may be behind."""

_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
"""Names that each server has beside its own, for whoever calls on the same machine."""

_HOST_NAME: Final = re.compile(
    r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?"
    r"(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*"
)

Key = ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom a certificate is for.

    Attributes:
        identity: Role and name.
        hosts: Names and addresses under which it is called; none for a client.
    """

    identity: Identity
    hosts: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Name of its folder."""
        name = self.hosts[0] if self.hosts else self.identity.name
        role = "server" if self.hosts else self.identity.role.value
        safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)
        return f"{role}-{safe}" if safe else role


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate in a folder of certificates.

    Attributes:
        folder: Where it is.
        subject: Whom it is for; None for the authority's own.
        made_at: When it was made, less the skew of clocks.
        ends_at: When it ends.
    """

    folder: Path
    subject: Subject | None
    made_at: datetime
    ends_at: datetime


def subjects_of(hosts: Iterable[str], workers: Iterable[str]) -> list[Subject]:
    """Whom a job needs certificates for.

    Args:
        hosts: Of each machine with servers its names, with commas between.
        workers: Ids of workers that get one each; none for one that all share.
    """
    found = [
        Subject(
            Identity(Role.SHARD),
            tuple(dict.fromkeys([*map(_checked_host, each.split(",")), *_LOOPBACK])),
        )
        for each in hosts
    ]
    named = [Subject(Identity(Role.WORKER, each)) for each in workers]
    found += named or [Subject(Identity(Role.WORKER))]
    found += [Subject(Identity(role)) for role in (Role.READER, Role.ADMIN)]
    return found


def init(
    folder: Path, subjects: Sequence[Subject], days: int
) -> tuple[list[Certificate], list[Certificate]]:
    """Makes an authority, if there is none, and certificates that are missing.

    Returns:
        Those that were made, and those that were there and are left as they are.
    """
    if folder.exists():
        _check_own(folder)
    names = [each.folder for each in subjects]
    for each in names:
        if names.count(each) > 1:
            raise CommandError(
                f"two of the certificates would be in {folder / each}: give hosts or "
                "worker ids that differ in letters or digits",
                ExitCode.USAGE,
            )
    made, kept = [], []
    for subject in subjects:
        if not (folder / subject.folder).exists():
            continue
        found = _read(folder / subject.folder)
        if found.subject != subject:
            raise CommandError(
                f"{found.folder} has a certificate for "
                f"{_whom(found.subject)} already, not for {_whom(subject)}: take its "
                "folder away, or name a new one"
            )
        kept.append(found)
    authority = folder / AUTHORITY
    if not authority.exists():
        if not any(each.hosts for each in subjects):
            raise CommandError(
                "no --host is named: give the names and addresses of each machine that "
                "runs a coordinator or shards",
                ExitCode.USAGE,
            )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        _write_folder(
            authority,
            {
                CA_FILE: _pem(_authority_certificate(key)),
                AUTHORITY_KEY_FILE: _key_pem(key),
            },
        )
    issuer = Issuer.read(folder)
    for subject in subjects:
        place = folder / subject.folder
        if not place.exists():
            files = issuer.issue(subject, timedelta(days=days))
            _write_folder(place, {CA_FILE: issuer.pem, **files})
            made.append(_read(place))
    return made, kept


def renew(folder: Path, within_days: float | None) -> tuple[list[Certificate], int]:
    """Replaces certificates, each for as long as it held, under a new key.

    An authority's own is made anew under its old key, so that what it has signed stays
    good.

    Args:
        folder: Of certificates.
        within_days: Replace those that end within so many days; None for all.

    Returns:
        Those that were made, and how many were left as they are.
    """
    if folder.exists():
        _check_own(folder)
    before = datetime.max.replace(tzinfo=UTC)
    if within_days is not None:
        before = datetime.now(UTC) + timedelta(days=within_days)
    issuer = Issuer.read(folder)
    made = []
    certificates = listed(folder)
    if issuer.certificate.not_valid_after_utc < before:
        issuer = Issuer(_authority_certificate(issuer.key), issuer.key)
        for each in certificates:
            write_private(each.folder / CA_FILE, issuer.pem)
        made.append(_read(folder / AUTHORITY))
    for each in certificates:
        if each.subject is None or each.ends_at >= before:
            continue
        lasting = each.ends_at - each.made_at - _CLOCK_SKEW
        # A process that looks in between finds a pair that does not match, keeps the
        # old one, and looks again.
        for name, content in issuer.issue(each.subject, lasting).items():
            write_private(each.folder / name, content)
        made.append(_read(each.folder))
    return made, len(certificates) - len(made)


def listed(folder: Path) -> list[Certificate]:
    """The certificates of a folder, the authority's first."""
    if not (folder / AUTHORITY / CA_FILE).exists():
        raise CommandError(
            f"{printable(str(folder))} is no folder of certificates: `psctl tls init` "
            "makes one",
            ExitCode.USAGE,
        )
    others = sorted(
        each.parent
        for each in folder.glob(f"*/{CERTIFICATE_FILE}")
        if not each.parent.name.startswith(".")
    )
    return [_read(each) for each in (folder / AUTHORITY, *others)]


def certificates_json(
    folder: Path, certificates: Sequence[Certificate], **others: object
) -> dict[str, object]:
    """Certificates, for programs."""
    return {
        "schema_version": SCHEMA_VERSION,
        "folder": str(folder),
        "certificates": [
            {
                "folder": str(each.folder),
                "role": _role_text(each),
                "name": each.subject.identity.name if each.subject else "",
                "hosts": list(each.subject.hosts) if each.subject else [],
                "ends_at": f"{each.ends_at:%Y-%m-%dT%H:%M:%SZ}",
            }
            for each in certificates
        ],
        **others,
    }


def certificates_text(certificates: Sequence[Certificate]) -> str:
    """Certificates, for people."""
    return aligned(
        ("folder", "role", "for", "ends"),
        [
            (
                each.folder.name,
                _role_text(each),
                _for_text(each),
                f"{each.ends_at:%Y-%m-%d}{_ending_text(each)}",
            )
            for each in certificates
        ],
    )


def made_text(folder: Path, made: Sequence[Certificate], kept_count: int) -> str:
    """What a command has made, for people."""
    shown = printable(str(folder))
    left = f"; {kept_count} left as before" if kept_count else ""
    if not made:
        return f"nothing to do in {shown}{left}"
    return (
        f"{certificates_text(made)}\n\n{count_text(len(made), 'certificate')} made in "
        f"{shown}{left}. Copy each folder to where its process runs, and {AUTHORITY} "
        "to nowhere: whoever has its key can be anyone"
    )


@dataclass(frozen=True, slots=True)
class Issuer:
    """An authority that makes certificates."""

    certificate: x509.Certificate
    key: Key

    @classmethod
    def read(cls, folder: Path) -> "Issuer":
        place = folder / AUTHORITY
        key_file = place / AUTHORITY_KEY_FILE
        if not key_file.exists():
            raise CommandError(
                f"{printable(str(key_file))} is missing: certificates are made on the "
                "machine where `psctl tls init` has made the authority"
            )
        try:
            content = read_credential(key_file, "the authority's key", is_secret=True)
            key = serialization.load_pem_private_key(content, None)
        except CredentialsError as error:
            raise CommandError(printable(str(error))) from error
        except (ValueError, TypeError) as error:
            raise CommandError(f"{printable(str(key_file))}: {error}") from error
        if not isinstance(key, Key):
            raise CommandError(
                f"{printable(str(key_file))} is no key that psctl tls has made"
            )
        return cls(_load(place / CA_FILE), key)

    @property
    def pem(self) -> bytes:
        return _pem(self.certificate)

    def issue(self, subject: Subject, lasting: timedelta) -> dict[str, bytes]:
        """Files of a certificate, which ends with the authority at the latest."""
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if subject.hosts:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        now = datetime.now(UTC)
        names: list[x509.GeneralName] = [_general_name(each) for each in subject.hosts]
        names.append(x509.UniformResourceIdentifier(subject.identity.uri))
        builder = (
            _builder(
                f"paramserver {subject.identity.role}",
                key.public_key(),
                ends_at=min(now + lasting, self.certificate.not_valid_after_utc),
            )
            .issuer_name(self.certificate.subject)
            .add_extension(x509.BasicConstraints(False, None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(_key_usage(is_authority=False), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(
                    self.key.public_key()
                ),
                critical=False,
            )
        )
        return {
            KEY_FILE: _key_pem(key),
            CERTIFICATE_FILE: _pem(builder.sign(self.key, hashes.SHA256())),
        }


def _authority_certificate(key: Key) -> x509.Certificate:
    name = "paramserver authority"
    return (
        _builder(
            name,
            key.public_key(),
            ends_at=datetime.now(UTC) + timedelta(days=AUTHORITY_DAYS),
        )
        .issuer_name(_named(name))
        .add_extension(x509.BasicConstraints(True, 0), critical=True)
        .add_extension(_key_usage(is_authority=True), critical=True)
        .sign(key, hashes.SHA256())
    )


def _builder(
    name: str, public_key: ec.EllipticCurvePublicKey, *, ends_at: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - _CLOCK_SKEW)
        .not_valid_after(ends_at)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False
        )
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _checked_host(text: str) -> str:
    """A name or address, in its shortest form."""
    host = text.strip().removeprefix("[").removesuffix("]")
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not _HOST_NAME.fullmatch(host) or len(host) > 253:
        raise CommandError(
            f"{printable(text)!r} is no name or address of a host: give those by which "
            "others call it, without a port and with commas between, as in "
            "--host ps0.example.org,10.0.0.7",
            ExitCode.USAGE,
        )
    return host.lower()


_MALFORMED: Final = (
    ValueError,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)


def _read(folder: Path) -> Certificate:
    is_authority = folder.name == AUTHORITY
    path = folder / (CA_FILE if is_authority else CERTIFICATE_FILE)
    found = _load(path)
    try:
        return Certificate(
            folder,
            None if is_authority else _subject_of(found, folder),
            found.not_valid_before_utc,
            found.not_valid_after_utc,
        )
    except _MALFORMED as error:  # which is looked at only now
        raise _unreadable(path, error) from error


def _subject_of(certificate: x509.Certificate, folder: Path) -> Subject:
    try:
        names = certificate.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        ).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    found = [each for uri in uris if (each := Identity.from_uri(uri)) is not None]
    if len(found) != 1:
        raise CommandError(
            f"the certificate in {printable(str(folder))} names no role: it was not "
            "made by psctl tls; take its folder away"
        )
    hosts = [
        str(each.value)
        for each in names
        if isinstance(each, x509.DNSName | x509.IPAddress)
    ]
    return Subject(found[0], tuple(hosts))


def _load(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CommandError:
    return CommandError(
        f"{printable(str(path))} is no certificate in PEM "
        f"({printable(str(error))[:128]}): take its folder away, and `psctl tls init` "
        "makes it anew"
    )


def _check_own(folder: Path) -> None:
    """Refuses a folder where others may have put an authority, or certificates."""
    about = folder.stat()
    if about.st_uid not in (0, os.geteuid()) or about.st_mode & stat.S_IWOTH:
        raise CommandError(
            f"{printable(str(folder))} belongs to another user, or all may write to "
            "it: what is there could be of anybody; name a folder of your own",
            ExitCode.USAGE,
        )


def _role_text(certificate: Certificate) -> str:
    if certificate.subject is None:
        return "authority"
    return certificate.subject.identity.role.value


def _for_text(certificate: Certificate) -> str:
    subject = certificate.subject
    if subject is None:
        return ""
    return ", ".join(subject.hosts) or subject.identity.name or "any"


def _whom(subject: Subject | None) -> str:
    if subject is None:
        return "an authority"
    hosts = ", ".join(subject.hosts)
    return f"{subject.identity} ({hosts})" if hosts else str(subject.identity)


def _ending_text(certificate: Certificate) -> str:
    days = (certificate.ends_at - datetime.now(UTC)) / timedelta(days=1)
    if days < 0:
        return " (has ended)"
    return f" (in {days:.0f} days)" if days < RENEWED_WITHIN_DAYS else ""


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes a new folder whole or not at all."""
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        made.mkdir(mode=0o700)
        for name, content in files.items():
            write_private(made / name, content)
        made.rename(folder)
