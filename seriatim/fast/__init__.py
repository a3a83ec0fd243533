"""Bulk: the stock table machine, compiled. Decodes and folds whole stretches instead of one message
at a time.

It takes what is usual and hands everything else, message by message, to the plain machine, so that
both give the same records, state and findings on every input. numba compiles it from a wheel and
keeps what it compiled.

Next room: ready.py (is it compiled?), parse.py (JSON), rows.py (the sessions' rows), packed.py
(state bytes), table.py (the machine), fold.py (what wiring.py takes).
"""
