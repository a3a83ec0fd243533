"""The verbs. A module here is a CLI command and a DAG task of the same name, over ports only."""
