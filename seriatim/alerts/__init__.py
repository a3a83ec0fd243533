"""Alerts: incidents, the outbox that loses none, mails."""
