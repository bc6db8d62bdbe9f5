import os
from pathlib import Path

import pytest

from pswire.security.credentials import (
    FILE_BYTES_MAX,
    Credentials,
    CredentialsError,
    TlsFiles,
    read_credential,
)


def test_an_environment_without_the_variables_names_no_credentials() -> None:
    assert Credentials.from_environment({"PS_TLS_CA": ""}) == Credentials()


def test_variables_name_the_files() -> None:
    found = Credentials.from_environment(
        {"PS_TLS_CA": "ca.pem", "PS_TLS_CERT": "c.pem", "PS_TLS_KEY": "k.pem"}
    )
    assert found.tls == TlsFiles(
        ca=Path("ca.pem"), certificate=Path("c.pem"), key=Path("k.pem")
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("PS_TLS_CERT", r"--tls-cert \(PS_TLS_CERT\) is there without --tls-key"),
        ("PS_TLS_KEY", r"--tls-key \(PS_TLS_KEY\) is there without --tls-cert"),
    ],
)
def test_a_certificate_and_its_key_go_together(given: str, text: str) -> None:
    with pytest.raises(CredentialsError, match=text):
        Credentials.from_environment({given: "x.pem"})


def _file(folder: Path, mode: int) -> Path:
    path = folder / "key.pem"
    path.write_bytes(b"secret")
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_a_secret_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = _file(tmp_path, mode)
    with pytest.raises(CredentialsError, match=f"mode {mode:04o}.*chmod 600 "):
        read_credential(path, "--tls-key", is_secret=True)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_secret_of_ones_own_is_read(tmp_path: Path, mode: int) -> None:
    path = _file(tmp_path, mode)
    assert read_credential(path, "--tls-key", is_secret=True) == b"secret"


@pytest.mark.parametrize(
    ("owner", "mode", "is_read"), [(0, 0o640, True), (0, 0o644, False)]
)
def test_a_group_may_read_a_secret_of_root(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: int,
    mode: int,
    is_read: bool,
) -> None:
    path = _file(tmp_path, mode)
    whole = os.fstat

    def owned(descriptor: int) -> os.stat_result:
        found = whole(descriptor)
        return os.stat_result((*found[:4], owner, *found[5:10]))

    monkeypatch.setattr(os, "fstat", owned)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if is_read:
        assert read_credential(path, "--tls-key", is_secret=True) == b"secret"
    else:
        with pytest.raises(CredentialsError, match="chmod 600"):
            read_credential(path, "--tls-key", is_secret=True)


def test_a_secret_of_another_user_is_refused_to_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That user can read and change it, whatever its mode."""
    path = _file(tmp_path, 0o600)
    whole = os.fstat

    def owned(descriptor: int) -> os.stat_result:
        found = whole(descriptor)
        return os.stat_result((*found[:4], 1000, *found[5:10]))

    monkeypatch.setattr(os, "fstat", owned)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(CredentialsError, match=r"belongs to user 1000.*chown 0 "):
        read_credential(path, "--tokens", is_secret=True)


def test_a_certificate_may_be_read_by_all(tmp_path: Path) -> None:
    assert (
        read_credential(_file(tmp_path, 0o644), "--tls-ca", is_secret=False)
        == b"secret"
    )


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_an_authority_that_others_can_change_is_refused(
    tmp_path: Path, mode: int
) -> None:
    with pytest.raises(CredentialsError, match=f"mode {mode:04o}.*run `chmod go-w "):
        read_credential(_file(tmp_path, mode), "--tls-ca", is_secret=False)


def test_an_authority_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, mine = _file(tmp_path, 0o644), os.geteuid()
    whole = os.fstat

    def owned(descriptor: int) -> os.stat_result:
        found = whole(descriptor)
        return os.stat_result((*found[:4], mine + 1, *found[5:10]))

    monkeypatch.setattr(os, "fstat", owned)
    with pytest.raises(CredentialsError, match=r"who can change it: run `chown "):
        read_credential(path, "--tls-ca", is_secret=False)


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(bytes(FILE_BYTES_MAX + 1))
    for name, text in (
        ("pipe", "is no file"),
        (".", "is no file"),
        ("large", "more than 1024 KiB"),
        ("missing", "No such file or directory; see whether the name"),
    ):
        with pytest.raises(CredentialsError, match=text):
            read_credential(tmp_path / name, "--tls-ca", is_secret=False)
