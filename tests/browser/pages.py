"""Serves a folder, opens its pages, and says what is wrong with them.

Every check returns sentences; a page without faults gives an empty list.
"""

import gzip
import mimetypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

TEXT = {".html", ".css", ".js", ".svg", ".json", ".csv", ".txt", ".inv", ".ttf", ".map"}


# ---- a server, which counts what it sends --------------------------------------------


class Site:
    """A folder as a static host shows it: compressed, with 404.html, under a prefix.

    Attributes:
        url: where the folder is served; ends with a slash.
        sent: bytes of every body sent so far, by path. Nothing is kept in a cache.
    """

    def __init__(self, folder: Path, prefix: str, port: int) -> None:
        self.folder, self.prefix = folder.resolve(), prefix
        self.host = f"127.0.0.1:{port}"
        self.url = f"http://{self.host}{prefix}"
        self.sent: dict[str, int] = {}
        self.bodies: dict[Path, bytes] = {}

    def file(self, path: str) -> Path | None:
        """The file that an address's path names; None if there is none."""
        if not path.startswith(self.prefix):
            return None
        file = (self.folder / unquote(path[len(self.prefix) :])).resolve()
        if file.is_dir():
            file = file / "index.html"
        inside = file.is_relative_to(self.folder)
        return file if inside and file.is_file() else None

    def body(self, file: Path) -> bytes:
        if file not in self.bodies:
            content = file.read_bytes()
            text = file.suffix in TEXT
            self.bodies[file] = gzip.compress(content) if text else content
        return self.bodies[file]


@contextmanager
def serve(folder: Path, prefix: str = "/") -> Iterator[Site]:
    """Serves a folder on this machine until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            file = site.file(path)
            self.send_response(200 if file else 404)
            file = file or site.file(f"{prefix}404.html")
            body = site.body(file) if file else b""
            kind = mimetypes.guess_type(file.name)[0] if file else "text/plain"
            self.send_header("Content-Type", kind or "application/octet-stream")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            if file and file.suffix in TEXT:
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            with suppress(ConnectionError):  # the browser has left the page
                self.wfile.write(body)
            site.sent[path] = site.sent.get(path, 0) + len(body)

        def log_message(self, *args) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    site = Site(folder, prefix, server.server_port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield site
    server.shutdown()
    server.server_close()
    thread.join()


# ---- a page of the browser -----------------------------------------------------------


class Visitor:
    """A page of the browser that remembers what it complains about and asks for.

    Attributes:
        page: Playwright's page.
        said: errors and warnings of the console since `open`.
        foreign: addresses on other hosts that were asked for since `open`.
        missing: addresses that the site did not have.
    """

    def __init__(self, context, site: Site) -> None:
        self.page, self.site = context.new_page(), site
        self.said: list[str] = []
        self.foreign: list[str] = []
        self.missing: list[str] = []
        self.page.on("console", self._listen)
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", self._watch)
        self.page.on("response", self._count)

    def _listen(self, message) -> None:
        if message.type in ("error", "warning"):
            self.said.append(f"{message.type}: {message.text}")

    def _watch(self, request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme in ("http", "https") and parts.netloc != self.site.host:
            self.foreign.append(request.url)

    def _count(self, response) -> None:
        if response.status >= 400:
            self.missing.append(response.url)

    def open(self, path: str, width: int = 1280) -> None:
        """Opens a page of the site, until everything that it asks for is there."""
        self.page.set_viewport_size({"width": width, "height": 900})
        for noted in (self.said, self.foreign, self.missing):
            noted.clear()
        self.page.goto(self.site.url + path, wait_until="load")
        self.page.evaluate(SETTLED)

    def theme(self, name: str) -> None:
        """Switches an open page to "light" or "dark", as its button does."""
        self.page.evaluate(THEME, name)

    def draw_all(self) -> None:
        """Loads the images that the page would only load when they are near."""
        self.page.evaluate(DRAW_ALL)

    def faults(self, check: str) -> list[str]:
        """What a check of `CHECKS` finds on the open page."""
        return self.page.evaluate(CHECKS[check])

    def noted(self) -> list[str]:
        """Complaints, requests to other hosts and missing files, since `open`."""
        return [
            *self.said,
            *(f"asks another host: {address}" for address in self.foreign),
            *(f"is not there: {address}" for address in self.missing),
        ]

    def accessibility(self, rules: str = "all") -> list[str]:
        """Serious and critical findings of axe-core, and content outside landmarks.

        Args:
            rules: "all", "contrast" alone, or "structure": all but contrast, which
                takes most of the time.
        """
        from axe_playwright_python.base import AXE_SCRIPT

        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE_SCRIPT)
        return self.page.evaluate(AXE, AXE_RULES[rules])

    def links(self) -> list[str]:
        """The addresses of all links, as the browser resolves them."""
        return self.page.evaluate("[...document.links].map(link => link.href)")


SETTLED = """async () => {
  await document.fonts.ready;
  if (window.MathJax?.startup) await MathJax.startup.promise;
  await new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)));
}"""

THEME = """async name => {
  document.documentElement.dataset.mode = name;
  document.documentElement.dataset.theme = name;
  if (!document.getElementById('still')) {
    const still = document.createElement('style');
    still.id = 'still';
    still.textContent = '* {transition: none !important; animation: none !important}';
    document.head.append(still);
  }
  await new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)));
}"""

DRAW_ALL = """async () => {
  const images = [...document.images];
  for (const image of images) image.loading = 'eager';
  await Promise.all(images.map(image => image.decode().catch(() => null)));
}"""

AXE_RULES = {
    "all": {},
    "contrast": {"runOnly": ["color-contrast"]},
    "structure": {"rules": {"color-contrast": {"enabled": False}}},
}
AXE = """async rules => {
  const {violations} = await axe.run(document,
    {resultTypes: ['violations'], preload: false, ...rules});
  return violations
    .filter(v => ['serious', 'critical'].includes(v.impact) || v.id === 'region')
    .map(v => `${v.id} (${v.impact}, ${v.nodes.length} times): ` +
      v.nodes.slice(0, 3).map(n => n.target.join(' ') + ' ' +
        (n.any[0]?.message ?? '')).join(' | '));
}"""

# What checks have in common: a name for an element, and whether it can be seen.
_NAME = """
  const name = e => (e.tagName.toLowerCase() + '.' + (e.getAttribute('class') ?? '') +
    ' ' + (e.getAttribute('src') ?? e.textContent.trim()).slice(0, 80)).trim();
  const seen = e => e.checkVisibility({visibilityProperty: true});
"""

# An element may be wider than the page where it, or what holds it, scrolls.
_WIDE = """
  const held = e => {
    for (let up = e; up && up !== document.body; up = up.parentElement)
      if (getComputedStyle(up).overflowX !== 'visible') return true;
    return false;
  };
  const root = document.documentElement, over = root.scrollWidth - root.clientWidth;
  const wide = [...document.body.querySelectorAll('main *, article *')].filter(e => {
    const box = e.getBoundingClientRect();
    return box.width > 1 && box.right > root.clientWidth + 1 && seen(e) && !held(e);
  }).map(e => `is wider than the page: ${name(e)}`);
  if (over > 0 && !wide.length)
    wide.push(`the page is ${over} px wider than its window`);
"""

CHECKS = {
    "squashed": f"""() => {{{_NAME}
      return [...document.images].filter(seen).flatMap(image => {{
        const style = getComputedStyle(image);
        const [l, r, t, b] = ['Left', 'Right', 'Top', 'Bottom']
          .map(side => parseFloat(style['padding' + side]));
        const w = image.clientWidth - l - r, h = image.clientHeight - t - b;
        if (!image.naturalWidth) return [`is not drawn: ${{name(image)}}`];
        const due = w * image.naturalHeight / image.naturalWidth;
        const fits = style.objectFit !== 'fill' || Math.abs(h - due) <= 1 + 0.01 * due;
        return fits ? [] : [`is squashed, ${{w}} × ${{h}}: ${{name(image)}}`];
      }});
    }}""",
    "too wide": f"() => {{{_NAME}{_WIDE} return wide.slice(0, 5); }}",
    "no alternative text": f"""() => {{{_NAME}
      return [...document.images]
        .filter(image => !image.alt.trim() && image.role !== 'presentation')
        .map(image => `has no alternative text: ${{name(image)}}`);
    }}""",
    "mathematics": """() => {
      const raw = [...document.querySelectorAll('.math')]
        .filter(e => !e.querySelector('mjx-container'));
      const wrong = [...document.querySelectorAll('mjx-merror, [data-mjx-error]')];
      const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
      const left = [];
      while (words.nextNode()) {
        const node = words.currentNode, text = node.textContent;
        if (/\\\\[([]|\\\\[a-z]{2,}|\\$\\$/.test(text) &&
            !node.parentElement.closest('pre, code, script, style, mjx-container'))
          left.push(node);
      }
      return [...raw, ...wrong, ...left]
        .map(e => `is not drawn as mathematics: ${e.textContent.trim().slice(0, 60)}`);
    }""",
    # On paper nothing scrolls and nothing unfolds.
    "cut on paper": f"""() => {{{_NAME}{_WIDE}
      const cut = [...document.querySelectorAll('article *')].filter(e =>
        e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 1 && seen(e) &&
        !e.closest('.math') &&  // MathJax hides a wider text there, for readers aloud
        ['auto', 'scroll', 'hidden', 'clip'].includes(getComputedStyle(e).overflowX));
      const folded = [...document.querySelectorAll('article details > *')]
        .filter(e => e.tagName !== 'SUMMARY' && !seen(e));
      return [...wide.slice(0, 5),
        ...cut.map(e => `is cut off: ${{name(e)}}`),
        ...folded.map(e => `stays folded: ${{name(e)}}`)];
    }}""",
}


# ---- links ---------------------------------------------------------------------------


class _Names(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {value for name, value in attrs if name in ("id", "name")}


def names(file: Path) -> set[str]:
    """The anchors of an HTML file."""
    parser = _Names()
    parser.feed(file.read_text())
    return parser.found


def dead_links(site: Site, links: list[str]) -> list[str]:
    """The links to a file or an anchor that the site does not have.

    Links to other hosts are not followed.
    """
    dead, anchors = [], {}
    for link in dict.fromkeys(links):
        address, anchor = urldefrag(link)
        if urlsplit(link).netloc != site.host:
            continue
        file = site.file(urlsplit(address).path)
        if file is None:
            dead.append(f"leads nowhere: {link}")
        elif anchor and file.suffix == ".html":
            anchors[file] = anchors.get(file) or names(file)
            if unquote(anchor) not in anchors[file]:
                dead.append(f"has no such anchor: {link}")
    return dead
