"""The hashes in a page's policy are of the style and script that it holds, and text is inert; whole: test_page."""

import base64
import hashlib
import re

import pytest
from jinja2 import UndefinedError

from aiayn.report import html_page

HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}'\""


def attention(**changed: object) -> str:
    """The smallest page that has values."""
    return html_page.page(
        "attention.html", **{"name": "x", "sentence": "y", "translation": "z", "kinds": {}, **changed}
    )


def sources(page: str, kind: str) -> set[str]:
    """What the policy allows of one kind."""
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    (allowed,) = re.findall(rf"(?:^|; ){kind}-src ([^;]*)", policy.replace("&#39;", "'"))
    return set(allowed.split())


def hashes(page: str, tag: str) -> set[str]:
    """Those of every element of a tag that the page holds, as a browser computes them."""
    found = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", page, re.DOTALL)
    return {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found}


@pytest.mark.parametrize("tag", ["style", "script"])
def test_the_policy_allows_exactly_the_style_and_the_script_that_the_page_holds(tag: str) -> None:
    page = attention()
    assert hashes(page, tag) == sources(page, tag)
    changed = page.replace(f"</{tag}>", f" </{tag}>")  # control: one more space is another style or script
    assert not hashes(changed, tag) & sources(changed, tag)


def test_nothing_else_may_run_or_be_fetched() -> None:
    page = attention()
    assert sources(page, "default") == {"'none'"}
    assert sources(page, "img") == {"data:"}
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    named = {part.split()[0] for part in policy.replace("&#39;", "'").split("; ")}
    assert named == {"default-src", "img-src", "style-src", "script-src", "base-uri", "form-action"}
    assert page.count("Content-Security-Policy") == 1
    assert "unsafe" not in policy


@pytest.mark.parametrize("place", ["name", "sentence", "translation"])
def test_a_value_stays_text_and_adds_no_element(place: str) -> None:
    page, plain = attention(**{place: HOSTILE}), attention()
    for tag in ("script", "img", "title"):
        assert page.count(f"<{tag}") == plain.count(f"<{tag}")
    assert "{{ 7 * 7 }}" in page
    assert "onerror=alert(1)&gt;" in page


def test_a_value_that_is_missing_is_an_error_and_never_an_empty_place() -> None:
    with pytest.raises(UndefinedError):
        html_page.page("report.html", title="x")
