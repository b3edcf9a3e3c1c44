"""Metrics as text that Prometheus reads, and a small server for it. Imports prometheus_client; knows no job."""

from __future__ import annotations

import importlib
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from dsrun.errors import UsageError

from .job_metrics import Metric

#: For a client to send its question.
_PATIENCE_S = 10.0


def require_client() -> None:
    """Finds out whether the package that writes the text is there.

    Raises:
        UsageError: it is not installed.
    """
    try:
        importlib.import_module("prometheus_client")
    except ImportError as error:
        raise UsageError(
            f"metrics need the package prometheus_client, which is not installed ({error})",
            hint="pip install 'dsrun[metrics]'",
        ) from error


class _Registry:
    """Metrics as prometheus_client collects them.

    Args:
        metrics: Metrics to write.
    """

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Any]:
        """Returns a family for each metric."""
        from prometheus_client import metrics_core as core  # pyright: ignore[reportMissingImports]

        families: Any = {
            "gauge": core.GaugeMetricFamily,
            "counter": core.CounterMetricFamily,
            "info": core.InfoMetricFamily,
        }
        for metric in self._metrics:
            family = families[metric.kind](metric.name, metric.text)
            for labels, value in metric.rows:
                # A name may hold bytes that are no UTF-8; one of them would be the end of all answers.
                known = {label: text.encode(errors="replace").decode() for label, text in labels.items()}
                family.add_sample(metric.full_name, known, value)
            yield family


def metrics_text(metrics: Sequence[Metric], *, accept: str = "") -> tuple[bytes, str]:
    """Writes metrics in the format that a client accepts: OpenMetrics, or Prometheus' own text.

    Args:
        metrics: metrics to write.
        accept: header `Accept` of the client; empty for Prometheus' own text, which node_exporter reads.

    Returns:
        the text and its content type.
    """
    from prometheus_client.exposition import choose_encoder  # pyright: ignore[reportMissingImports]

    encode, content_type = choose_encoder(accept)
    return encode(_Registry(metrics)), content_type


class _Server(ThreadingMixIn, TCPServer):
    # A server that was stopped a moment ago leaves connections that would keep the port for a minute.
    allow_reuse_address = True
    daemon_threads = True


@contextmanager
def serving(host: str, port: int, metrics: Callable[[], Sequence[Metric]]) -> Generator[tuple[str, int], None, None]:
    """Answers questions over HTTP for the time of a `with`, on threads of its own.

    Args:
        host: name or address of this machine to listen on.
        port: port to listen on; 0 for any that is free.
        metrics: function that returns the metrics of the moment; it is called by other threads.

    Yields:
        address and port that it listens on.

    Raises:
        UsageError: there is no such address on this machine, or the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "dsrun", ""
        timeout = _PATIENCE_S

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                body, kind = metrics_text(metrics(), accept=self.headers.get("Accept", ""))
                self._answer(200, kind, body)
            elif path == "/":
                self._answer(200, "text/plain; charset=utf-8", b"metrics of dsrun's jobs are at /metrics\n")
            else:
                self._answer(404, "text/plain; charset=utf-8", b"there is nothing but /metrics\n")

        do_HEAD = do_GET

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing: a question every few seconds is no news."""

        def handle(self) -> None:
            try:
                super().handle()
            except (ConnectionError, TimeoutError):
                # Who has asked went away.
                self.close_connection = True

    family, address = _address(host, port)

    class Server(_Server):
        address_family = family

    try:
        server = Server(address, Handler)
    except (OSError, OverflowError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        hint = "`--port 0` takes any that is free; 9400 is that of NVIDIA's DCGM exporter too"
        raise UsageError(
            f"metrics cannot be served on {host} port {port}: {reason}",
            hint=hint
            if "in use" in reason
            else "`--host 127.0.0.1` is this machine for itself, `--host 0.0.0.0` for all",
        ) from error
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield server.server_address[0], server.server_address[1]  # pyright: ignore
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _address(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = str(error) if isinstance(error, UnicodeError) else (error.strerror or str(error)).lower()
        raise UsageError(
            f"`--host {host}`: there is no such host: {reason}",
            hint="an address of this machine, such as 127.0.0.1",
        ) from error
    family, _, _, _, address = found[0]
    return family, address
