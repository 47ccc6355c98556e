"""An S3-speaking server for tests, in a process of its own: prints its port, then serves until it is killed.

It answers one request at a time: only so are moto's conditional puts as atomic as those of S3. Three access keys are
special, which moto alone would take like any other: `READONLY` may not write; `WRONG` is answered as S3 answers a wrong
signature, with everything that it was sent; of `LOSSY` every other conditional put is done, but answered by an error,
and of `LOSSY-BEATS` every other put on an ETag.
"""

import sys
from itertools import cycle

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Request, Response

_application = DomainDispatcherApplication(create_backend_app)
_turns = cycle([True, False])


class _QuietHandler(WSGIRequestHandler):
    def log(self, *_: object) -> None:
        pass


def _refuse(code: str, detail: str = "") -> Response:
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{detail}</Message></Error>'
    return Response(body, 403, content_type="application/xml")


def _serve(environ, start_response):
    request = Request(environ)
    credentials = request.headers.get("Authorization", "")
    if "Credential=WRONG" in credentials:
        return _refuse("SignatureDoesNotMatch", str(dict(request.headers)))(environ, start_response)
    if "Credential=READONLY" in credentials and request.method not in ("GET", "HEAD"):
        return _refuse("AccessDenied")(environ, start_response)
    creates = request.if_none_match and "Credential=LOSSY-BEATS" not in credentials
    if "Credential=LOSSY" in credentials and (request.if_match or creates) and next(_turns):
        Response.from_app(_application, environ)
        return Response(status=500)(environ, start_response)
    return _application(environ, start_response)


if __name__ == "__main__":
    server = make_server("127.0.0.1", 0, _serve, threaded=False, request_handler=_QuietHandler)
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    server.serve_forever()
