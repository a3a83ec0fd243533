"""One module per command and DAG task; packages for repair, proof and inspection. They know ports,
not libraries.
"""
