#!/usr/bin/env python3
"""Opens pages (`report.html`, or a plot's SVG) in headless Chromium and looks for what is wrong with them.

usage: check_report.py [--shots DIR] PAGE...
       (pip install playwright; then `playwright install chromium`, or a Chromium of the system in $PATH or $CHROMIUM)

A page must load without a word on the console and without asking for anything but itself, by day and by night, on a wide and
on a narrow window, without being wider than the window. Its curves must be drawn, inside their frame, in more than one colour;
no label of theirs may lie on another one or stick out. `--shots DIR` keeps a picture of each view.
"""

import argparse
import os
import pathlib
import shutil
import sys

from playwright.sync_api import sync_playwright

VIEWS = [(1000, 900, "light"), (1000, 900, "dark"), (390, 800, "light")]

# What a view shows: the curves, in pixels of the window.
LOOK = """() => {
    const svg = document.querySelector("svg.curves");
    if (!svg) return null;
    const box = (e) => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
    const painted = (e) => getComputedStyle(e).stroke + getComputedStyle(e).fill;
    return {
        frame: box(svg),
        lines: [...svg.querySelectorAll("polyline")].map((e) => [box(e), painted(e)]),
        texts: [...svg.querySelectorAll("text")].map((e) => [e.textContent.trim(), box(e)]),
        paper: getComputedStyle(svg.querySelector("rect")).fill,
        ink: getComputedStyle(svg.querySelector("text")).fill,
        page: [document.documentElement.scrollWidth, window.innerWidth],
    };
}"""


def faults_of_curves(seen, scheme):
    """What is wrong with the curves."""
    left, top, right, bottom = seen["frame"]
    inside = lambda b: b[0] >= left - 1 and b[1] >= top - 1 and b[2] <= right + 1 and b[3] <= bottom + 1
    for text, box in seen["texts"]:
        if not inside(box):
            yield f"`{text}` sticks out of the picture"
    for i, (text, a) in enumerate(seen["texts"]):
        for other, b in seen["texts"][i + 1 :]:
            # Letters don't fill their boxes: an overlap of a pixel or two can't be seen.
            wide, high = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
            if wide > 1 and high > 4:
                yield f"`{text}` lies on `{other}`"
    if not all(inside(box) for box, _ in seen["lines"]):
        yield "a line sticks out of the picture"
    tall = [paint for box, paint in seen["lines"] if box[3] - box[1] > 20]
    if not tall:
        yield "no curve is drawn"
    if len({paint for _, paint in seen["lines"]}) < 3:
        yield "all lines have one colour"
    brightness = lambda color: sum(int(part) for part in color.strip("rgb()").split(","))
    if (brightness(seen["paper"]) > brightness(seen["ink"])) != (scheme == "light"):
        yield f"paper {seen['paper']} and letters {seen['ink']} in {scheme} mode"


def check(browser, path, shots):
    """All that is wrong with a page."""
    faults = []
    for width, height, scheme in VIEWS:
        view = f"{width} px, {scheme}"
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        asked = []
        page.on("console", lambda message: faults.append(f"{view}: console: {message.text}"))
        page.on("pageerror", lambda error: faults.append(f"{view}: error: {error}"))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.resolve().as_uri())
        page.wait_for_load_state("networkidle")
        others = [url for url in asked if not url.startswith("data:") and url != path.resolve().as_uri()]
        faults += [f"{view}: asked for {url}" for url in others]
        seen = page.evaluate(LOOK)
        if seen is None:
            faults.append(f"{view}: there are no curves")
        else:
            faults += [f"{view}: {fault}" for fault in faults_of_curves(seen, scheme)] if width > 600 else []
            if path.suffix == ".html" and seen["page"][0] > seen["page"][1]:
                faults.append(f"{view}: the page is {seen['page'][0]} px wide")
        if shots:
            shots.mkdir(parents=True, exist_ok=True)
            name = f"{path.resolve().parent.name}-{path.stem}-{width}-{scheme}.png"
            page.screenshot(path=shots / name, full_page=path.suffix == ".html")
        page.close()
    return faults


parser = argparse.ArgumentParser(usage="%(prog)s [--shots DIR] PAGE...")
parser.add_argument("pages", nargs="+", type=pathlib.Path)
parser.add_argument("--shots", type=pathlib.Path)
arguments = parser.parse_args()
installed = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
wrong = 0
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox"] if os.geteuid() == 0 else [])
    for path in arguments.pages:
        faults = check(browser, path, arguments.shots)
        wrong += bool(faults)
        print(f"{path}: {'as it should be' if not faults else ''}")
        for fault in faults:
            print(f"  {fault}")
    browser.close()
sys.exit(wrong > 0)
