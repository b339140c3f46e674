"""The site that `make docs` makes: its links, and how it behaves in a browser."""

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

SITE = Path(__file__).parents[2] / "build/site"
CHECK = """<!doctype html><title>running</title><body><script>
const pages = PAGES, found = {wide: [], errors: [], results: 0};
const frame = document.createElement("iframe");
frame.style = "width: 360px; height: 800px";
document.body.append(frame);
const load = (page) => new Promise((loaded) => { frame.onload = loaded; frame.src = page; });
const later = (ms) => new Promise((done) => setTimeout(done, ms));
(async () => {
  for (const page of pages) {
    await load(page);
    const root = frame.contentDocument.documentElement;
    if (root.scrollWidth > 360) found.wide.push(`${page}: ${root.scrollWidth}`);
  }
  await load("search.html?q=all_reduce");
  for (let i = 0; i < 100 && found.results == 0; i++) {
    await later(50);
    found.results = frame.contentDocument.querySelectorAll("#search-results li").length;
  }
  const style = (element) => frame.contentWindow.getComputedStyle(element);
  const rgb = (colour) => colour.match(/\\d+/g).slice(0, 3).map(Number);
  await load("index.html");
  frame.contentDocument.body.dataset.theme = "dark";
  const text = frame.contentDocument.querySelector("article p");
  found.dark = [rgb(style(frame.contentDocument.body).backgroundColor), rgb(style(text).color)];
  document.title = "found " + JSON.stringify(found);
})();
</script>"""


class Page(HTMLParser):
    """What a page links to, and the names of its places."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.names: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.links.add(value)
            elif value and name in ("id", "name"):
                self.names.add(value)


@pytest.fixture(scope="module")
def site() -> Path:
    if not (SITE / "index.html").exists():
        missing = "there is no build/site: make docs"
        pytest.fail(missing) if os.environ.get("ALLRANKS_TEST_ALL") == "1" else pytest.skip(missing)
    return SITE


def test_every_link_leads_somewhere(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 100
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                broken.append(f"{path.relative_to(site)}: {link}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].names:
                broken.append(f"{path.relative_to(site)}: {link} has no such place")
    assert not broken


@pytest.fixture(scope="module")
def served(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The site and a page that opens the others, one after the other, as on a telephone."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(site, folder, dirs_exist_ok=True)
    skipped = {"genindex.html", "search.html"}
    pages = [str(path.relative_to(site)) for path in site.rglob("*.html") if path.name not in skipped]
    chosen = [page for page in pages if "decisions/" not in page]
    (folder / "check.html").write_text(CHECK.replace("PAGES", json.dumps(sorted(chosen))))

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Prints nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_in_a_browser(served: str, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        missing = "there is no chromium to show a page"
        pytest.fail(missing) if os.environ.get("ALLRANKS_TEST_ALL") == "1" else pytest.skip(missing)
    done = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
         f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=600000", f"{served}/check.html"],
        capture_output=True, text=True, timeout=110, check=True,
    )  # fmt: skip
    title = done.stdout.partition("<title>")[2].partition("</title>")[0]
    assert title.startswith("found "), title
    found = json.loads(title.removeprefix("found ").replace("&gt;", ">"))
    assert found["wide"] == [], "wider than a telephone"
    assert found["results"] > 3, "the search finds nothing"
    background, text = (sum(colour) / 3 for colour in found["dark"])
    assert background < 60 < 150 < text, "no dark colours"
    errors = [line for line in done.stderr.splitlines() if re.search(r"CONSOLE.*(error|uncaught|failed)", line, re.I)]
    assert not errors
