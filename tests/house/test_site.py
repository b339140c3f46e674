"""The site that `make docs` builds: its links, and its behavior in a browser."""

import functools
import html
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
CHECK = r"""<!doctype html><title>running</title><body><script>
const pages = PAGES, found = {wide: [], dim: [], results: 0};
const frame = document.createElement("iframe");
frame.style = "width: 360px; height: 800px";
document.body.append(frame);
const load = (page) => new Promise((loaded) => { frame.onload = loaded; frame.src = page; });
const later = (ms) => new Promise((done) => setTimeout(done, ms));
const style = (element) => frame.contentWindow.getComputedStyle(element);
const rgba = (colour) => [...colour.match(/[\d.]+/g).map(Number), 1].slice(0, 4);
// Contrast as WCAG 2.2 defines it, of an element's text and what is behind it.
const linear = (value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
const luminance = (colour) =>
  [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => sum + weight * linear(rgba(colour)[i] / 255), 0);
const contrast = (element) => {
  let behind = element;
  while (behind && rgba(style(behind).backgroundColor)[3] < 0.5) behind = behind.parentElement;
  const both = [luminance(style(element).color), behind ? luminance(style(behind).backgroundColor) : 1];
  return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
};
(async () => {
  for (const page of pages) {
    await load(page);
    const root = frame.contentDocument.documentElement;
    if (root.scrollWidth > 360) found.wide.push(`${page}: ${root.scrollWidth}`);
    for (const theme of ["light", "dark"]) {
      frame.contentDocument.body.dataset.theme = theme;
      const kinds = new Set();
      for (const element of frame.contentDocument.querySelectorAll("article *")) {
        const kind = `${element.tagName}.${element.className}`;
        if (kinds.has(kind) || element.closest(".headerlink")) continue;
        if (![...element.childNodes].some((node) => node.nodeType == 3 && node.data.trim())) continue;
        kinds.add(kind);
        if (contrast(element) < 4.5) found.dim.push(`${page}, ${theme}, ${kind}: ${contrast(element).toFixed(2)}`);
      }
    }
  }
  await load("search.html?q=all_reduce");
  for (let i = 0; i < 100 && found.results == 0; i++) {
    await later(50);
    found.results = frame.contentDocument.querySelectorAll("#search-results li").length;
  }
  await load("index.html");
  frame.contentDocument.body.dataset.theme = "dark";
  found.dark = [frame.contentDocument.body, frame.contentDocument.querySelector("article p")].map(
    (element, i) => luminance(i == 0 ? style(element).backgroundColor : style(element).color));
  document.title = "found " + JSON.stringify(found);
})();
</script>"""


class Page(HTMLParser):
    """Link targets and anchors of a page."""

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


def test_every_link_has_an_existing_target(site: Path) -> None:
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
    """Serve the site, and a page that opens the other pages in sequence at the width of a telephone."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(site, folder, dirs_exist_ok=True)
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if path.name != "genindex.html")
    records = [page for page in pages if "decisions/" in page]
    # Every eighth decision record is sufficient, because the records have the same layout.
    chosen = [page for page in pages if page not in records or page in records[::8]]
    (folder / "check.html").write_text(CHECK.replace("PAGES", json.dumps(chosen)))

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Discard the log message."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def browse(address: str, folder: Path) -> str:
    """Return a page after its scripts have run. Fail if a script writes an error to the console."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        missing = "there is no chromium to show a page"
        pytest.fail(missing) if os.environ.get("ALLRANKS_TEST_ALL") == "1" else pytest.skip(missing)
    done = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
         f"--user-data-dir={folder}/profile", "--virtual-time-budget=600000", address],
        capture_output=True, text=True, timeout=110, check=True,
    )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if re.search(r"CONSOLE.*(error|uncaught|failed)", line, re.I)]
    assert not errors
    return done.stdout


def test_pages_are_readable_in_a_narrow_browser(served: str, tmp_path: Path) -> None:
    title = browse(f"{served}/check.html", tmp_path).partition("<title>")[2].partition("</title>")[0]
    assert title.startswith("found "), title
    found = json.loads(html.unescape(title.removeprefix("found ")))
    assert found["wide"] == [], "an element is wider than a phone screen"
    assert found["dim"] == [], "a text has too little contrast"
    assert found["results"] > 3, "the search finds too few results"
    background, text = found["dark"]
    assert background < 0.05 < 0.3 < text, "the dark mode has no dark colors"


def test_search_works_without_a_web_server(site: Path, tmp_path: Path) -> None:
    """The search works without a web server."""
    page = browse(f"{site.as_uri()}/search.html?q=all_reduce", tmp_path)
    results = page.partition('id="search-results"')[2]
    assert results.count("<li") > 3, page
