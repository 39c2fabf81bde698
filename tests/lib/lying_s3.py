"""A small S3 that can be told to lie: an object store in memory, and what a broken or hostile one answers instead.

`lie` names what is said in place of the truth to requests of one kind; everything else is served as it should be. Each
lie is bounded: what has no end here ends after `ENDLESS_BYTES`.
"""

import re
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape, unescape

ENDLESS_BYTES = 1 << 30
PIECE = b"x" * (1 << 16)
# What a 64-bit length can say at most.
FAR = (1 << 63) - 1
NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


def listing(entries, more="", truncated=False):
    contents = "".join(
        f"<Contents><Key>{key}</Key><LastModified>{when}</LastModified><ETag>&quot;e&quot;</ETag>"
        f"<Size>{size}</Size></Contents>"
        for key, when, size in entries
    )
    token = "<NextContinuationToken>t</NextContinuationToken>" if truncated else ""
    flag = str(truncated).lower()
    return (
        f'<?xml version="1.0"?><ListBucketResult {NAMESPACE}><IsTruncated>{flag}</IsTruncated>'
        f"{contents}{token}{more}</ListBucketResult>"
    ).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30

    def log_message(self, *_):
        pass

    @property
    def store(self):
        return self.server.store

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def key(self):
        path = urllib.parse.urlsplit(self.path)
        return urllib.parse.unquote(path.path).lstrip("/"), dict(urllib.parse.parse_qsl(path.query))

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def raw(self, head, pieces=()):
        """Something of which the library for servers would make something better."""
        self.close_connection = True
        self.wfile.write(head)
        for piece in pieces:
            self.wfile.write(piece)

    def endless(self, head, chunked):
        """A body that goes on as long as anybody takes it."""
        sent = 0
        self.close_connection = True
        self.wfile.write(head)
        while sent < ENDLESS_BYTES:
            text = b"%x\r\n%s\r\n" % (len(PIECE), PIECE) if chunked else PIECE
            self.wfile.write(text)
            sent += len(PIECE)
            self.store.taken = max(self.store.taken, sent)

    def do_PUT(self):
        name, _ = self.key()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self.lies("put", name=name, body=body):
            self.put(name, body)

    def put(self, name, body):
        with self.store.lock:
            if self.headers.get("If-None-Match") == "*" and name in self.store.objects:
                self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                return
            self.store.objects[name] = (body, time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime()))
        self.answer(200, ETag='"e"')

    def do_POST(self):
        """Several are deleted at once."""
        bucket, _ = self.key()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        names = [unescape(name) for name in re.findall("<Key>(.*?)</Key>", body)]
        if not self.lies("delete", bucket=bucket, names=names):
            self.delete(bucket, names)

    def delete(self, bucket, names):
        with self.store.lock:
            for name in names:
                self.store.objects.pop(f"{bucket.rstrip('/')}/{name}", None)
        done = "".join(f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in names)
        self.answer(200, f'<?xml version="1.0"?><DeleteResult {NAMESPACE}>{done}</DeleteResult>'.encode())

    def do_GET(self):
        name, query = self.key()
        if "list-type" in query:
            if not self.lies("list"):
                self.list(query)
            return
        with self.store.lock:
            found = self.store.objects.get(name)
        if found is None:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        body, _ = found
        first, last = 0, len(body) - 1
        if asked := self.headers.get("Range"):
            first, last = (int(end) for end in asked.removeprefix("bytes=").split("-"))
            if first >= len(body):
                self.answer(416, b"<Error><Code>InvalidRange</Code></Error>")
                return
            last = min(last, len(body) - 1)
        part = body[first : last + 1]
        if not self.lies("get", part=part, first=first, last=last, whole=len(body)):
            said = f"bytes {first}-{last}/{len(body)}"
            self.answer(206 if asked else 200, part, Content_Range=said, ETag='"e"', Last_Modified=DATE)

    def list(self, query):
        whole = f"{self.key()[0].rstrip('/')}/"
        prefix, after = query.get("prefix", ""), query.get("start-after", "")
        most = int(query.get("max-keys", 1000))
        with self.store.lock:
            names = sorted(
                (name[len(whole) :], *what) for name, what in self.store.objects.items()
            )
        names = [one for one in names if one[0].startswith(prefix) and one[0] > after]
        page = [(escape(name), when, len(body)) for name, body, when in names[:most]]
        self.answer(200, listing(page, truncated=len(names) > most))

    def lies(self, kind, **about):
        """Whether the present lie is about this kind of request; then it is told."""
        with self.store.lock:
            of, how = self.store.lie or (None, None)
            if of != kind:
                return False
            self.store.told += 1
        how(self, **about)
        return True


DATE = "Tue, 24 Nov 2026 08:00:00 GMT"
OK = b"HTTP/1.1 200 OK\r\n"
END = b"\r\n"


def partial(about, length=None, said=None):
    """The head of an answer to a get of a range."""
    said = said or f"bytes {about['first']}-{about['last']}/{about['whole']}"
    head = f"HTTP/1.1 206 Partial Content\r\nETag: \"e\"\r\nLast-Modified: {DATE}\r\nContent-Range: {said}\r\n"
    if length is not None:
        head += f"Content-Length: {length}\r\n\r\n"
    return head.encode()


def huge_length(handler, head=OK, **_):
    """A length that nobody has memory for, and two pieces."""
    handler.raw(head + b"Content-Length: %d\r\n\r\n" % FAR, [PIECE])
    time.sleep(0.2)
    handler.wfile.write(PIECE)


def get_wrong_range(handler, said, **about):
    handler.raw(partial(about, len(about["part"]), said), [about["part"]])


def page(entries, **more):
    return lambda handler, **_: handler.answer(200, listing(entries, **more))


NOW = "2026-11-24T08:00:00.000Z"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
ERROR = b"HTTP/1.1 500 Internal Server Error\r\n"

# What each says, by the kind of request.
LIES = {
    "get": {
        "a length beyond all memory": lambda h, **about: huge_length(h, partial(about), **about),
        "a body without an end": lambda h, **about: h.endless(partial(about) + CHUNKED, chunked=True),
        "an error without an end": lambda h, **about: h.endless(ERROR + CHUNKED, chunked=True),
        "an error of a length beyond all memory": lambda h, **about: huge_length(h, ERROR),
        "a body that is cut short": lambda h, **about: h.raw(
            partial(about, len(about["part"])), [about["part"][:-1]]),
        "nothing of a body": lambda h, **about: h.raw(partial(about, 0)),
        "one byte more": lambda h, **about: h.raw(
            partial(about, len(about["part"]) + 1), [about["part"] + b"x"]),
        "another range": lambda h, **about: get_wrong_range(h, "bytes 7-9/10", **about),
        "a range to the end of numbers": lambda h, **about: get_wrong_range(
            h, "bytes 0-18446744073709551615/18446744073709551615", **about),
        "a range that is none": lambda h, **about: get_wrong_range(h, "bytes -/*", **about),
        "a range backwards": lambda h, **about: get_wrong_range(h, "bytes 9-3/10", **about),
        "all of it": lambda h, **about: h.answer(200, about["part"] * 2, ETag='"e"', Last_Modified=DATE),
        "other bytes": lambda h, **about: h.raw(
            partial(about, len(about["part"])), [bytes(byte ^ 0xFF for byte in about["part"])]),
        "zeroes": lambda h, **about: h.raw(
            partial(about, len(about["part"])), [bytes(len(about["part"]))]),
        "headers that are no text": lambda h, **about: h.raw(
            b"HTTP/1.1 206 \xff\xfe\r\nETag: \xff\r\nContent-Range: \xff\r\nLast-Modified: \xff\r\n\r\n"),
        "headers without an end": lambda h, **about: h.endless(b"HTTP/1.1 206 OK\r\nX: ", chunked=False),
        "no HTTP": lambda h, **about: h.raw(bytes(range(256)) * 8),
        "nothing": lambda h, **about: h.raw(b""),
    },
    "list": {
        "a length beyond all memory": huge_length,
        "a body without an end": lambda h, **_: h.endless(OK + CHUNKED, chunked=True),
        "no XML": lambda h, **_: h.answer(200, b"\xff\x00<<<>&;" * 100),
        "half of XML": lambda h, **_: h.answer(200, listing([("a", NOW, 1)])[:-40]),
        "other XML": lambda h, **_: h.answer(200, b"<?xml version='1.0'?><Other><a/></Other>"),
        "nested XML": lambda h, **_: h.answer(
            200, listing([], more="<a>" * 300_000 + "</a>" * 300_000)),
        "entities": lambda h, **_: h.answer(
            200, b'<!DOCTYPE a [<!ENTITY b "' + b"b" * 9999 + b'">]>' + listing([("&b;" * 999, NOW, 1)])),
        "sizes beyond numbers": page([("p/data/1", NOW, "1" * 40), ("p/data/2", NOW, -1)]),
        "the largest sizes": lambda h, **_: h.answer(200, listing(
            [(f"{h.store.prefix}/{kind}/{number:020}", NOW, (1 << 64) - 1)
             for kind in ("data", "map", "manifest") for number in (0, 1, (1 << 64) - 1)])),
        "dates beyond time": page([("p/data/1", "+262143-12-31T23:59:59Z", 1), ("a", "-262144-01-01T00:00:00Z", 1)]),
        "no date": page([("p/data/1", "yesterday", 1)]),
        "names that are none": lambda h, **_: h.answer(200, listing(
            [(f"{h.store.prefix}/{name}", NOW, 1)
             for name in ("../../x", "data/", "data/..", "manifest/\u00e4", "manifest/-1", "data/" + "9" * 40, "")])),
        "names without an end": page([("n" * (2 << 20), NOW, 1)]),
        "the same again": lambda h, **_: h.answer(200, listing([], truncated=True)),
        "more names than were asked for": lambda h, **_: h.answer(200, listing(
            [(f"{h.store.prefix}/other/{number:020}", NOW, 1) for number in range(20_000)], truncated=True)),
    },
    "put": {
        "an error without an end": lambda h, **_: h.endless(ERROR + CHUNKED, chunked=True),
        "an error of a length beyond all memory": lambda h, **_: huge_length(h, ERROR),
        "success without an end": lambda h, **_: h.endless(OK + b'ETag: "e"\r\n' + CHUNKED, chunked=True),
        "a redirect to itself": lambda h, **_: h.answer(307, Location=h.path),
        "a status that is none": lambda h, **_: h.raw(b"HTTP/1.1 999 \r\nContent-Length: 0\r\n\r\n"),
        "that it exists": lambda h, **_: h.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>"),
    },
    "delete": {
        "an error without an end": lambda h, **_: h.endless(ERROR + CHUNKED, chunked=True),
        "success without an end": lambda h, **_: h.endless(OK + CHUNKED, chunked=True),
        "a length beyond all memory": huge_length,
        "no XML": lambda h, **_: h.answer(200, b"<<<\xff"),
        "another name": lambda h, **_: h.answer(
            200, f"<DeleteResult {NAMESPACE}><Deleted><Key>x</Key></Deleted></DeleteResult>".encode()),
    },
}


class LyingS3:
    """The server, on loopback; a context manager."""

    bucket = "bucket"
    prefix = "volume"

    def __init__(self):
        self.objects = {}
        self.lock = threading.Lock()
        self.lie = None
        # Requests that were answered with a lie, and the most bytes of one that somebody took.
        self.told = 0
        self.taken = 0
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.store = self

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def tell(self, kind, what):
        """Lie from now on, or with `None` no more."""
        with self.lock:
            self.lie = (kind, LIES[kind][what]) if what else None
            self.told = self.taken = 0

    def url(self, credentials):
        host, port = self.server.server_address
        return (
            f"s3://{self.bucket}/{self.prefix}?endpoint=http://{host}:{port}&credentials={credentials}"
            f"&timeout_s=5&retry_s=2"
        )
