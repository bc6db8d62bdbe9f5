"""Why a connection with TLS fails, found out with plain sockets.

To gRPC a refused certificate, a server without TLS and one that stops are much alike:
"Socket closed", most often.
"""

import socket
import ssl
from dataclasses import dataclass
from typing import Any, Final

from pswire.addresses import Address
from pswire.security.certificates import Certificates, date_text
from pswire.security.credentials import (
    TLS_CA_VARIABLE,
    TLS_CERTIFICATE_VARIABLE,
)

_HELLO: Final = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # RFC 9113, 3.4
    b"\0\0\0\4\0\0\0\0\0"  # and settings, none of which is said
)

_NAME_MISMATCHES: Final = (62, 64)
"""OpenSSL's codes, of x509_vfy.h."""

_CURE_OF_NAME: Final = (
    "call it by one of its names, or make it a certificate with this one too (`psctl "
    "tls init --host NAME`)"
)
_OTHER_NAME: Final = (
    "the certificate of the server there is not for the name or address by which it is "
    f"called: {_CURE_OF_NAME}"
)
_WRONG_AUTHORITY: Final = (
    "the certificate of the server there is not of the authority in --tls-ca: give the "
    "ca.pem of the job, and make sure that the address is the job's"
)
_NO_TLS: Final = (
    "the server there does not speak TLS, and this process does: start it with "
    f"--tls-ca, --tls-cert and --tls-key, or leave them out here ({TLS_CA_VARIABLE})"
)
_CAUSES: Final = {
    "certificate has expired": (
        "the certificate of the server there has ended, or that of its authority: "
        "replace it on its machine, as `psctl tls renew` does; if it has not, set the "
        "clock of this machine"
    ),
    "certificate is not yet valid": (
        "the certificate of the server there does not hold yet: set the clocks of both "
        "machines"
    ),
    "certificate purpose": (
        "the certificate of the server there is a client's: start it with one that was "
        "made for its machine (`psctl tls init --host NAME`)"
    ),
    "local issuer certificate": _WRONG_AUTHORITY,
    "self-signed certificate": _WRONG_AUTHORITY,
    "Hostname Verification Check failed": _OTHER_NAME,
    "is not in peer certificate": _OTHER_NAME,
    "WRONG_VERSION_NUMBER": _NO_TLS,
}
"""What is wrong, by words of BoringSSL, OpenSSL and gRPC."""


def cause_of(text: str) -> str:
    """What is wrong and what to do, if what gRPC says shows it; else empty."""
    found = (cause for words, cause in _CAUSES.items() if words in text)
    return next(found, "")


def is_cause(text: str) -> bool:
    """Whether a text is what `cause_of` has said."""
    return text in _CAUSES.values()


def handshake_problem(
    target: Address, certificates: Certificates | None, timeout_s: float
) -> str:
    """Why a server that accepts connections does not take ours; empty if it does.

    Args:
        target: The server.
        certificates: Of this process; None for one that talks without TLS.
        timeout_s: Longest wait for each of its answers.
    """
    try:
        if certificates is None:
            return _plain_problem(target, timeout_s)
        return _tls_problem(target, certificates, timeout_s)
    except OSError:
        return ""  # not of TLS


@dataclass(frozen=True, slots=True)
class ShownCertificate:
    """What a server has shown, and this process takes.

    Attributes:
        names: Names and addresses that it is for.
        ends_at_s: When it ends, in seconds since 1970.
    """

    names: tuple[str, ...]
    ends_at_s: float


def shown_certificate(
    target: Address, certificates: Certificates, timeout_s: float
) -> ShownCertificate | None:
    """The certificate of a server, None where it shows none that is taken."""
    try:
        with _connected(target, _context(certificates), timeout_s) as secure:
            found: Any = secure.getpeercert() or {}
    except OSError:
        return None
    ends_at_s = float(ssl.cert_time_to_seconds(found["notAfter"]))
    return ShownCertificate(_names_in(found), ends_at_s)


def _plain_problem(target: Address, timeout_s: float) -> str:
    with socket.create_connection((target.host, target.port), timeout_s) as plain:
        try:
            plain.sendall(_HELLO)
            if plain.recv(1):
                return ""
        except ConnectionError:
            pass
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # it is not told anything
    try:
        _connected(target, context, timeout_s).close()
    except ssl.SSLError:
        return ""
    return (
        "the server there speaks TLS, and this process does not: give --tls-ca, "
        f"--tls-cert and --tls-key ({TLS_CA_VARIABLE} and so on), as `psctl tls init` "
        "makes them"
    )


def _tls_problem(target: Address, certificates: Certificates, timeout_s: float) -> str:
    files, pem = certificates.files, certificates.current()
    context = _context(certificates)
    try:
        with _connected(target, context, timeout_s) as secure:
            secure.sendall(_HELLO)
            if secure.recv(1):
                return ""
    except ssl.SSLCertVerificationError as error:
        return _refused_text(error, target, certificates, timeout_s)
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return _NO_TLS
        return f"TLS fails there: {error.reason or error}"
    except ConnectionError:
        pass
    # TLS 1.3: a server looks at the client's certificate when the client is done.
    if pem.pair is None:
        return (
            "the server there takes only processes that show a certificate, and this "
            "one has none: give --tls-cert and --tls-key "
            f"({TLS_CERTIFICATE_VARIABLE} and so on)"
        )
    if certificates.has_ended:
        return (
            f"the certificate in {pem.ending} has ended on {date_text(pem.ends_at_s)}, "
            "and the server there refuses it: replace it, as `psctl tls renew` does"
        )
    return (
        f"the server there does not take the certificate in {files.certificate}: it "
        "must be of the authority that the server has as --tls-ca"
    )


def _refused_text(
    error: ssl.SSLCertVerificationError,
    target: Address,
    certificates: Certificates,
    timeout_s: float,
) -> str:
    """Why this process does not take the server's certificate."""
    if error.verify_code in _NAME_MISMATCHES:
        names = _names(target, certificates, timeout_s) or "other names"
        return (
            f"the certificate of the server there is for {names}, and not for "
            f"{target.host}: {_CURE_OF_NAME}"
        )
    said = error.verify_message
    return cause_of(said) or f"the certificate of the server there is refused: {said}"


def _names(target: Address, certificates: Certificates, timeout_s: float) -> str:
    """What the server's certificate is for, as one of ours has it."""
    context = _context(certificates)
    context.check_hostname = False
    with _connected(target, context, timeout_s) as secure:
        found: Any = secure.getpeercert() or {}
    return ", ".join(_names_in(found)[:8])


def _names_in(certificate: Any) -> tuple[str, ...]:  # noqa: ANN401, as ssl returns it
    return tuple(
        text
        for kind, text in certificate.get("subjectAltName", ())
        if kind in ("DNS", "IP Address")
    )


def _context(certificates: Certificates) -> ssl.SSLContext:
    files = certificates.files
    context = ssl.create_default_context(cafile=files.ca)
    # gRPC is not strict, and its judgement is the one in question.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.set_alpn_protocols(["h2"])
    if files.certificate is not None:
        context.load_cert_chain(files.certificate, files.key)
    return context


def _connected(
    target: Address, context: ssl.SSLContext, timeout_s: float
) -> ssl.SSLSocket:
    plain = socket.create_connection((target.host, target.port), timeout_s)
    try:
        return context.wrap_socket(plain, server_hostname=target.host)
    except BaseException:
        plain.close()
        raise
