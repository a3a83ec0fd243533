"""Web: pages with the health of every stream, from the ledger's manifests and the status file alone.

A page asks neither Kafka nor Spark. `write_status.py` writes the status file at the end of a run or
of a watch. `read.py` reads what is on disk, `views.py` chooses what a page shows, and `render.py` makes
HTML of it with the templates. `app.py` serves the pages to users who may see the DAG.

Next: plugins/seriatim_page.py adds the pages to Airflow; cli/top.py shows the same in a terminal.
"""
