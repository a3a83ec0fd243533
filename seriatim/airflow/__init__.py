"""The Airflow room: operators, the trigger form and the alert callback that dags/ wires together.

An edge: it may know Airflow, settings and the command line's verbs, and imports nothing heavy,
since Airflow parses DAG files again and again. Every task runs a `seriatim` command in a process of
its own: the outcome that it leaves in a file becomes a typed error, which says whether a retry can
help.

Next room: dags/streams.py.
"""
