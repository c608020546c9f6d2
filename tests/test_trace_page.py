"""The page of a trace in headless Chromium: every number on it is that of the JSON lines, and it is used as people do.

They are skipped where there is no Chromium; Debian's package `chromium` is enough.
"""

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from proposers import Branching, Moody, Right, Scattered, table_model
from traced import Nasty, Traced, traced

from ddtree import build_spine
from ddtree.trace import Trace, lines, page

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        made = started.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield made
        made.close()


class Opened:
    """A page in a browser, which fails if its script does or if it asks the network for anything."""

    def __init__(self, browser: Any, folder: Path, trace: Trace, **context: Any) -> None:
        file = folder / "trace.html"
        file.write_text(page(trace), encoding="utf-8")
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.tab = browser.new_context(**context).new_page()
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("console", lambda said: self.errors.append(said.text))
        self.tab.on("dialog", lambda box: self.errors.append(box.message))
        self.tab.on("request", lambda made: self.asked.append(made.url))
        self.tab.goto(file.as_uri())
        self.file = file
        assert not self.errors

    def all(self, script: str) -> Any:
        return self.tab.evaluate(script)

    def close(self) -> None:
        assert not self.errors and self.asked == [self.file.as_uri()]
        self.tab.context.close()


def objects(trace: Trace) -> dict[str, Any]:
    """The objects of the JSON lines as the page names them."""
    found: dict[str, Any] = {"rounds": []}
    for line in lines(trace):
        fields = json.loads(line)
        if fields["kind"] == "round":
            found["rounds"].append(fields)
        else:
            found[fields["kind"]] = fields
    return found


def at(found: Any, path: str) -> Any:
    for key in path.split("."):
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found


def shown(text: str) -> str:
    """Control characters as pictures."""
    hidden = {chr(i): chr(0x2400 + i) for i in range(32) if chr(i) not in "\n\t"} | {
        "\x7f": "\u2421",
        "\u202e": "\ufffd",
    }
    return text.translate(str.maketrans(hidden))


def check_numbers(opened: Opened, found: dict[str, Any]) -> int:
    """Fails unless every recorded number that is to be seen is the one in the lines; returns how many there are."""
    numbers = opened.all(
        "[...document.querySelectorAll('data')]"
        ".map(e => [e.dataset.from, Number(e.value), e.dataset.digits, e.textContent])"
    )
    for place, value, digits, text in numbers:
        true = at(found, place)
        assert value == true, place
        assert text == (str(int(true)) if float(true).is_integer() else f"{true:.{digits}f}") or (
            abs(float(text) - true) <= 0.5000001 * 10 ** -int(digits)
        ), place
    return len(numbers)


@pytest.mark.parametrize("maker", [Scattered, Moody, Branching])
def test_every_number_on_the_page_is_that_of_the_lines(browser: Any, tmp_path: Path, maker: type) -> None:
    made = traced(maker, count=60, build=build_spine)
    found = objects(made.trace)
    opened = Opened(browser, tmp_path, made.trace)
    opened.all("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    opened.tab.wait_for_function("[...document.querySelectorAll('#totals tbody')].every(e => e.children.length)")
    counts = {check_numbers(opened, found)}
    totals = found["end"]["totals"]
    rows = [len(totals[name]) for name in ("accepted_lengths", "by_depth", "by_rank", "calibration")]
    tables = opened.all("[...document.querySelectorAll('#totals tbody')].map(e => e.children.length)")
    assert tables == [len(found["rounds"]), *rows, len(found["end"]["figures"]["stage_seconds"])]
    firsts = opened.all("[...document.querySelectorAll('#totals tbody')].map(e => e.firstChild.firstChild.textContent)")
    assert firsts[:2] == ["0", min(totals["accepted_lengths"])]
    for number in range(len(found["rounds"])):
        assert (
            opened.all("document.getElementById('number').textContent")
            == f"{max(number, 1)} of {len(found['rounds']) - 1}"
        )
        check_round(opened, found, max(number, 1))
        counts.add(check_numbers(opened, found))
        if number:
            opened.tab.keyboard.press("ArrowRight")
    assert min(counts) > 100
    opened.close()


def check_round(opened: Opened, found: dict[str, Any], number: int) -> None:
    """The drawn tree is that of the round: tokens, probabilities, what became of each node, the target's choice."""
    each = found["rounds"][number]
    facts = opened.all(
        "Object.fromEntries([...document.querySelectorAll('#facts div')]"
        ".map(e => [...e.children].map(c => c.textContent)))"
    )
    assert (facts["drafted"], facts["emitted"]) == (str(len(each["nodes"]) - 1), str(len(each["tokens"])))
    nodes = opened.all(
        "[...document.querySelectorAll('#tree .node')].map(e => [Number(e.dataset.node), Number(e.dataset.token), "
        "e.getAttribute('class').split(' ')[1], e.querySelector('text').textContent])"
    )
    assert sorted(node for node, *_ in nodes) == list(range(len(each["nodes"]) + 1))
    spine = {0}
    for node, parent in enumerate(each["parents"]):
        if parent in spine and parent == max(spine) and node > 0:
            spine.add(node)
    for node, token, kind, text in nodes:
        if node == len(each["nodes"]):
            assert (token, kind) == (each["draws"][each["path"][-1]], "bonus")
            continue
        parent = each["parents"][node]
        taken = "spine" if node in spine else "branch"
        left = "sibling" if parent in each["path"] else "off"
        assert (token, kind) == (each["nodes"][node], "root" if node == 0 else taken if node in each["path"] else left)
        spelt = found["pieces"]["pieces"][str(token)]
        assert text == f"id {token}" if not spelt else len(text) <= 12 and "\n" not in text
    edges = dict(
        opened.all("[...document.querySelectorAll('#tree .probability')].map(e => [e.dataset.node, e.textContent])")
    )
    assert set(edges) == {str(node) for node in range(1, len(each["nodes"]))}
    for node, text in edges.items():
        log_prob = each["log_probs"][int(node)] - each["log_probs"][each["parents"][int(node)]]
        assert float(text) == pytest.approx(math.exp(log_prob), abs=0.005001)
    top = opened.all(
        "[...document.querySelectorAll('#tree .node')].filter(e => / 8\\)/.test(e.getAttribute('transform')))"
        ".map(e => Number(e.dataset.node))"
    )
    assert top == [*each["path"], len(each["nodes"])], "what was accepted runs along the top, the choice behind it"


def test_the_text_is_the_decoding_coloured_by_origin_whatever_it_spells(browser: Any, tmp_path: Path) -> None:
    model = table_model(9 * torch.eye(37).roll(1, 1))  # every id after the one before it
    made = traced(Scattered, count=100, model=model)
    found = objects(made.trace)
    opened = Opened(browser, tmp_path, made.trace)
    assert opened.all("document.getElementById('text').textContent") == shown(Nasty().text(made.ids))
    assert opened.all("document.getElementById('prompt').textContent") == shown(found["run"]["prompt"])
    tokens = opened.all(
        "[...document.querySelectorAll('#text .token')]"
        ".map(e => [e.textContent, e.classList[1], Number(e.dataset.round)])"
    )
    assert tokens == [
        [shown(text), origin, each["index"]]
        for each in found["rounds"]
        for text, origin in zip(each["texts"], each["origins"], strict=True)
    ]
    assert {origin for _, origin, _ in tokens} == {"plain", "spine", "branch", "bonus"}
    assert set(made.ids) == set(range(37)), "all spellings are written"
    assert opened.all("document.querySelector('#settings').textContent").count("</script>") == 1
    assert opened.all("document.getElementById('lines').textContent.trim()") == "\n".join(lines(made.trace))
    opened.close()


def test_mouse_and_keys_lead_to_every_round_and_node(browser: Any, tmp_path: Path) -> None:
    made = traced(Scattered, count=60)
    last = len(made.trace.rounds) - 1
    opened = Opened(browser, tmp_path, made.trace)
    tab, number = opened.tab, lambda: int(opened.all("document.getElementById('number').textContent.split(' ')[0]"))
    for key, place in (("End", last), ("ArrowRight", last), ("ArrowLeft", last - 1), ("Home", 0), ("ArrowLeft", 0)):
        tab.keyboard.press(key)
        assert number() == place
    assert "nothing drafted" in tab.inner_text("#tree")
    tab.click("#next")
    tab.click("#next")
    tab.click("#previous")
    assert number() == 1
    tab.locator(f'#text [data-round="{last - 2}"]').first.click()
    assert number() == last - 2
    assert opened.all("[...document.querySelectorAll('.token.current')].map(e => e.dataset.round)") == [
        str(last - 2)
    ] * len(made.trace.rounds[last - 2].tokens)
    tab.fill("#slider", "4")
    assert number() == 4
    each = made.trace.rounds[4]
    said = set()
    for _ in range(len(each.nodes) + 1):
        tab.keyboard.press("ArrowDown")
        said.add(tab.inner_text("#node"))
    assert len(said) == len(each.nodes) + 1 and any("the target’s choice at the leaf" in text for text in said)
    tab.hover('#tree .node[data-node="1"]')
    assert f"(id {each.nodes[1]})" in tab.inner_text("#node") and "depth 1, rank 0" in tab.inner_text("#node")
    chart = tab.locator("figure.wide svg")
    chart.click(position={"x": chart.bounding_box()["width"] - 12, "y": 60})
    assert number() == last
    opened.close()


def test_themes_follow_the_system_until_one_is_chosen(browser: Any, tmp_path: Path) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for scheme in ("light", "dark"):
        opened = Opened(browser, tmp_path, traced(Right, count=9).trace, color_scheme=scheme)
        seen[scheme] = opened.all(paper)
        for theme in ("light", "dark", "auto"):
            opened.tab.keyboard.press("t")
            assert opened.tab.inner_text("#theme") == f"theme: {theme}"
            seen[scheme, theme] = opened.all(paper)
        opened.close()
    assert seen["light"] != seen["dark"]
    for scheme in ("light", "dark"):
        assert [seen[scheme, theme] for theme in ("light", "dark", "auto")] == [
            seen["light"],
            seen["dark"],
            seen[scheme],
        ]


@pytest.mark.parametrize("width", [320, 420, 900, 1600])
def test_nothing_runs_out_of_the_window(browser: Any, tmp_path: Path, width: int) -> None:
    opened = Opened(browser, tmp_path, traced(Scattered, count=60).trace, viewport={"width": width, "height": 700})
    assert opened.all("document.documentElement.scrollWidth") <= width
    opened.close()


def long(made: Traced, count: int, nodes: int) -> Trace:
    """So many rounds with so many nodes each, whose ids and probabilities have as many digits as they can."""
    parents = [-1, *(max(node - 5, 0) for node in range(1, nodes + 1))]
    rounds = [
        dataclasses.replace(
            made.trace.rounds[2],
            index=index,
            length=100_000 + 8 * index,
            nodes=[(index * 7919 + 104729 * node) % 100_000 + 100_000 for node in range(nodes + 1)],
            parents=parents,
            log_probs=[0.0, *(round(-10 - 0.100003 * node, 6) for node in range(1, nodes + 1))],
            draws=[200_000 + node for node in range(nodes + 1)],
            path=[0, 1, 6, 11],
            tokens=[123_456] * 4,
            texts=["漢"] * 4,
            origins=["spine", "branch", "branch", "bonus"],
        )
        for index in range(1, count)
    ]
    used = {token for each in rounds for ids in (each.tokens, each.nodes, each.draws) for token in ids}
    return dataclasses.replace(
        made.trace, rounds=[made.trace.rounds[0], *rounds], pieces={token: f"some{token}" for token in used}
    )


def test_a_page_of_five_hundred_rounds_at_sixty_four_nodes_has_at_most_two_mebibytes() -> None:
    assert len(page(long(traced(Scattered), 500, 64)).encode()) <= 2**21


def test_no_label_runs_out_of_its_chart(browser: Any, tmp_path: Path) -> None:
    """Numbers of rounds have four digits here."""
    opened = Opened(browser, tmp_path, long(traced(Scattered), 2000, 16))
    out = opened.all(
        "[...document.querySelectorAll('#totals svg')].flatMap(svg => [...svg.querySelectorAll('text')].filter(e => {"
        "const box = e.getBBox(); return box.x < 0 || box.x + box.width > svg.viewBox.baseVal.width; })"
        ".map(e => e.textContent))"
    )
    assert out == [] and "1999" in opened.all("document.querySelector('figure.wide svg').textContent")
    opened.close()


def test_two_thousand_rounds_are_looked_through_without_waiting(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, tmp_path, long(traced(Scattered), 2000, 64))
    taken = opened.all("performance.now()")
    assert opened.all("document.querySelectorAll('#tree .node').length") == 66
    steps = opened.all(
        "(() => { const press = key => document.dispatchEvent(new KeyboardEvent('keydown', { key }));"
        "press('End'); press('Home'); const start = performance.now();"
        "for (let i = 0; i < 200; i += 1) { press('ArrowRight'); document.body.offsetHeight; }"
        "return performance.now() - start; })()"
    )
    assert opened.all("document.getElementById('number').textContent") == "200 of 1999"
    assert opened.all("document.querySelectorAll('#tree .node').length") == 66, "one tree is drawn, not all"
    assert steps / 200 < 250 and taken < 20_000  # ms, on a busy machine; far less on an idle one
    opened.close()
