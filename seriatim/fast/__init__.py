"""The compiled fold: the stock table machine in compiled code, a whole batch of messages at a time.

It takes the usual messages and hands every other one to the plain machine, one by one, so that both
give the same records, state and findings on every input. numba compiles it and saves the compiled
code on disk.

Next: choose.py (which fold a task takes), ready.py (is it compiled?), parse.py (JSON to columns),
rows.py (the sessions' rows), packed_state.py (state bytes), table.py (the machine), fold.py (the
fold).
"""
