"""The page of a trace: model text stays text, nothing leaves the machine, and mouse, finger and keyboard all work."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, MISSING, Browser
from fabricated import HEADER, Row, trace_rows, write

import trace_page
import visualize

HOSTILE = ["</script><img src=x onerror=window.hacked=1>", "<!--<script>", "<b>bold</b>", "&lt;", "__DATA__", "__SCRIPT__",
           '"\'`\\', "\u2028", "\u202e", "]]>", "</noscript><img src=y onerror=window.hacked=2>", "\x00", "$&", "\\1"]


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


class TestPage:
    def test_trace_comes_back_whole(self) -> None:
        """Escaping for HTML changed the tokens that the page shows."""
        rows = trace_rows(HOSTILE)
        found = data_of(trace_page.build(HEADER, rows))
        assert found["rounds"] == json.loads(json.dumps(rows[:-1]))
        assert found["prompt"] == rows[-1]["prompt"]

    def test_markup_in_model_text_is_no_markup(self) -> None:
        """A token with </script> ended the data and the rest ran as HTML."""
        page, plain = trace_page.build(HEADER, trace_rows(HOSTILE)), trace_page.build(HEADER, trace_rows(["word"]))
        for tag in ("<script", "</script", "<img", "<b>", "<!--"):
            assert page.count(tag) == plain.count(tag)

    def test_placeholder_in_model_text_is_text(self) -> None:
        """The template was filled step by step: a model that wrote __SCRIPT__ got the script in its text."""
        page = trace_page.build(HEADER, trace_rows(["__SCRIPT__", "__DATA__"]))
        assert "__SCRIPT____DATA__" in page
        assert page.count("function drawRounds") == 1

    def test_needs_no_network(self) -> None:
        """A page with a font or script from elsewhere is blank without network, and tells others who reads it."""
        page = trace_page.build(HEADER, trace_rows())
        assert not re.search(r"https?://|url\(|@import|<link|src=", page)
        assert "default-src 'none'" in page

    def test_half_an_emoji_can_be_written(self, tmp_path: Path) -> None:
        """A token that is half a surrogate pair raised UnicodeEncodeError at the last step."""
        write(tmp_path / "t.jsonl", trace_rows(["\ud83d", "ok"]))
        page = trace_page.write(tmp_path / "t.jsonl", tmp_path / "new" / "t.html")
        assert data_of(page.read_text("utf-8"))["rounds"][0]["tokens"][0]["text"] == "\ud83d"

    def test_interrupted_trace_still_makes_a_page(self, tmp_path: Path) -> None:
        """Ctrl-C left no summary and half a line, and the page needed both."""
        write(tmp_path / "t.jsonl", trace_rows()[:5])
        with (tmp_path / "t.jsonl").open("a") as file:
            file.write('{"type": "round", "ind')
        assert visualize.main(["--trace", str(tmp_path / "t.jsonl"), "--output-dir", str(tmp_path)]) == 0
        assert len(data_of((tmp_path / "t.html").read_text("utf-8"))["rounds"]) == 5

    def test_rounds_in_order(self) -> None:
        """Rows that came in another order gave scrambled text."""
        rows = trace_rows()
        assert data_of(trace_page.build(HEADER, rows[::-1])) == data_of(trace_page.build(HEADER, rows))

    @pytest.mark.parametrize("rows", [[], [{"type": "summary", "text": ""}]])
    def test_file_without_rounds_is_refused(self, rows: list[Row]) -> None:
        """Another results file made an empty page and no error."""
        with pytest.raises(ValueError, match=r"no rounds.*run_spec\.py --trace"):
            trace_page.build(HEADER, rows)

    def test_missing_file_is_refused_with_the_remedy(self, tmp_path: Path) -> None:
        """Caught: 'No such file or directory', which does not say where a trace comes from."""
        for path in (tmp_path, tmp_path / "none.jsonl"):
            with pytest.raises(ValueError, match=r"is not a file; make a trace with: python run_spec\.py --trace"):
                trace_page.write(path, tmp_path / "page.html")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(MISSING)
    started = Browser(tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, made = tmp_path_factory.mktemp("pages"), {}
    for name, texts in (("usual", None), ("hostile", HOSTILE)):
        write(folder / f"{name}.jsonl", trace_rows(texts))
        made[name] = trace_page.write(folder / f"{name}.jsonl", folder / f"{name}.html")
    return made


SHOWN = "[...document.querySelectorAll('.token')].map((e) => e.textContent.replace(/↵/g, '')).join('')"
CURRENT = "Number(document.activeElement.dataset.index ?? -1)"
TROUBLE = ("Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening")


def addresses(browser: Browser) -> list[str]:
    return [event["params"]["request"]["url"] for event in browser.events
            if event.get("method") == "Network.requestWillBeSent"]


class TestInBrowser:
    @pytest.mark.parametrize("name", ["usual", "hostile"])
    def test_shows_text_runs_nothing_asks_nobody(self, browser: Browser, pages: dict[str, Path], name: str) -> None:
        """Markup in a token became an element whose handler ran."""
        browser.open(pages[name])
        rounds = data_of(pages[name].read_text("utf-8"))["rounds"]
        wanted = "".join(token["text"] or "∅" for row in rounds for token in row["tokens"])
        assert browser.value(SHOWN).replace("\x00", "") == wanted.replace("\x00", "")
        for number in range(len(HOSTILE)):  # the details of every text, alternatives included
            browser.value(f"document.querySelectorAll('.token')[{number}].click()")
        assert browser.value("document.querySelectorAll('img, b:not(#figures b), .token :not(.mark)').length") == 0
        assert browser.value("window.hacked === undefined")
        assert addresses(browser) == [pages[name].as_uri()]
        assert not [event for event in browser.events if event.get("method") in TROUBLE]

    def test_control_unescaped_page_is_caught(self, browser: Browser, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
        """The test above would pass on any page: without escaping and policy the same text must be seen to run."""
        monkeypatch.setattr(trace_page, "as_json", json.dumps)
        monkeypatch.setattr(trace_page, "policy", lambda *_: "default-src 'unsafe-inline'")
        (tmp_path / "open.html").write_text(trace_page.build(HEADER, trace_rows(HOSTILE)), "utf-8")
        browser.open(tmp_path / "open.html")
        assert browser.value("document.querySelectorAll('img').length") > 0

    def test_policy_alone_stops_a_handler(self, browser: Browser, pages: dict[str, Path]) -> None:
        """The policy allowed inline handlers, so that escaping was the only wall."""
        browser.open(pages["usual"])
        browser.value("document.body.insertAdjacentHTML('beforeend', '<button id=evil onclick=\"window.hacked=1\">x</button>')")
        browser.value("document.getElementById('evil').click()")
        assert browser.value("window.hacked === undefined")

    def test_arrow_keys_go_through_tokens_and_rounds(self, browser: Browser, pages: dict[str, Path]) -> None:
        """The page could only be used with a mouse."""
        browser.open(pages["usual"])
        browser.value("document.querySelector('.token').focus()")
        moves = []
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home", "ArrowUp", "ArrowDown"):
            browser.press(key)
            moves.append(browser.value(CURRENT))
        last = browser.value("document.querySelectorAll('.token').length") - 1
        assert moves == [1, 2, 1, last, last, 0, 0, 1]  # the first round, the prefill, has one token
        assert browser.value("document.querySelectorAll('.round.current').length") == 1
        assert "Round 1" in browser.value("document.getElementById('details').textContent")

    def test_rounds_have_keys_of_their_own(self, browser: Browser, pages: dict[str, Path]) -> None:
        """The timeline lost the focus to the text at the first key."""
        browser.open(pages["usual"])
        browser.value("document.querySelector('.round').focus()")
        for _ in range(3):
            browser.press("ArrowRight")
        assert browser.value("[...document.querySelectorAll('.round')].indexOf(document.activeElement)") == 3
        assert browser.value("document.querySelectorAll('.round').length") == 24

    def test_pointing_shows_a_tokens_numbers(self, browser: Browser, pages: dict[str, Path]) -> None:
        """Hover showed the numbers of another token, or none."""
        browser.open(pages["usual"])
        token = next(t for r in data_of(pages["usual"].read_text("utf-8"))["rounds"] for t in r["tokens"] if t["id"] == 3)
        browser.point('.token[data-index="3"]')
        text = browser.value("document.getElementById('details').textContent")
        assert f"{token['target_prob']:.3f}" in text
        assert f"{token['draft_confidence']:.3f}" in text
        browser.point("h1")
        assert "token 0" in browser.value("document.getElementById('details').textContent")  # back to the chosen one

    def test_filters_dim_and_are_skipped_by_keys(self, browser: Browser, pages: dict[str, Path]) -> None:
        """A filter hid tokens from the eye and left them in the keys' way."""
        browser.open(pages["usual"])
        browser.point("#filter-accepted", click=True)
        assert browser.value("document.querySelectorAll('.token.off').length") == browser.value(
            "document.querySelectorAll('.token.accepted').length") > 0
        browser.value("document.querySelector('.token').focus()")
        for _ in range(5):
            browser.press("ArrowRight")
            assert not browser.value("document.activeElement.classList.contains('accepted')")
        assert browser.value("getComputedStyle(document.querySelector('.rejected')).display") == "none"
        browser.point("#filter-rejections", click=True)
        assert browser.value("getComputedStyle(document.querySelector('.rejected')).display") != "none"

    @pytest.mark.parametrize("width", [1280, 400])
    def test_fits_the_window(self, browser: Browser, pages: dict[str, Path], width: int) -> None:
        """On a telephone the page was wider than the screen and the details lay below all text."""
        browser.open(pages["hostile"], width, 800)
        assert browser.value("document.documentElement.scrollWidth") <= width
        browser.point(".token", click=True)
        box = browser.value("(() => { const b = document.getElementById('details').getBoundingClientRect();"
                            "return [b.left, b.right, b.top]; })()")
        assert box[0] >= 0
        assert box[1] <= width
        assert box[2] < 800

    def test_dark_where_that_is_preferred(self, browser: Browser, pages: dict[str, Path]) -> None:
        """A white page at night; or dark text on dark ground, since only one of the two colours followed."""
        seen = {}
        for scheme in ("light", "dark"):
            browser.open(pages["usual"], scheme=scheme)
            seen[scheme] = [browser.value(f"getComputedStyle(document.body).{name}.match(/\\d+/g).slice(0, 3).map(Number)")
                            for name in ("backgroundColor", "color")]
        for scheme, sign in (("light", 1), ("dark", -1)):
            ground, ink = (sum(colour) for colour in seen[scheme])
            assert sign * (ground - ink) > 450
