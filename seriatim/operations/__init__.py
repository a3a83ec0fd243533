"""What the product does: one module per command and DAG task, and packages for repair, proof and
inspection. They use the ports of ports.py and no libraries of the outside world.

Next: run.py is the main path; plan.py shows what a run would do.
"""
