"""Channels: the ways to send alerts, and which of them the settings choose.

A channel is a module beside this one with a `Notifier`, and one line in `CHANNELS`; `smtp.py` is an
example. context.py asks here when alerts are sent, and embedded/doctor.py when everything is tried.

Next: alerts/alert.py says what a `Notifier` promises, and keeps mails until they are sent.
"""

from __future__ import annotations

from collections.abc import Callable

from seriatim.alerts import smtp
from seriatim.alerts.alert import NO_CHANNEL, Notifier
from seriatim.config import Settings

CHANNELS: tuple[Callable[[Settings], Notifier | None], ...] = (smtp.notifier_from_settings,)
"""Each makes its notifier from the settings, or gives None if they do not name its channel. All alerts
go through the first one that is set.
"""
NOT_SET_TEXT = f"{NO_CHANNEL}: alerts wait in the outbox"
NOT_SET_ADVICE = "set SERIATIM_SMTP=HOST:PORT"


def notifier(settings: Settings) -> Notifier | None:
    """Sends mails as the settings say; None if no channel is set."""
    for notifier_from_settings in CHANNELS:
        chosen_notifier = notifier_from_settings(settings)
        if chosen_notifier is not None:
            return chosen_notifier
    return None
