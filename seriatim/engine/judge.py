"""Old address of names that engine/fold.py and engine/findings.py define."""

from seriatim.engine.findings import OnPoison as OnPoison
