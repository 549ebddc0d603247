"""Look at the built site in a headless Chromium, as a reader does. Standard library only.

    mkdocs build --strict && python docs/browser.py site [--screenshots FOLDER]

Every page is opened 1400 and 390 pixels wide, in light and dark. Errors: a message of the browser's console; a page
that scrolls sideways; at 1400, a table or a block of code that is wider than its place; at 390, one that is wider and
has no scroll bar of its own. On one page, the search must find something. Without a Chromium nothing is checked, and
one line says so.
"""

import argparse
import base64
import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = 1400, 390
SCHEMES = {"dark": 0, "light": 1}  # as --blink-settings numbers them
CUT = """[...document.querySelectorAll(".md-content table, .md-content pre, .md-content img")].filter(e => {
    const right = e.getBoundingClientRect().right;
    for (let place = e.querySelector(":scope > code") || e; place; place = place.parentElement) {
        const overflow = getComputedStyle(place).overflowX;
        const beyond = e.contains(place) || right > place.getBoundingClientRect().right + 1;
        if (overflow == "visible" || place.scrollWidth <= place.clientWidth + 1 || !beyond) continue;
        return !(%s && ["auto", "scroll"].includes(overflow));
    }
    return right > innerWidth + 1;
}).map(e => e.innerText.slice(0, 60) || e.src)"""
SEARCH = """(async () => {
    const field = document.querySelector(".md-search__input");
    field.focus(); field.value = %s; field.dispatchEvent(new Event("input", {bubbles: true}));
    field.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
    for (let i = 0; i < 100; i++) {
        const found = document.querySelectorAll(".md-search-result__item").length;
        if (found) return found;
        await new Promise(r => setTimeout(r, 100));
    }
    return 0;
})()"""


class Browser:
    """A Chromium whose reader prefers `scheme`, driven through two pipes (--remote-debugging-pipe): JSON messages that
    end with a zero byte.

    One browser is one reader: an emulated preference that changes between pages reaches some of them late.
    """

    def __init__(self, program, profile, scheme):
        (theirs, to), (back, ours) = os.pipe(), os.pipe()

        def as_3_and_4():
            first, second = os.dup(theirs), os.dup(ours)  # neither may be overwritten before it is copied
            os.dup2(first, 3), os.dup2(second, 4)

        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        options += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--remote-debugging-pipe"]
        self.scheme = scheme
        self.process = subprocess.Popen(
            [program, *options, "about:blank"],
            close_fds=False, preexec_fn=as_3_and_4, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs), os.close(ours)
        self.to, self.back = os.fdopen(to, "wb", 0), os.fdopen(back, "rb")
        self.number, self.session, self.rest = 0, None, b""
        self.loaded, self.errors = False, []
        target = next(t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def end(self):
        self.process.kill()
        self.process.wait()

    def __call__(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.to.write(json.dumps(message).encode() + b"\0")
        while (answer := self.read()).get("id") != self.number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def read(self):
        while b"\0" not in self.rest:
            part = self.back.read1(1 << 20)
            if not part:
                raise RuntimeError("the browser ended")
            self.rest += part
        line, self.rest = self.rest.split(b"\0", 1)
        event = json.loads(line)
        method, what = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(what["exceptionDetails"]["text"])
        elif method == "Log.entryAdded" and what["entry"]["level"] == "error":
            self.errors.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning"):
            self.errors.append(" ".join(str(a.get("value")) for a in what["args"]))
        return event

    def open(self, url, width):
        self("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
        self.loaded, self.errors = False, []
        self("Page.navigate", url=url)
        while not self.loaded:
            self.read()

    def evaluate(self, code):
        result = self("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{code[:60]}: {result['exceptionDetails']}")
        return result["result"].get("value")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def look(browser, url, width, picture):
    """What is wrong with one page."""
    browser.open(url, width)
    wrong = [f"console: {error}" for error in browser.errors]
    shown = browser.evaluate("document.body.dataset.mdColorScheme")
    if shown != {"light": "default", "dark": "slate"}[browser.scheme]:
        wrong.append(f"the colours are those of {shown!r}")
    if browser.evaluate("document.documentElement.scrollWidth > innerWidth + 1"):
        wrong.append("the page scrolls sideways")
    wrong += [f"cut: {text!r}" for text in browser.evaluate(CUT % json.dumps(width < 500))]
    if picture:
        height = min(12000, browser.evaluate("document.documentElement.scrollHeight"))
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = browser("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        picture.write_bytes(base64.b64decode(shot["data"]))
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("--screenshots", type=Path)
    parser.add_argument("--pages", nargs="*", help="only these, such as index performance")
    arguments = parser.parse_args()
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        return print("SKIPPED: no Chromium here; the site was NOT looked at in a browser", file=sys.stderr)
    handler = functools.partial(Quiet, directory=arguments.site)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    site = f"http://127.0.0.1:{server.server_port}"
    pages = sorted(p.relative_to(arguments.site) for p in arguments.site.rglob("*.html") if p.name != "404.html")
    if arguments.screenshots:
        arguments.screenshots.mkdir(parents=True, exist_ok=True)
    wrong = []
    for scheme in SCHEMES:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            browser = Browser(program, profile, scheme)
            try:
                for page in pages:
                    name = page.parent.name or "index"
                    if arguments.pages and name not in arguments.pages:
                        continue
                    for width in WIDTHS:
                        folder = arguments.screenshots
                        picture = folder / f"{name}-{width}-{scheme}.png" if folder else None
                        found = look(browser, f"{site}/{page.as_posix()}", width, picture)
                        wrong += [f"{page}, {width} px, {scheme}: {what}" for what in found]
                browser.open(f"{site}/index.html", 1400)
                if not browser.evaluate(SEARCH % json.dumps("swap_experts")):
                    wrong.append("the search finds no swap_experts")
            finally:
                browser.end()
    print(*wrong, f"{len(pages)} pages, {len(wrong)} faults", sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
