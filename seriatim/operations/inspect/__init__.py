"""Looking back: session replay, trace, bisect, explain, replay and diff."""
