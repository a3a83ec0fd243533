"""Channels: which one the settings choose, and what doctor says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from seriatim import context
from seriatim.alerts import channels
from seriatim.alerts.alert import Notifier
from seriatim.alerts.smtp import SmtpNotifier
from seriatim.config import Settings
from seriatim.embedded import doctor
from seriatim.memory.outgoing import MemoryNotifier


def _mail_check(settings: Settings) -> doctor.DoctorCheck:
    return doctor._run_check("mail", doctor.CHECKS["mail"], settings)


def test_all_users_get_the_first_channel_that_is_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A channel is one entry of the list: alerts go through it, and doctor tries it, too."""
    settings = Settings(home=tmp_path, streams=tmp_path, smtp="127.0.0.1:25")
    assert isinstance(context.notifier(settings), SmtpNotifier)
    memory_notifier = MemoryNotifier()
    monkeypatch.setattr(
        channels, "CHANNELS", (lambda _: None, lambda _: memory_notifier, *channels.CHANNELS)
    )
    assert context.notifier(settings) is memory_notifier
    assert _mail_check(settings) == doctor.DoctorCheck("mail", True, True, "memory")
    memory_notifier.is_down = True
    check = _mail_check(settings)
    assert (check.is_good, check.fix) == (False, "set `is_down` to False")


def test_without_a_channel_mails_wait_and_nothing_is_required(tmp_path: Path) -> None:
    """Doctor says how to set one."""
    settings = Settings(home=tmp_path, streams=tmp_path)
    no_notifier: Notifier | None = context.notifier(settings)
    assert no_notifier is None
    check = _mail_check(settings)
    assert not check.is_required
    assert check.description == "no way to send alerts is set: alerts wait in the outbox"
    assert "SERIATIM_SMTP" in check.fix
