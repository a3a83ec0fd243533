"""Alerts: incidents, the outbox that stores mails until they are sent, and the mails themselves."""
