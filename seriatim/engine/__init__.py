"""The engine: checks, decodes and folds the messages of one partition in order.

It is pure: no I/O, no clock, no Spark, no Arrow. Next: engine/task.py runs one partition's range,
engine/fold.py is the loop over messages.
"""
