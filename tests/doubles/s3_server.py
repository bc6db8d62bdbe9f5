"""An S3 server in this process, of one bucket, that fails as a test asks it to.

It has what checkpoints need of S3: objects, ranges, listings in pages, and
uploads in parts. Signatures are not checked.
"""

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Final
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

BUCKET: Final = "bucket"
PAGE_SIZE: Final = 1000


class Fault(Enum):
    """What happens to one request."""

    DELAYED = "is answered with 503, and has its effect when the server delivers"
    ANSWER_LOST = "has its effect, and is answered with 500"
    HANGS = "has its effect, and no answer while the server runs"
    CUT = "the connection is closed: without effect, or within an answer's body"
    TWICE = "arrives twice, and is answered as the second time"


@dataclass(frozen=True, slots=True)
class Request:
    """One request, by what it does.

    Attributes:
        kind: `PUT`, `GET`, `HEAD`, `DELETE`, `LIST`, or of an upload in parts `CREATE`,
            `PART`, `COMPLETE`, `ABORT`.
        key: The object, or the prefix of a listing.
        query: What follows the `?`.
        body: What was sent.
        range: First and last byte that are wanted, None for all.
    """

    kind: str
    key: str
    query: dict[str, str]
    body: bytes = b""
    range: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request is answered with."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


class S3Server:
    """The bucket and what is to go wrong.

    Attributes:
        url: For `endpoint_url`.
        objects: Contents by key.
        uploads: Parts of uploads that are neither complete nor aborted, by number.
        log: Kind and key of all requests, oldest first.
        page_size: How many keys a listing has at once.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.log: list[tuple[str, str]] = []
        self.page_size = PAGE_SIZE
        self._lock = threading.RLock()
        self._upload_count = 0
        self._faults: list[tuple[str, str, Fault]] = []
        self._delayed: list[Request] = []
        self._has_ended = threading.Event()
        self._http = _HttpServer(("127.0.0.1", 0), _Handler)
        self._http.s3 = self
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator["S3Server"]:
        """Serves until the end of the block."""
        thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}
        )
        thread.start()
        try:
            yield self
        finally:
            self._has_ended.set()
            self._http.shutdown()
            self._http.server_close()
            thread.join()

    def fail(self, kind: str, key: str, *faults: Fault) -> None:
        """Has the next requests of a kind for keys with this ending fail, one each."""
        with self._lock:
            self._faults += [(kind, key, fault) for fault in faults]

    def clear(self) -> None:
        """Empties the bucket, and forgets what was and was to happen."""
        with self._lock:
            for each in (self.objects, self.uploads):
                each.clear()
            for log in (self.log, self._faults, self._delayed):
                log.clear()
            self.page_size = PAGE_SIZE

    def heal(self) -> None:
        """Forgets the faults that no request has met."""
        with self._lock:
            self._faults.clear()

    def deliver(self) -> None:
        """Lets delayed requests have their effects."""
        with self._lock:
            for request in self._delayed:
                self._done(request)
            self._delayed.clear()

    def count(self, kind: str, key: str = "") -> int:
        """How many requests of a kind there were for keys with this ending."""
        with self._lock:
            return sum(each == kind and name.endswith(key) for each, name in self.log)

    def answer(self, request: Request) -> tuple[Answer | None, Fault | None]:
        """What a request is answered with, None for nothing at all."""
        with self._lock:
            self.log.append((request.kind, request.key))
            fault = self._fault_of(request)
            match fault:
                case None:
                    return self._done(request), fault
                case Fault.ANSWER_LOST:
                    self._done(request)
                    return _error(500, "InternalError"), fault
                case Fault.TWICE:
                    self._done(request)
                    return self._done(request), fault
                case Fault.DELAYED:
                    self._delayed.append(request)
                    return _error(503, "SlowDown"), fault
                case Fault.HANGS:
                    self._done(request)
                case Fault.CUT:
                    return (None if request.body else self._done(request)), fault
        self._has_ended.wait()
        return None, fault

    def _fault_of(self, request: Request) -> Fault | None:
        for index, (kind, key, fault) in enumerate(self._faults):
            if kind == request.kind and request.key.endswith(key):
                del self._faults[index]
                return fault
        return None

    def _done(self, request: Request) -> Answer:
        calls: dict[str, Callable[[Request], Answer]] = {
            "PUT": self._put,
            "GET": self._get,
            "HEAD": self._get,
            "DELETE": self._delete,
            "LIST": self._list,
            "CREATE": self._create,
            "PART": self._part,
            "COMPLETE": self._complete,
            "ABORT": self._abort,
        }
        return calls[request.kind](request)

    def _put(self, request: Request) -> Answer:
        self.objects[request.key] = request.body
        return Answer(200, headers=(("ETag", _etag(request.body)),))

    def _get(self, request: Request) -> Answer:
        data = self.objects.get(request.key)
        if data is None:
            return _error(404, "NoSuchKey")
        headers = (
            ("ETag", _etag(data)),
            ("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT"),
        )
        if request.range is None:
            return Answer(200, data, headers)
        first, last = request.range
        if first >= len(data):
            return _error(416, "InvalidRange")
        body = data[first : last + 1]
        place = f"bytes {first}-{first + len(body) - 1}/{len(data)}"
        return Answer(206, body, (*headers, ("Content-Range", place)))

    def _delete(self, request: Request) -> Answer:
        self.objects.pop(request.key, None)
        return Answer(204)

    def _list(self, request: Request) -> Answer:
        delimiter = request.query.get("delimiter", "")
        after = request.query.get("continuation-token", "")
        entries: dict[str, bytes | None] = {}
        for key, data in sorted(self.objects.items()):
            if not key.startswith(request.key):
                continue
            head, found, _ = key[len(request.key) :].partition(delimiter or "\0")
            if found:
                entries[request.key + head + delimiter] = None
            else:
                entries[key] = data
        names = [name for name in entries if name > after]
        page, rest = names[: self.page_size], names[self.page_size :]
        lines = []
        for name in page:
            contents = entries[name]
            shown = escape(quote(name))
            lines.append(
                f"<CommonPrefixes><Prefix>{shown}</Prefix></CommonPrefixes>"
                if contents is None
                else f"<Contents><Key>{shown}</Key><Size>{len(contents)}</Size>"
                "<LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
            )
        if rest:
            token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
            lines.append(token)
        lines.append(f"<IsTruncated>{'true' if rest else 'false'}</IsTruncated>")
        lines.append(f"<KeyCount>{len(page)}</KeyCount>")
        lines.append("<EncodingType>url</EncodingType>")
        return _xml("ListBucketResult", "".join(lines))

    def _create(self, request: Request) -> Answer:
        self._upload_count += 1
        upload = f"upload-{self._upload_count}"
        self.uploads[upload] = {}
        return _xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")

    def _part(self, request: Request) -> Answer:
        parts = self.uploads.get(request.query["uploadId"])
        if parts is None:
            return _error(404, "NoSuchUpload")
        parts[int(request.query["partNumber"])] = request.body
        return Answer(200, headers=(("ETag", _etag(request.body)),))

    def _complete(self, request: Request) -> Answer:
        parts = self.uploads.pop(request.query["uploadId"], None)
        if parts is None:
            return _error(404, "NoSuchUpload")
        wanted = [
            int(each.text or "")
            for each in ElementTree.fromstring(request.body).iter()
            if each.tag.endswith("PartNumber")
        ]
        self.objects[request.key] = b"".join(parts[number] for number in wanted)
        return _xml("CompleteMultipartUploadResult", "<ETag>all</ETag>")

    def _abort(self, request: Request) -> Answer:
        known = self.uploads.pop(request.query["uploadId"], None)
        return Answer(204) if known is not None else _error(404, "NoSuchUpload")


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    s3: S3Server

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Says nothing: clients whose requests hang or are cut go away."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _HttpServer

    _kinds: ClassVar[dict[tuple[str, str], str]] = {
        ("PUT", "partNumber"): "PART",
        ("POST", "uploads"): "CREATE",
        ("POST", "uploadId"): "COMPLETE",
        ("DELETE", "uploadId"): "ABORT",
        ("GET", "list-type"): "LIST",
    }

    def handle_any(self) -> None:
        """Answers one request of any method."""
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path.lstrip("/")).partition("/")
        query = {
            name: values[0]
            for name, values in parse_qs(url.query, keep_blank_values=True).items()
        }
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if bucket != BUCKET:
            self._send(_error(404, "NoSuchBucket"))
            return
        kind = next(
            (
                kind
                for (method, mark), kind in self._kinds.items()
                if method == self.command and mark in query
            ),
            self.command,
        )
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        request = Request(
            kind,
            query.get("prefix", "") if kind == "LIST" else key,
            query,
            body,
            (int(wanted[1]), int(wanted[2])) if wanted else None,
        )
        answer, fault = self.server.s3.answer(request)
        if answer is None:
            self.close_connection = True
        else:
            self._send(answer, is_cut=fault is Fault.CUT)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""

    def _send(self, answer: Answer, *, is_cut: bool = False) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            body = answer.body
            self.wfile.write(body[: len(body) // 2] if is_cut else body)
        self.close_connection = self.close_connection or is_cut


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _xml(name: str, inner: str) -> Answer:
    text = f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inner}</{name}>'
    return Answer(200, text.encode(), (("Content-Type", "application/xml"),))


def _error(status: int, code: str) -> Answer:
    inner = f"<Code>{code}</Code><Message>{code} of the test</Message>"
    answer = _xml("Error", inner)
    return Answer(status, answer.body, answer.headers)
