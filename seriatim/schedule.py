"""Schedules and addresses: what a stream file says of when and whom, checked before Airflow or a
mail server sees it.

Next room: stream.py asks; dags/streams.py and alerts/smtp.py rely on it.
"""

from __future__ import annotations

import re

CRON_FIELDS = (
    ("minute", 0, 59),
    ("hour", 0, 23),
    ("day", 1, 31),
    ("month", 1, 12),
    ("weekday", 0, 7),
)
CRON_NAMES = {
    "month": ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"),
    "weekday": ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"),
}
DAYS_OF_MONTHS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
"""Of each month, in a leap year."""
CRON_PART = re.compile(
    r"(?P<first>\*|[0-9]{1,2}|[A-Z]{3})(-(?P<last>[0-9]{1,2}|[A-Z]{3}))?(/(?P<step>[0-9]{1,2}))?"
)
MAIL_ADDRESS = re.compile(
    r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?"
)


def describe_cron_error(cron: str) -> str:
    """What is wrong with a cron text of five fields; empty: nothing. An empty text means: only by
    hand.
    """
    fields = cron.split(" ")
    if not cron:
        return ""
    if len(fields) != len(CRON_FIELDS):
        return f"{len(fields)} fields, not {len(CRON_FIELDS)}"
    for text, (name, least, most) in zip(fields, CRON_FIELDS, strict=True):
        if not all(_is_cron_part(part, name, least, most) for part in text.split(",")):
            return f"{name} is {text!r}, not in {least} to {most}"
    days, months = (_cron_values(fields[at], *CRON_FIELDS[at]) for at in (2, 3))
    if min(days) > max(
        DAYS_OF_MONTHS[month - 1] for month in months
    ):  # also beside a weekday: Airflow finds no next run
        return f"there is no day {fields[2]} in month {fields[3]}"
    return ""


def _is_cron_part(text: str, name: str, least: int, most: int) -> bool:
    found = CRON_PART.fullmatch(text.upper())
    if found is None or (found["first"] == "*" and found["last"]):
        return False
    ends = [
        _cron_number(one, name, least)
        for one in (found["first"], found["last"])
        if one and one != "*"
    ]
    rises = ends == sorted(ends)
    return (
        rises
        and all(least <= end <= most for end in ends)
        and (found["step"] is None or int(found["step"]) > 0)
    )


def _cron_values(text: str, name: str, least: int, most: int) -> set[int]:
    """All that a field means."""
    values = set[int]()
    for part in text.upper().split(","):
        begin, _, step = part.partition("/")
        first, _, last = begin.partition("-")
        start = least if first == "*" else _cron_number(first, name, least)
        end = _cron_number(last, name, least) if last else most if step or first == "*" else start
        values |= set(range(start, end + 1, int(step or 1)))
    return values


def _cron_number(text: str, name: str, least: int) -> int:
    """A number, or a month's or weekday's name; -1: neither."""
    if text.isdecimal():
        return int(text)
    named = CRON_NAMES.get(name, ())
    return named.index(text) + least if text in named else -1


def is_mail_address(text: str) -> bool:
    """Whether a mail can be sent there. One address and nothing else: no names, no lines, no lists."""
    return MAIL_ADDRESS.fullmatch(text) is not None
