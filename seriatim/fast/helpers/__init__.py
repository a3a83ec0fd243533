"""Spread: a hot partition's sessions over several processes (`parallelism = "session"`), with one
reader.

The task reads, proves and writes as ever; between, it hands each message to the helper whose
session it is. A session has one helper, so its order holds. What is not clean is folded again,
alone, by the plain fold: every rule about trouble is written once, there.

Next room: fold.py is the task's side; __main__.py the helper's.
"""
