"""Schedules and addresses: what cron and a mail server would refuse is refused in the stream file."""

from __future__ import annotations

import pytest

from seriatim.schedule import describe_cron_error, is_mail_address


@pytest.mark.parametrize(
    "cron",
    [
        "",
        "* * * * *",
        "*/15 * * * *",
        "0 6 * * MON-FRI",
        "5,35 0-6/2 1 JAN 7",
        "59 23 31 12 0",
        "0 0 * * sun",
        "0 0 29 2 *",
        "0 0 31 */2 *",
        "0 0 31 FEB,MAR *",
        "0 0 30-31/1 4 *",
        "0 0 1/29 2 *",
    ],
)
def test_what_cron_takes_is_taken(cron: str) -> None:
    """Stars, steps, ranges, lists and names; empty is only by hand."""
    assert describe_cron_error(cron) == ""


@pytest.mark.parametrize(
    ("cron", "named"),
    [
        ("@daily", "fields"),
        ("* * * *", "fields"),
        ("* * * * * *", "fields"),
        ("60 * * * *", "minute"),
        ("* 24 * * *", "hour"),
        ("* * 0 * *", "day"),
        ("* * * 13 *", "month"),
        ("* * * * 8", "weekday"),
        ("*/0 * * * *", "minute"),
        ("9-5 * * * *", "minute"),
        ("*-5 * * * *", "minute"),
        ("* * * FOO *", "month"),
        ("MON * * * *", "minute"),
        ("$(id) * * * *", "minute"),
        ("*  * * * *", "fields"),
        ("0 0 31 2 *", "no day 31 in month 2"),
        ("0 0 30 FEB *", "no day 30 in month FEB"),
        ("0 0 31 4,6 *", "no day 31"),
        ("0 0 31 2,4 1", "no day 31"),
        ("24/12 */21 31 9/55 *", "no day 31"),
    ],
)
def test_what_cron_would_refuse_is_named(cron: str, named: str) -> None:
    """The field that is wrong, before Airflow sees it."""
    assert named in describe_cron_error(cron)


@pytest.mark.parametrize(
    "address", ["ops@example.org", "a.b+c@sub.example-1.org", "root@localhost"]
)
def test_an_address_is_an_address(address: str) -> None:
    """One mailbox at one host."""
    assert is_mail_address(address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "ops",
        "@x.org",
        "a@",
        "a b@x.org",
        "a@x.org\nBcc: b@y.org",
        "A <a@x.org>",
        "a@x.org,b@y.org",
        "a@-x",
    ],
)
def test_nothing_else_is(address: str) -> None:
    """No names, lists, or lines that would become headers."""
    assert not is_mail_address(address)
