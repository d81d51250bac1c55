"""The hashes in a page's policy are of the style and script that it holds; the whole page: test_page."""

import pytest
from jinja2 import UndefinedError

from aiayn import html


def test_a_value_that_is_missing_is_an_error_and_never_an_empty_place() -> None:
    with pytest.raises(UndefinedError):
        html.page("report.html", title="x")
