"""A hot partition's sessions over several processes (`parallelism = "session"`), with one reader.

The task reads, proves and writes as ever. In between it sends each message to the helper process
that has its session. A session has one helper, so the order of its messages holds. If anything is
not clean, the whole task is folded again by the plain fold, in one process: every rule about
trouble is written once, there.

Next: fold.py is the task's side; helper_fold.py and __main__.py are the helper's.
"""
