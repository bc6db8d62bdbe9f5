"""Certificates of a job, made by `psctl tls`, and what is wrong with some of them."""

from datetime import timedelta
from pathlib import Path

from psctl import tls
from psctl.folders import write_private
from pswire.security.credentials import Credentials, TlsFiles

SERVER = "server-localhost"


class MadeCertificates:
    """A folder of certificates, whose servers are called on this machine alone."""

    def __init__(self, folder: Path, *, hosts: str = "localhost") -> None:
        self.folder = folder
        tls.init(folder, tls.subjects_of([hosts], ["w0", "w1"]), days=90)

    def files(self, name: str) -> TlsFiles:
        """Of one of its folders."""
        place = self.folder / name
        return TlsFiles(
            ca=place / tls.CA_FILE,
            certificate=place / tls.CERTIFICATE_FILE,
            key=place / tls.KEY_FILE,
        )

    def credentials(self, name: str) -> Credentials:
        """Of one of its folders."""
        return Credentials(tls=self.files(name))

    def environment(self, name: str) -> dict[str, str]:
        """Of a process that has one of its folders."""
        files = self.files(name)
        return {
            "PS_TLS_CA": str(files.ca),
            "PS_TLS_CERT": str(files.certificate),
            "PS_TLS_KEY": str(files.key),
        }

    def expire(self, name: str) -> None:
        """Makes a certificate anew that has ended a while ago."""
        found = next(
            each for each in tls.listed(self.folder) if each.folder.name == name
        )
        assert found.subject is not None
        issuer = tls.Issuer.read(self.folder)
        ended = issuer.issue(found.subject, -timedelta(minutes=30))
        self.replace(name, ended)

    def replace(self, name: str, files: dict[str, bytes]) -> None:
        """Puts other files into one of its folders, each at once."""
        for each, content in files.items():
            write_private(self.folder / name / each, content)

    def take_over(self, other: "MadeCertificates") -> None:
        """Puts files of another authority into the folders that both have."""
        for place in self.folder.iterdir():
            theirs = (other.folder / place.name).glob("*")
            self.replace(place.name, {each.name: each.read_bytes() for each in theirs})
