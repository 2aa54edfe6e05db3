"""The report in a browser: every section shown, nothing outside the screen, no letters on top of others, dark mode.

Without Chromium on this machine the sections are checked in the page's text alone.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from accelerate_poplar.report_html import SECTIONS, write_report
from tests.core.report_run import write_run
from tests.core.test_report_html import Page

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
TIMEOUT_S = 120

LOOK = """
<script>
addEventListener("load", () => {
  const box = element => element.getBoundingClientRect();
  const sections = {};
  for (const section of document.querySelectorAll("section")) {
    sections[section.id] = {height: box(section).height, width: box(section).width};
  }
  const covered = [];
  for (const picture of document.querySelectorAll("svg")) {
    const texts = [...picture.querySelectorAll("text")].filter(text => box(text).width > 0);
    for (let i = 0; i < texts.length; i++) for (let j = i + 1; j < texts.length; j++) {
      const a = box(texts[i]), b = box(texts[j]);
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 2 && high > 3) covered.push([texts[i].textContent, texts[j].textContent, picture.ariaLabel]);
    }
  }
  const small = [...document.querySelectorAll("svg text, td, p, figcaption")]
    .filter(element => element.closest("svg") ? box(element).height < 7 && box(element).width < 400
                                              : parseFloat(getComputedStyle(element).fontSize) < 12)
    .map(element => element.textContent);
  const style = getComputedStyle(document.body);
  const result = {
    width: innerWidth, wide: document.documentElement.scrollWidth, sections, covered, small,
    background: style.backgroundColor, ink: style.color,
    letters: getComputedStyle(document.querySelector("svg text")).fill,
  };
  const out = document.createElement("pre");
  out.id = "look";
  out.textContent = JSON.stringify(result);
  parent.document.body.append(out);
});
</script>
"""


def look(page: Path, *, width: int, dark: bool = False) -> dict[str, Any]:
    """What a person would see, in figures."""
    assert BROWSER is not None
    content = html.escape(page.read_text(encoding="utf-8").replace("</body>", LOOK + "</body>"))
    # In a frame, because a browser's window cannot be as narrow as a phone.
    frame = f'<!DOCTYPE html><body><iframe width="{width}" height="900" style="border: 0" srcdoc="{content}"></iframe>'
    watched = page.with_name(f"watched-{width}-{dark}.html")
    watched.write_text(frame, encoding="utf-8")
    command = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", "--dump-dom"),
        *(f"--user-data-dir={page.parent / 'browser'}", *(["--force-dark-mode"] if dark else [])),
        watched.as_uri(),
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
    found = re.search(r'<pre id="look">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None, dom[-2000:]
    result: dict[str, Any] = json.loads(html.unescape(found.group(1)))
    return result


def brightness(colour: str) -> float:
    return sum(float(part) for part in re.findall(r"[\d.]+", colour)[:3]) / 3


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    return write_report(folder)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, False), (390, True)], ids=["desk", "phone", "dark"])
def test_the_page_can_be_read(page: Path, width: int, dark: bool) -> None:
    if BROWSER is None:
        assert tuple(Page(page.read_text(encoding="utf-8")).sections) == SECTIONS
        return
    seen = look(page, width=width, dark=dark)
    assert seen["width"] == width
    assert seen["wide"] <= width
    assert tuple(seen["sections"]) == SECTIONS
    assert all(box["height"] > 50 and box["width"] > 0.8 * min(width, 1000) for box in seen["sections"].values())
    assert seen["covered"] == []
    assert seen["small"] == []
    assert (brightness(seen["background"]) < 60) is dark
    assert (brightness(seen["ink"]) > 180) is dark
    assert (brightness(seen["letters"]) > 180) is dark


def test_the_look_can_fail(page: Path) -> None:
    if BROWSER is None:
        return
    broken = page.with_name("broken.html")
    text = page.read_text(encoding="utf-8").replace("<main>", '<main><div style="width: 2000px">wide</div>')
    broken.write_text(text.replace("text-anchor: middle", "text-anchor: middle; font-size: 40px"), encoding="utf-8")
    seen = look(broken, width=390)
    assert seen["wide"] > 390
    assert seen["covered"]
