"""The table of what works with what is that of the rules as they are."""

from what_works import PAGE, page


def test_the_table_is_what_the_rules_say():
    assert PAGE.read_text(encoding="utf-8") == page(), "run tools/what_works.py again"
