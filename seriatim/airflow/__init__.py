"""Airflow: the operators, the trigger form and the failure callback of the DAGs in dags/.

This package may know Airflow, settings and the commands' verbs. It imports nothing heavy, since
Airflow parses DAG files again and again. Every task runs a `seriatim` command in a process of its
own. The outcome that the command writes to a file becomes a typed error, whose class says whether a
retry can help.

Next: dags/streams.py.
"""
