"""The demo: sample data, a producer, a mail catcher, and the whole stack started by `make demo`."""
