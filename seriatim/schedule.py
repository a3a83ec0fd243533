"""Schedules and mail addresses of stream files, checked before Airflow or a mail server sees them.

Next: stream.py calls this; dags/streams.py and alerts/smtp.py rely on it.
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
"""The number of days of each month, in a leap year."""
CRON_PART = re.compile(
    r"(?P<first>\*|[0-9]{1,2}|[A-Z]{3})(-(?P<last>[0-9]{1,2}|[A-Z]{3}))?(/(?P<step>[0-9]{1,2}))?"
)
"""One item of a field's list: a number or name, a range, each with a step or without."""
MAIL_ADDRESS = re.compile(
    r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?"
)


def describe_cron_error(cron: str) -> str:
    """What is wrong with a cron text of five fields; empty: nothing. An empty text is right: it means
    that runs are started by hand only.
    """
    if not cron:
        return ""
    texts = cron.split(" ")
    if len(texts) != len(CRON_FIELDS):
        return f"{len(texts)} fields, not {len(CRON_FIELDS)}"
    for text, (name, lowest, highest) in zip(texts, CRON_FIELDS, strict=True):
        for item in text.split(","):
            if not _is_cron_item(item, name, lowest, highest):
                return f"{name} is {text!r}, not in {lowest} to {highest}"
    day_text, month_text = texts[2:4]
    days = _cron_values(day_text, *CRON_FIELDS[2])
    months = _cron_values(month_text, *CRON_FIELDS[3])
    longest_month_days = max(DAYS_OF_MONTHS[month - 1] for month in months)
    # This is an error also where a weekday is given: Airflow finds no next run.
    if min(days) > longest_month_days:
        return f"there is no day {day_text} in month {month_text}"
    return ""


def _is_cron_item(text: str, name: str, lowest: int, highest: int) -> bool:
    """Whether one item of a field's list is right: known names, in bounds, a range that rises."""
    match = CRON_PART.fullmatch(text.upper())
    if match is None:
        return False
    if match["first"] == "*" and match["last"]:
        return False
    if match["step"] and int(match["step"]) == 0:
        return False
    number_texts = [text for text in (match["first"], match["last"]) if text and text != "*"]
    numbers = [_cron_number(number_text, name, lowest) for number_text in number_texts]
    is_rising = numbers == sorted(numbers)
    return is_rising and all(lowest <= number <= highest for number in numbers)


def _cron_values(text: str, name: str, lowest: int, highest: int) -> set[int]:
    """All values that a field stands for."""
    values: set[int] = set()
    for item in text.upper().split(","):
        bounds, _, step = item.partition("/")
        start_text, _, end_text = bounds.partition("-")
        start = lowest if start_text == "*" else _cron_number(start_text, name, lowest)
        if end_text:
            end = _cron_number(end_text, name, lowest)
        elif step or start_text == "*":
            end = highest
        else:
            end = start
        values.update(range(start, end + 1, int(step or 1)))
    return values


def _cron_number(text: str, name: str, lowest: int) -> int:
    """The value of a number or of the name of a month or weekday; -1: neither."""
    if text.isdecimal():
        return int(text)
    names = CRON_NAMES.get(name, ())
    return names.index(text) + lowest if text in names else -1


def is_mail_address(text: str) -> bool:
    """Whether a text is one mail address and nothing else: no display name, no list, no line break."""
    return MAIL_ADDRESS.fullmatch(text) is not None
