"""Certificates that `psctl tls` makes."""

import json
import os
import ssl
import stat
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from psctl.__main__ import app
from psctl.failures import CommandError
from psctl.tls import (
    CA_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    init,
    listed,
    renew,
    subjects_of,
)
from pswire.exit_codes import ExitCode
from pswire.security.certificates import read_pem
from pswire.security.roles import Identity, Role
from tests.doubles.made_certificates import SERVER, MadeCertificates

EVERY_FOLDER = ["admin", "authority", "reader", SERVER, "worker-w0", "worker-w1"]


@pytest.fixture
def made(tmp_path: Path) -> MadeCertificates:
    return MadeCertificates(tmp_path / "certificates")


def names_of(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_each_role_and_machine_has_a_folder_to_copy(made: MadeCertificates) -> None:
    assert names_of(made.folder) == EVERY_FOLDER
    assert names_of(made.folder / "authority") == ["ca-key.pem", CA_FILE]
    for name in set(EVERY_FOLDER) - {"authority"}:
        assert names_of(made.folder / name) == [CA_FILE, CERTIFICATE_FILE, KEY_FILE]


def test_nobody_else_can_read_any_of_it(made: MadeCertificates) -> None:
    for path in [made.folder, *made.folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_certificates_name_roles_and_hosts(tmp_path: Path) -> None:
    hosts = [
        "ps0.example.org,10.0.0.7,[fd00:0::1]",
        "*.ps.team.svc.cluster.local, ps.team.svc",
    ]
    init(tmp_path / "c", subjects_of(hosts, ["wörker/1"]), 30)

    found = {each.folder.name: each.subject for each in listed(tmp_path / "c")}

    assert {each.identity for each in found.values() if each} == {
        Identity(Role.SHARD),
        Identity(Role.WORKER, "wörker/1"),
        Identity(Role.READER),
        Identity(Role.ADMIN),
    }
    own = {name: each.hosts for name, each in found.items() if each and each.hosts}
    loopback = ("localhost", "127.0.0.1", "::1")
    assert own == {
        "server-ps0.example.org": (
            *("ps0.example.org", "10.0.0.7", "fd00::1"),
            *loopback,
        ),
        "server-_.ps.team.svc.cluster.local": (
            *("*.ps.team.svc.cluster.local", "ps.team.svc"),
            *loopback,
        ),
    }
    assert "worker-w_rker_1" in found


@pytest.mark.parametrize("host", ["", "a b", "h:7070", "-h", "a..b", "a,,b"])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(CommandError, match="is no name or address of a host"):
        subjects_of([host], [])


def test_a_client_can_not_pass_for_a_server(made: MadeCertificates) -> None:
    worker = made.files("worker-w0")
    assert worker.certificate is not None
    loaded = x509.load_pem_x509_certificate(worker.certificate.read_bytes())
    usage = loaded.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]


def test_what_is_there_stays_when_others_are_added(made: MadeCertificates) -> None:
    before = contents(made.folder)

    added, kept = init(made.folder, subjects_of([], ["w0", "w2"]), 30)

    assert [each.folder.name for each in added] == ["worker-w2"]
    assert [each.folder.name for each in kept] == ["worker-w0", "reader", "admin"]
    after = contents(made.folder)
    assert {path: after[path] for path in before} == before
    assert read_pem(made.files("worker-w2")).pair is not None


def test_other_names_for_a_certificate_that_is_there_are_refused(
    made: MadeCertificates,
) -> None:
    before = contents(made.folder)
    with pytest.raises(CommandError, match=r"has a certificate for shard \(localhost"):
        init(made.folder, subjects_of(["localhost,ps0"], ["w9"]), 30)
    assert contents(made.folder) == before


def test_ids_that_share_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="two of the certificates would be in"):
        init(tmp_path / "c", subjects_of(["localhost"], ["a/b", "a b"]), 30)
    assert not (tmp_path / "c").exists()


def test_a_first_folder_needs_a_host(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no --host is named"):
        init(tmp_path / "c", subjects_of([], ["w0"]), 30)
    assert not (tmp_path / "c").exists()


def test_certificates_that_end_soon_are_replaced_and_no_other(
    made: MadeCertificates,
) -> None:
    made.expire("worker-w0")
    before = contents(made.folder)

    renewed, kept_count = renew(made.folder, within_days=30)

    assert [each.folder.name for each in renewed] == ["worker-w0"]
    assert kept_count == len(EVERY_FOLDER) - 1
    after = contents(made.folder)
    changed = {path for path in before if after[path] != before[path]}
    own = made.folder / "worker-w0"
    assert changed == {own / CERTIFICATE_FILE, own / KEY_FILE}


def test_renewed_certificates_have_the_names_of_the_former_ones(
    made: MadeCertificates,
) -> None:
    before = [each.subject for each in listed(made.folder)]
    renew(made.folder, None)
    assert [each.subject for each in listed(made.folder)] == before


def test_a_renewed_certificate_holds_as_long_as_the_former_one(
    made: MadeCertificates,
) -> None:
    renew(made.folder, None)

    wanted = datetime.now(UTC) + timedelta(days=90)
    for each in listed(made.folder)[1:]:
        assert abs(each.ends_at - wanted) < timedelta(minutes=5)


def test_a_renewed_authority_is_the_same_one(made: MadeCertificates) -> None:
    """What it has signed before is good by its new certificate, and the reverse."""
    files = made.files("reader")
    assert files.ca is not None
    old = files.ca.read_bytes()
    former = made.files("admin").certificate
    assert former is not None
    signed_before = former.read_bytes()

    renew(made.folder, None)

    assert files.ca.read_bytes() != old
    assert files.ca.read_bytes() == (made.folder / "authority" / CA_FILE).read_bytes()
    for authority, certificate in (
        (old, former.read_bytes()),
        (files.ca.read_bytes(), signed_before),
    ):
        issuer = x509.load_pem_x509_certificate(authority)
        x509.load_pem_x509_certificate(certificate).verify_directly_issued_by(issuer)


def test_only_where_the_authority_was_made_are_certificates_made(
    made: MadeCertificates,
) -> None:
    (made.folder / "authority" / "ca-key.pem").unlink()
    before = contents(made.folder)
    for attempt in (
        lambda: renew(made.folder, None),
        lambda: init(made.folder, subjects_of([], ["w9"]), 30),
    ):
        refused(attempt, "ca-key.pem is missing: certificates are made on the machine")
    assert contents(made.folder) == before


def test_with_a_key_of_the_authority_that_others_can_read_nothing_is_made(
    made: MadeCertificates,
) -> None:
    """Whoever has it can be anyone."""
    before = contents(made.folder)
    (made.folder / "authority" / "ca-key.pem").chmod(0o644)
    for attempt in (
        lambda: renew(made.folder, None),
        lambda: init(made.folder, subjects_of([], ["w9"]), 30),
    ):
        refused(attempt, "ca-key.pem can be read or changed by other users")
    assert contents(made.folder) == before


@pytest.mark.parametrize("is_there", [True, False])
def test_where_others_may_put_an_authority_nothing_is_made(
    made: MadeCertificates, tmp_path: Path, *, is_there: bool
) -> None:
    folder = made.folder if is_there else tmp_path / "empty"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    before = contents(folder)
    refused(lambda: init(folder, subjects_of(["h"], []), 30), "name a folder of your")
    if is_there:
        refused(lambda: renew(folder, None), "name a folder of your own")
    assert contents(folder) == before


def refused(attempt: Callable[[], object], text: str) -> None:
    with pytest.raises(CommandError, match=text):
        attempt()


def test_files_that_are_no_certificates_are_named(
    made: MadeCertificates, tmp_path: Path
) -> None:
    refused(lambda: listed(tmp_path), "is no folder of certificates")
    (made.folder / "reader" / CERTIFICATE_FILE).write_text("nothing")
    refused(lambda: listed(made.folder), "reader/cert.pem is no certificate in PEM")


def test_python_and_openssl_take_a_chain_that_is_checked_strictly(
    made: MadeCertificates,
) -> None:
    """As Python 3.13 does by default."""
    files = made.files(SERVER)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert files.certificate is not None
    server.load_cert_chain(files.certificate, files.key)
    client = ssl.create_default_context(cafile=files.ca)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    sent, received = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(received, sent, server_hostname="::1")
    theirs = server.wrap_bio(sent, received, server_side=True)
    for _ in range(2):
        for side in (ours, theirs):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    peer = ours.getpeercert()
    assert peer is not None
    assert ("URI", "paramserver:shard/") in peer["subjectAltName"]


def test_the_commands_print_json(tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    made = printed("tls", "init", folder, "--host=localhost", "--json")
    assert [each["role"] for each in made["certificates"]] == [
        *("shard", "worker", "reader", "admin"),
    ]
    assert made["kept_count"] == 0
    shown = printed("tls", "show", folder, "--json")
    assert [each["role"] for each in shown["certificates"]] == [
        *("authority", "admin", "reader", "shard", "worker"),
    ]
    renewed = printed("tls", "renew", folder, "--json")
    assert (renewed["certificates"], renewed["kept_count"]) == ([], 5)
    assert len(printed("tls", "renew", folder, "--all", "--json")["certificates"]) == 5


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "psctl.tls")
    found = CliRunner().invoke(app, ["tls", "show", str(tmp_path)])
    assert isinstance(found.exception, CommandError)
    assert "pip install 'paramserver[tls]'" in str(found.exception)
    assert found.exception.exit_code == ExitCode.BAD_CONFIGURATION


def printed(*arguments: str) -> dict[str, list[dict[str, object]]]:
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.output
    loaded: dict[str, list[dict[str, object]]] = json.loads(found.stdout)
    return loaded


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
