"""The page room: every stream's health as HTML, from the ledger's manifests and the status file
alone. An edge.

A page asks neither Kafka nor Spark. `leave.py` writes the status file where a run or a watch ends;
`read.py` gathers what is on disk; `draw.py`, `streams.py`, `stream.py` and `entry.py` make HTML of
it; `app.py` serves it, to whoever may see the DAG.

Next room: plugins/seriatim_page.py joins it to Airflow; cli/top.py shows the same in a terminal.
"""
