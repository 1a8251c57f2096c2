"""The site that ``make site`` has built: its pages, and the search in a browser."""

from __future__ import annotations

import functools
import http.server
import json
import os
import threading
from importlib import import_module
from inspect import isclass, isfunction
from pathlib import Path

import pytest

from tests.browser import CHROMIUM, chromium
from tests.docs.test_pages import PUBLIC_MODULES

pytestmark = pytest.mark.skipif("SITE" not in os.environ, reason="make site runs these tests")


@pytest.fixture
def site() -> Path:
    return Path(os.environ["SITE"]).resolve()


def text_of(site, page):
    return (site / page / "index.html").read_text("utf-8")


def test_the_search_index_has_the_api(site):
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    found = {entry["location"] for entry in index["docs"]}
    assert "api/tune/#triton_dist.tune.autotune" in found
    assert "api/ops/#triton_dist.kernels.nvidia.ag_gemm" in found
    shown = {place.rpartition(".")[2] for place in found if place.startswith("api/")}
    modules = [import_module(module) for module in PUBLIC_MODULES]
    public = [(name, getattr(module, name)) for module in modules for name in module.__all__]
    public = [(name, value) for name, value in public if isfunction(value) or isclass(value)]
    missing = [name for name, value in public if not {name, value.__name__} & shown]
    assert not missing, "add them to docs/api"


def test_code_blocks_are_blocks_and_links_to_sources_lead_to_pages(site):
    raw = [page for page in site.rglob("index.html") if "```" in page.read_text("utf-8")]
    assert [page for page in raw if "source" not in page.parts] == []
    assert 'href="../../source/examples/wait_for_a_peer.py/"' in text_of(
        site, "how-to/wait-for-a-peer"
    )
    assert '<span class="filename">Output</span>' in text_of(site, "reference/autotune")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_searches_and_shows_pages(site, tmp_path):
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=site)
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        chromium(tmp_path) as page,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        page.open(address)
        tabs = page.run(
            "[...document.querySelectorAll('.md-tabs__link')].map(e => e.innerText.trim())"
        )
        assert tabs[:3] == ["Home", "Tutorials", "How-to guides"]
        # Results of the search, which runs in a worker of the page.
        page.run(
            "const query = document.querySelector('[data-md-component=search-query]');"
            "document.querySelector('#__search').click(); query.focus(); query.value = 'autotune';"
            "query.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}))"
        )
        links = "[...document.querySelectorAll('.md-search-result__link')].map(e => e.href)"
        found = page.until(f"{links}.length && {links}")
        assert any(link.startswith(f"{address}reference/autotune/") for link in found)
        for name in ("tutorials/1-tune-a-function/", "api/tune/"):
            page.open(address + name)
            colours = page.run(
                "[...new Set([...document.querySelectorAll('pre code span')]"
                ".map(e => getComputedStyle(e).color))].length"
            )
            assert colours > 3, "code blocks are highlighted"
            page.call("Emulation.setDeviceMetricsOverride", width=390, height=844,
                      deviceScaleFactor=1, mobile=True)  # fmt: skip
            assert page.run("document.documentElement.scrollWidth") == 390, "a phone's width"
            page.call("Emulation.clearDeviceMetricsOverride")
        server.shutdown()
