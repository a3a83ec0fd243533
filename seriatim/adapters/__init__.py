"""One file per outside thing: each implements ports.py, and none imports another."""
